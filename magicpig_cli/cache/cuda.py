"""A CUDA device as `device.Device` has it: everything that this program asks of CUDA while it runs, in one place.

Used as torch documents it: copies to and from pinned memory with non_blocking on streams of their own, events that the
host sleeps for (blocking), `record_stream` for what another stream than its own still uses.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from magicpig_cli.cache.device import contiguous_copy


class CudaDevice:
    """`device` has type cuda; without an index it is the current one."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.torch = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch)

    def use(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)  # of this thread, and makes the stream's device its current one

    def new_event(self, *, timed: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.torch)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.torch)

    def pinned_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def pin(self, address: int, size: int) -> bool:
        with torch.cuda.device(self.torch):  # a thread that has none yet would open a context on the first one
            if int(_cudart().cudaHostRegister(address, size, 0)) == 0:
                return True
            with contextlib.suppress(RuntimeError):  # the refusal would be reported by the next kernel of this thread
                torch.zeros(1, device=self.torch)
        return False

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self.torch):
            _cudart().cudaHostUnregister(address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
        contiguous_copy(target, source)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        (target if target.is_cuda else source).record_stream(stream)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")


def _cudart() -> Any:
    """CUDA's own functions, as far as torch hands them on."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
