"""Buffers that copies go through, two for each purpose of a thread, and who still uses them (`staging`)."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import torch

from magicpig_cli.cache.device import Device, Event
from magicpig_cli.cache.ring_shape import DEPTH, aligned


class Arrival:
    """Tensors on their way to the host."""

    def __init__(self, event: Event | None, tensors: list[torch.Tensor], then: Callable[..., None] | None) -> None:
        self._event, self._tensors, self._then = event, tensors, then
        self._lock = threading.Lock()

    def wait(self) -> list[torch.Tensor]:
        """The tensors in host memory, valid until DEPTH further ones have come for the same purpose."""
        self.settle()
        return self._tensors

    def settle(self) -> None:
        """Have them here, and what is to be done with them done: once, whoever asks."""
        with self._lock:
            if self._event is not None:
                self._event.synchronize()
                self._event = None
            if self._then is not None:
                self._then(*self._tensors)
                self._then = None  # only now: after an interrupt it is done again


class Slot:
    """One buffer of a ring on either side, and who still uses it."""

    def __init__(self, device: Device) -> None:
        self.host: torch.Tensor | None = None
        self.there: torch.Tensor | None = None
        self.copied = device.new_event()  # the last copy between the two, or straight from where rows lie
        self.used = device.new_event()  # what the computing stream had to do with `there`
        self.arrival: Arrival | None = None  # what came into `host` last
        self.sources: list[torch.Tensor] = []  # kept while they are copied

    def settle(self) -> None:
        """The host may use its side, and what it has sent."""
        if self.arrival is not None:
            self.arrival.settle()
            self.arrival = None
        self.copied.synchronize()
        self.sources.clear()


class Lane:
    """What one thread copies with."""

    def __init__(self, device: Device) -> None:
        self.there, self.back, self.own = device.new_stream(), device.new_stream(), device.new_stream()
        self.computed = device.new_event()
        self._device = device
        self._rings: dict[str, deque[Slot]] = {}

    def slot(self, purpose: str) -> Slot:
        """The buffer that was used least recently."""
        if purpose not in self._rings:
            self._rings[purpose] = deque(Slot(self._device) for _ in range(DEPTH))
        ring = self._rings[purpose]
        ring.rotate(-1)
        return ring[-1]

    def settle(self) -> None:
        for ring in self._rings.values():
            for slot in ring:
                slot.settle()


def parts_of(buffer: torch.Tensor, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of these types and shapes one after the other in a buffer of bytes."""
    parts, at = [], 0
    for tensor in like:
        parts.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += aligned(tensor.nbytes)
    return parts


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of a buffer that has room for all of them."""
    return sum(aligned(tensor.nbytes) for tensor in tensors)
