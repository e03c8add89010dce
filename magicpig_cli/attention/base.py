"""What the parts of attention exchange. Shapes: B sequences, H query heads, Hkv KV heads, G = H / Hkv, D head dim.

Where the window is on a device that the kernels cannot read, a decode step attends in parts (window, offloaded keys),
each giving a `Partial`; `merge` weighs them by exp(LSE). Elsewhere one call of the kernels does both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.device import Event
from magicpig_cli.cache.layer import LayerCache, Run
from magicpig_cli.cache.staging import Staging


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


@dataclass(frozen=True, slots=True)
class Late:
    """Of a layer whose estimate was merged on a device: errors of the estimate, and what the device makes of them."""

    layer: int
    indexes: list[Index | None]  # per sequence; None = not sampled
    error: np.ndarray  # float32 [B, H], of the estimate
    share: torch.Tensor  # float32 [B, H] on the device (`merge.share_of`)


@dataclass(slots=True)
class StepRecorder:
    """Where the time of one decode step went and what was sampled; one per forward."""

    ns: dict[str, int] = field(default_factory=dict)  # stage (events.STAGES) → wall nanoseconds
    sampled: dict[int, list[int]] = field(default_factory=dict)  # layer → per sequence, summed over query heads
    offloaded: dict[int, list[int]] = field(default_factory=dict)
    # layer → per sequence, over query heads; None where nothing was sampled:
    squares: dict[int, list[float | None]] = field(default_factory=dict)  # mean square of the estimated relative error
    budgets: dict[int, list[float | None]] = field(default_factory=dict)  # mean budget
    errors: list[torch.Tensor] | None = None  # if a list: relative error of each sampled (sequence, head), per layer
    waited_ns: int = 0  # until a device had queries, or rows for them; part of no stage
    device_ns: dict[str, int] = field(default_factory=dict)  # stage → what the device took for it, beside the host
    lessons: list[tuple[Index, np.ndarray]] = field(default_factory=list)  # estimated errors [H], of `Attention.learn`
    late: list[Late] = field(default_factory=list)  # what `Attention.finish` has to wait for
    marks: list[tuple[str, Event, Event]] = field(default_factory=list)  # stage, and when the device began and ended it

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, time.perf_counter_ns() - begin)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The host has nothing to do before a device has something for it."""
        begin = time.perf_counter_ns()
        yield
        self.waited_ns += time.perf_counter_ns() - begin

    def add(self, name: str, nanoseconds: int) -> None:
        self.ns[name] = self.ns.get(name, 0) + nanoseconds

    @contextmanager
    def on_device(self, name: str, staging: Staging) -> Iterator[None]:
        """A stage that the host only gives to the device: both times are kept."""
        begin = staging.mark()
        with self.stage(name):
            yield
        end = staging.mark()
        if begin is not None and end is not None:
            self.marks.append((name, begin, end))

    def read_marks(self) -> None:
        """Wait for the last of them, and add up what the device took."""
        if self.marks:
            self.marks[-1][2].synchronize()
        for name, begin, end in self.marks:
            self.device_ns[name] = self.device_ns.get(name, 0) + int(begin.elapsed_time(end) * 1e6)
        self.marks.clear()


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a sampler makes of the offloaded keys, and of the rows that it attends exactly beside them. On the host."""

    out: np.ndarray  # float32 [B, H, D], as in `Partial`
    lse: np.ndarray  # float32 [B, H]
    sampled: np.ndarray  # int64 [B, H], keys
    error: np.ndarray | None  # float32 [B, H], ‖õ − o‖ / ‖o‖ as the sampled keys tell it; None = not estimated
    budget: np.ndarray | None = None  # float32 [B, H], share of the keys that was to be sampled, where there is one

    @property
    def partial(self) -> Partial:
        return Partial(torch.from_numpy(self.out), torch.from_numpy(self.lse))


class Sampler(Protocol):
    """A way to estimate attention over offloaded keys: how they are indexed, and what is read of them."""

    name: str

    def new_index(self, layer: int, cache: LayerCache) -> Index:
        """An index of the layer's store, without rows."""
        ...

    def restored(self, layer: int, cache: LayerCache, saved: IndexReader) -> Index:
        """The index in a file, over the layer's store. Raises MagicpigError if it is not one of this sampler."""
        ...

    def on_device(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What a device computes of its queries float32 [B, H, D], to come to the host with them; never on a CPU."""
        ...

    def built(self, index: Index) -> None:
        """Told of an index that a prompt is complete in, before steps sample from it."""
        ...

    def found_there(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        sampled: Sequence[bool], turn: Lock,
    ) -> Callable[[], Sequence[kernels.Reached | None]] | None:  # fmt: skip
        """Have a device find the keys of these queries float32 [B, H, D]; called, the result waits for them.

        None: `attend` finds them. turn: held while the kernels are at work.
        """
        ...

    def attend(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        exact: list[list[Run]] | None = None, sampled: Sequence[bool] | None = None,
        computed: Sequence[torch.Tensor] = (), reached: Sequence[kernels.Reached | None] | None = None,
    ) -> Estimate:  # fmt: skip
        """Estimate attention over the indexed keys: q float32 [B, H, D].

        exact: per sequence, runs of rows in host memory that are attended exactly and merged in; sampled: which
        sequences have more than these (None = all); computed: what `on_device` gave, in host memory; reached: what
        `found_there` gave.
        """
        ...

    def learn(self, index: Index, error: np.ndarray) -> None:
        """Told the estimated relative error [H] of the step that has just sampled from an index, where there is one."""
        ...

    def forget(self, layer: int) -> None:
        """Let go of what is drawn for a layer; it is drawn again, the same, when it is needed."""
        ...


def as_estimate(done: kernels.Sampled, record: StepRecorder, budget: np.ndarray | None) -> Estimate:
    """What a kernel has found; its times are recorded."""
    spent = sum(done.stage_ns.values()) or 1
    for stage, nanoseconds in done.stage_ns.items():  # of all threads: share out the wall time
        record.add(stage, done.wall_ns * nanoseconds // spent)
    return Estimate(done.out, done.lse, done.sampled, done.error, budget)
