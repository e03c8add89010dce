"""Timing of short calls that ratios are made of: cold caches, variants taking turns, medians."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from magicpig_cli.hardware import cache_bytes
from magicpig_cli.kernels.memory import HUGE_PAGE_BYTES, aligned_bytes

_CLAIM_BYTES = 256 << 20
_COLD_FACTOR = 4  # times the L3 that are streamed between calls: a victim cache keeps some of what is read once


def l3_bytes(root: Path = Path("/")) -> int:
    """Size of the last-level cache of the first CPU."""
    return cache_bytes(root, cpus=(0,))


class ColdCache:
    """Called between two measurements, it streams a buffer larger than the L3 so that nothing of before is left."""

    def __init__(self, size_bytes: int | None = None) -> None:
        self._buffer = np.zeros((size_bytes or _COLD_FACTOR * l3_bytes()) // 8, dtype=np.int64)

    def __call__(self) -> None:
        self._buffer += 1  # written, not only read: lines of others are driven out on every cache policy


def claim_memory(size_bytes: int) -> None:
    """Touch that much memory and give it back, so that what is allocated next is there at once.

    In a virtual machine the host commits a page when it is first touched, and may have taken it back meanwhile: 2 MiB
    took 4.4 ms then and 0.2 ms ever after. That is the machine's doing, and hides what the code does.
    """
    parts = [aligned_bytes(_CLAIM_BYTES) for _ in range(-(-size_bytes // _CLAIM_BYTES))]
    for part in parts:
        part[:: HUGE_PAGE_BYTES // 512] = 1  # every page of 4 KiB, where there are no larger ones


@dataclass(frozen=True, slots=True)
class Timed:
    """One call: wall time, and what it returned."""

    ns: int
    result: Any


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's collector takes up to 0.1 s with torch loaded, and always at the same allocation: keep it out."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interleave(
    variants: Mapping[str, Callable[[int], Any]], reps: int, between: Callable[[str], object], warmup: int = 1
) -> dict[str, list[Timed]]:
    """Call every variant with 0, 1, … reps − 1, taking turns (A B C A B C …); between(name) comes before each call.

    `warmup` untimed rounds come first: page faults, lazily packed operands, thread pools.
    """
    samples: dict[str, list[Timed]] = {name: [] for name in variants}
    with no_collection():
        for rep in range(-warmup, reps):
            for name, call in variants.items():
                between(name)
                begin = time.perf_counter_ns()
                result = call(max(rep, 0))
                spent = time.perf_counter_ns() - begin
                if rep >= 0:
                    samples[name].append(Timed(spent, result))
    return samples


def median_ns(samples: list[Timed]) -> float:
    """Median wall time of one variant."""
    return float(np.median([sample.ns for sample in samples]))
