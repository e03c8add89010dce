"""A batch in two halves, so that a device computes one of them while the host's kernels read keys for the other.

Each half is a forward of its own, in a thread and a stream of its own (docs/decisions/017). The first one stays where
its caller is, so that Ctrl-C ends it as it would end the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from magicpig_cli.cache.device import Device

T = TypeVar("T")


def dealt(weights: Sequence[int]) -> tuple[list[int], list[int]]:
    """Numbers of sequences in two halves of about the same weight, as many in the first, or one more."""
    halves: tuple[list[int], list[int]] = ([], [])
    order = sorted(range(len(weights)), key=lambda b: -weights[b])
    for place, b in enumerate(order):
        halves[place % 4 in (1, 2)].append(b)  # 0 1 1 0 0 1 1 0 …
    if len(halves[1]) > len(halves[0]):
        halves = halves[1], halves[0]
    return sorted(halves[0]), sorted(halves[1])


class Lanes:
    """Runs one piece of work, or two at the same time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._worker: ThreadPoolExecutor | None = None

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """What each of them returns. When this returns or raises nobody is at work any more, and what the caller's
        stream is given from then on begins after all that they have given to the device."""
        if len(works) == 1:
            return [works[0]()]
        first, second = works
        device = self._device
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="magicpig-half")
            self._stream = device.new_stream()
        before, after = device.new_event(), device.new_event()
        before.record(device.current_stream())

        def beside() -> T:
            with device.use(self._stream):
                self._stream.wait_event(before)
                try:
                    return second()
                finally:
                    after.record(self._stream)

        other: Future[T] = self._worker.submit(beside)
        try:
            one = first()
        finally:
            try:
                _until_done(other)
            finally:
                device.current_stream().wait_event(after)
        return [one, other.result()]


def _until_done(work: Future[T]) -> None:
    """Wait for it, however often somebody presses Ctrl-C meanwhile: it is a step, and its sequences are to be cut."""
    interrupted: KeyboardInterrupt | None = None
    while not work.done():
        try:
            wait([work])
        except KeyboardInterrupt as pressed:
            interrupted = pressed
    if interrupted is not None:
        raise interrupted
