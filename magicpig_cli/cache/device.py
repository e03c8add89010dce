"""What a device can do, as far as `staging` asks: memory, streams, events, and copies that nobody waits for.

A stream does what it is given in order, beside the host and beside other streams. An event marks how far a stream has
come; the host, or another stream, can wait for it. `cuda.py` is the device that is meant. A CPU is one whose memory is
the host's: there nothing is copied, and there is nothing to wait for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A moment of a stream; until it was recorded once, one that has passed."""

    def record(self, stream: Any) -> None:
        """From now on it is the moment when all that the stream was given so far is done."""
        ...

    def synchronize(self) -> None:
        """The host sleeps until it has come."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to another one; both are timed and have come."""
        ...


class Stream(Protocol):
    """A queue of work."""

    def wait_event(self, event: Any) -> None:
        """What it is given from now on begins after the event, as that was last recorded."""
        ...


class Device(Protocol):
    """Who computes, and whose memory holds weights and windows."""

    on_host: bool  # its memory is the host's

    def new_stream(self) -> Stream: ...

    def current_stream(self) -> Stream:
        """The one that torch's operators of this thread go to."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Have torch's operators of this thread go to a stream."""
        ...

    def new_event(self, *, timed: bool = False) -> Event: ...

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """On the device. Raises torch.OutOfMemoryError."""
        ...

    def buffer(self, size: int) -> torch.Tensor:
        """uint8 [size] on the device, contents undefined. Raises torch.OutOfMemoryError."""
        ...

    def pinned_buffer(self, size: int) -> torch.Tensor:
        """uint8 [size] in host memory that copies need not go round about. Raises RuntimeError where it is refused."""
        ...

    def pin(self, address: int, size: int) -> bool:
        """Make memory of the host such memory, if the system lets us; it must outlive `unpin`."""
        ...

    def unpin(self, address: int) -> None: ...

    def is_pinned(self, tensor: torch.Tensor) -> bool: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        """Give a stream a copy between host and device, both contiguous and of one type, and do not wait for it.

        Memory of the device is not given to anybody else before that is done. Who changes either side on the host, or
        in another stream, waits.
        """
        ...

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the device; the host waits."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory; the host waits until all before it is done."""
        ...


class Host:
    """The CPU as a device. What only others can do is never asked of it."""

    on_host = True

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: on the CPU nothing is copied")


def contiguous_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise ValueError for a copy that torch would do in several steps, some of which wait."""
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError("copy: want contiguous memory on both sides")
    if target.dtype != source.dtype or target.shape != source.shape:
        raise ValueError(f"copy: want {target.dtype} {tuple(target.shape)}, got {source.dtype} {tuple(source.shape)}")
