"""What the parts of attention exchange. Shapes: B sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim.

Where the window is on a device that the kernels cannot read, a decode step attends in parts (window, offloaded keys),
each giving a `Partial`; `merge` weighs them by exp(LSE). Elsewhere one call of the kernels does both.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Partial:
    """Softmax-normalised attention over a part of the keys.

    out: float32 [B, H, D]; lse: float32 [B, H], natural log of the sum of exp(logit), −inf where the part is empty
    (out is 0 there).
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitRule:
    """logit = scale·q·k, and with a soft cap c: c·tanh(scale·q·k / c)."""

    scale: float
    softcap: float | None = None


@dataclass(slots=True)
class StepRecorder:
    """Where the time of one decode step went and what was sampled; one per forward."""

    ns: dict[str, int] = field(default_factory=dict)  # stage (events.STAGES) → wall nanoseconds
    sampled: dict[int, list[int]] = field(default_factory=dict)  # layer → per sequence, summed over query heads
    offloaded: dict[int, list[int]] = field(default_factory=dict)
    errors: list[torch.Tensor] | None = None  # if a list: relative error of each sampled (sequence, head), per layer

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, time.perf_counter_ns() - begin)

    def add(self, name: str, nanoseconds: int) -> None:
        self.ns[name] = self.ns.get(name, 0) + nanoseconds
