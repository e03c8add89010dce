"""The one place where tensors cross between host and device, beside what both compute.

    there:  host rows ──> pinned buffer ──copy──> buffer on the device ──event──> the stream that computes
    back:   the stream that computes ──event──> copy ──> pinned buffer ──event──> the host

Each thread has a stream for each direction, so copies of one kind never wait for the other, and rings of two buffers
for each purpose: while one is used the next one is copied. Buffers grow when more is asked of them and are kept, so a
steady state allocates nothing. Where pinning is refused buffers are ordinary memory: copies then take the host's time,
and nothing else changes. On a CPU run both sides are the same memory and nothing is copied.

`settle` ends what a thread has begun. Nothing is under way outside of a forward: rows may be cut or forgotten there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from magicpig_cli.cache.device import Device, Event, Host
from magicpig_cli.cache.ring_shape import DEPTH, PUT_BYTES
from magicpig_cli.cache.rings import Arrival, Lane, Slot, bytes_of, parts_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Kept:
    """Tensors on a device, the memory that they are parts of, and when they are there."""

    memory: torch.Tensor
    tensors: list[torch.Tensor]
    come: Event


class Staging:
    """Copies between host memory and a device, begun by any thread; each has lanes of its own."""

    def __init__(self, device: torch.device | Device) -> None:
        self.device = device_of(device) if isinstance(device, torch.device) else device
        self.on_host = self.device.on_host
        self._notices: list[str] = []
        self._threads = threading.local()
        self._spare: list[Lane] = []  # of those that were apart
        self._pins = True  # until it is refused

    def new_notices(self) -> list[str]:
        """What had to be done differently from what was planned, since this was last asked."""
        fresh, self._notices = self._notices, []
        return fresh

    # --- at once ---

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy there, or the tensor itself on a CPU; the host waits."""
        return self.device.to_device(tensor)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same back. It waits for everything before it: not for what a decode step does in every layer."""
        return self.device.to_host(tensor)

    # --- beside ---

    def bring(
        self, purpose: str, *tensors: torch.Tensor, then: Callable[..., None] | None = None, room: int = 0
    ) -> Arrival:
        """Have tensors of the device come to the host, as they will be after what was given to this thread's stream.

        then: called with them when they are here, by whoever waits first, or before their buffer is used again; room:
        bytes that the buffer has at least, so that it need not grow.
        """
        if self.on_host:
            arrival = Arrival(None, list(tensors), then)
            if then is not None:
                arrival.settle()
            return arrival
        lane, device = self._lane, self.device
        slot = lane.slot(purpose)
        here = parts_of(self._host_side(slot, max(bytes_of(tensors), room)), tensors)
        packed = [tensor.contiguous() for tensor in tensors]
        lane.computed.record(device.current_stream())
        lane.back.wait_event(lane.computed)
        for target, source in zip(here, packed, strict=True):
            device.copy(target, source, lane.back)
        slot.copied.record(lane.back)
        slot.arrival = Arrival(slot.copied, here, then)
        return slot.arrival

    @contextmanager
    def sent(self, purpose: str, *tensors: torch.Tensor, room: int = 0) -> Iterator[list[torch.Tensor]]:
        """Copies on the device of tensors of the host, which may be changed at once. room: as `bring` has it.

        They are valid inside, for what is given to this thread's stream there.
        """
        if self.on_host:
            yield list(tensors)
            return
        slot = self._lane.slot(purpose)
        there = self._packed(slot, tensors, room)
        self.device.current_stream().wait_event(slot.copied)
        try:
            yield there
        finally:
            slot.used.record(self.device.current_stream())

    def stream(
        self, purpose: str, rows: Iterable[tuple[T, torch.Tensor]], room: int = 0
    ) -> Iterator[tuple[T, torch.Tensor]]:
        """Labelled tensors of the host on the device, in order; each is valid until the next one is taken.

        While one is used the next one is copied: straight from where it lies if that is pinned and contiguous. Until
        `settle` nobody may change what was. room: bytes that buffers have at least, so that they need not grow.
        """
        if self.on_host:
            yield from rows
            return
        ahead: deque[tuple[T, Slot, torch.Tensor]] = deque()
        for label, tensor in rows:
            slot = self._lane.slot(purpose)
            ahead.append((label, slot, self._straight_or_packed(slot, tensor, room)))
            if len(ahead) == DEPTH:
                yield from self._one(*ahead.popleft())
        while ahead:
            yield from self._one(*ahead.popleft())

    def _one(self, label: T, slot: Slot, there: torch.Tensor) -> Iterator[tuple[T, torch.Tensor]]:
        """Give out a copy; when the next one is asked for, or none is, this one has been used."""
        self.device.current_stream().wait_event(slot.copied)
        try:
            yield label, there
        finally:
            slot.used.record(self.device.current_stream())

    def put(self, purpose: str, *tensors: torch.Tensor) -> Kept:
        """Copies on the device that stay there, in memory of their own; never on a CPU.

        The tensors may be changed at once. Raises torch.OutOfMemoryError.
        """
        lane, device = self._lane, self.device
        with torch.inference_mode(False):  # as in `store.as_tensor`
            kept = device.buffer(bytes_of(tensors))
        come = device.new_event()
        come.record(device.current_stream())  # what this memory was until now may still be in use there
        lane.there.wait_event(come)
        there = parts_of(kept, tensors)
        for target, source in zip(there, tensors, strict=True):
            to, of = (tensor.view(-1).view(torch.uint8) for tensor in (target, source))
            for first in range(0, len(of), PUT_BYTES):
                slot = lane.slot(purpose)
                piece = of[first : first + PUT_BYTES]
                host = self._host_side(slot, PUT_BYTES)[: len(piece)]
                host.copy_(piece)
                device.copy(to[first : first + PUT_BYTES], host, lane.there)
                slot.copied.record(lane.there)
        come.record(lane.there)
        return Kept(kept, there, come)

    def settle(self) -> None:
        """Wait for every copy that this thread has begun, and have done what was to be done with it."""
        if not self.on_host:
            self._lane.settle()

    def mark(self) -> Event | None:
        """A timed event of this moment in this thread's stream; None on a CPU."""
        if self.on_host:
            return None
        event = self.device.new_event(timed=True)
        event.record(self.device.current_stream())
        return event

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Compute beside all others in this thread: in another stream, with other buffers, kept for the next one.

        What is read must be there already. What was begun inside is done when it is left.
        """
        if self.on_host:
            yield
            return
        before = getattr(self._threads, "lane", None)
        try:
            lane = self._spare.pop()
        except IndexError:
            lane = Lane(self.device)
        self._threads.lane = lane
        try:
            with self.device.use(lane.own):
                yield
        finally:
            self._threads.lane = before
            lane.settle()
            lane.computed.record(lane.own)
            lane.computed.synchronize()
            self._spare.append(lane)  # not after an interrupt: it may be at work

    # --- pinning ---

    def pin(self, memory: np.ndarray) -> None:
        """Let copies go straight out of this memory, if that is granted, until the last array over it is gone."""
        if self.on_host or not self._pins:
            return
        address, owner = memory.ctypes.data, memory
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if self.device.pin(address, memory.nbytes):
            ending = weakref.finalize(owner, self.device.unpin, address)
            ending.atexit = False  # type: ignore[misc]  # CUDA may be gone by then
        else:
            self._refused()

    def notice(self, text: str) -> None:
        """Have this said to the user (`new_notices`)."""
        self._notices.append(text)

    def _refused(self) -> None:
        """Said once; from then on nothing is asked for."""
        if self._pins:
            self._pins = False
            self.notice("the system refuses pinned memory: copies to and from the GPU are slower")

    # --- buffers ---

    @property
    def _lane(self) -> Lane:
        lane: Lane | None = getattr(self._threads, "lane", None)
        if lane is None:
            self._threads.lane = lane = Lane(self.device)
        return lane

    def _host_side(self, slot: Slot, size: int) -> torch.Tensor:
        """At least `size` bytes of host memory, which nobody else uses."""
        slot.settle()
        if slot.host is None or len(slot.host) < size:
            slot.host = None
            with torch.inference_mode(False):  # as in `store.as_tensor`
                slot.host = self._pinned_buffer(size)
        return slot.host

    def _pinned_buffer(self, size: int) -> torch.Tensor:
        if self._pins:
            try:
                return self.device.pinned_buffer(size)
            except RuntimeError:
                self._refused()
        return torch.empty(size, dtype=torch.uint8)

    def _device_side(self, slot: Slot, size: int) -> torch.Tensor:
        """At least `size` bytes of the device, that copies may be written to after `slot.used`."""
        if slot.there is None or len(slot.there) < size:
            slot.there = None
            with torch.inference_mode(False):
                slot.there = self.device.buffer(size)
            slot.used.record(self.device.current_stream())  # what it was until now may still be in use there
        return slot.there

    def _packed(self, slot: Slot, tensors: Iterable[torch.Tensor], room: int = 0) -> list[torch.Tensor]:
        """Tensors of the device, that are there when `slot.copied` has come: one copy, by way of the pinned side."""
        tensors = list(tensors)
        size = bytes_of(tensors)
        host = self._host_side(slot, max(size, room))
        there = self._device_side(slot, max(size, room))
        for target, tensor in zip(parts_of(host, tensors), tensors, strict=True):
            target.copy_(tensor)
        self._copy_there(slot, there[:size], host[:size])
        return parts_of(there, tensors)

    def _straight_or_packed(self, slot: Slot, tensor: torch.Tensor, room: int) -> torch.Tensor:
        if not (tensor.is_contiguous() and self.device.is_pinned(tensor)):
            return self._packed(slot, [tensor], room)[0]
        (there,) = parts_of(self._device_side(slot, max(tensor.nbytes, room)), [tensor])
        slot.sources.append(tensor)
        self._copy_there(slot, there, tensor)
        return there

    def _copy_there(self, slot: Slot, target: torch.Tensor, source: torch.Tensor) -> None:
        lane = self._lane
        lane.there.wait_event(slot.used)
        self.device.copy(target, source, lane.there)
        slot.copied.record(lane.there)


def device_of(device: torch.device) -> Device:
    """What torch calls so, as `Device` has it."""
    if device.type == "cuda":
        from magicpig_cli.cache.cuda import CudaDevice

        return CudaDevice(device)
    host: Any = Host()
    return host  # type: ignore[no-any-return]
