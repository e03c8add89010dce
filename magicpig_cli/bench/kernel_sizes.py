"""Names and sizes of what `scripts/bench_kernels.py` measures; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

LONG, MIDDLE, REAL, REAL_LONG = "d128_n96k_2pct", "d128_n16k_2pct", "d64_n8k_real", "d64_n24k_real"
CASES = (LONG, MIDDLE, REAL, REAL_LONG)
PARTS = (*CASES, "bandwidth", "scaling", "build", "append", "int8")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    long: int = 96 << 10  # rows
    middle: int = 16 << 10
    real: int = 8 << 10  # tokens of each capture
    kv_heads: int = 8
    group: int = 4
    real_layers: tuple[int, ...] = tuple(range(1, 30, 3))  # the first layer is dense
    steps: int = 4  # different queries of a case
    appended: int = 32 << 10
    reps: int = 15
    cold_bytes: int | None = None  # written between calls; None: several times the last-level cache


QUICK = Sizes(
    long=4096, middle=2048, real=768, kv_heads=2, real_layers=(1, 16), appended=384, reps=2, cold_bytes=1 << 20
)  # fmt: skip
