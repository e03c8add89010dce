"""When the GPU works and when the CPU's kernels do: intervals of both, and how much of them lies on top of each other.

torch's profiler tells what ran on the GPU; calls of the attention kernels are timed at their door, in whatever thread
they happen. One event that both have seen brings the two clocks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from magicpig_cli import kernels

Interval = tuple[float, float]  # begin and end, in milliseconds of one clock

_ANCHOR = "magicpig: both clocks"
_DOORS = ("lsh_attend", "exact_attend", "rabitq_attend", "rabitq_lookup")  # of `kernels`, as far as there are
_COPIES = ("Memcpy", "Memset")  # what the profiler calls them


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, ascending."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Milliseconds of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def common(a: list[Interval], b: list[Interval]) -> float:
    """Milliseconds that are in both, each without overlaps of its own."""
    return length(a) + length(b) - length(union([*a, *b]))


@dataclass(frozen=True, slots=True)
class Overlap:
    """What several steps did, in milliseconds of all of them together."""

    wall_ms: float
    gpu: list[Interval]  # kernels on the GPU
    copies: list[Interval]  # to it and from it
    cpu: list[Interval]  # the attention kernels on the CPU

    @property
    def percent(self) -> float | None:
        """Share of the CPU kernels' time in which the GPU computed or copied; None where one of them did nothing."""
        busy = union([*self.gpu, *self.copies])
        return 100 * common(busy, self.cpu) / length(self.cpu) if busy and self.cpu else None

    def as_json(self) -> dict[str, float | None]:
        busy = length(union([*self.gpu, *self.copies]))
        return {
            "percent": self.percent,
            "wall_ms": self.wall_ms,
            "gpu_kernels_ms": length(self.gpu),
            "copies_ms": length(self.copies),
            "cpu_kernels_ms": length(self.cpu),
            "gpu_idle_percent": 100 * (1 - busy / self.wall_ms) if busy else None,
        }


def measure_overlap(steps: Callable[[], None]) -> Overlap:
    """Run `steps` under the profiler, which slows them down: shares mean something, times less."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler, _doors_timed() as calls:
        begin = time.perf_counter()
        with record_function(_ANCHOR):
            pass
        steps()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - begin)
    events = list(profiler.events() or ())
    anchor = next(event.time_range.start for event in events if event.name == _ANCHOR) / 1e3
    device = [event for event in events if event.device_type.name == "CUDA"]
    copies = [event for event in device if event.name.startswith(_COPIES)]
    kernels_ = [event for event in device if not event.name.startswith((*_COPIES, _ANCHOR))]
    shifted = [(1e3 * (start - begin) + anchor, 1e3 * (end - begin) + anchor) for start, end in calls]
    return Overlap(wall, union(map(_interval, kernels_)), union(map(_interval, copies)), union(shifted))


def _interval(event: Any) -> Interval:
    return event.time_range.start / 1e3, event.time_range.end / 1e3


@contextmanager
def _doors_timed() -> Iterator[list[tuple[float, float]]]:
    """(begin, end) of every call of the attention kernels meanwhile, by time.perf_counter."""
    calls: list[tuple[float, float]] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                calls.append((begin, time.perf_counter()))

        return run

    own = {name: getattr(kernels, name) for name in _DOORS if hasattr(kernels, name)}
    try:
        for name, call in own.items():
            setattr(kernels, name, timed(call))
        yield calls
    finally:
        for name, call in own.items():
            setattr(kernels, name, call)
