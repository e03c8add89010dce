"""Sink and most recent rows of one layer and sequence, on the device.

Which positions are in here depends on the length alone, not on the path that led to it: position p is in the window
iff p < sink or p ≥ boundary(length). The boundary moves in steps of `flush` rows, so that offloading is rare.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.device import Device
from magicpig_cli.cache.store import TORCH_DTYPE, as_array


@dataclass(frozen=True, slots=True)
class WindowShape:
    """Sizes in rows: the first `sink`, and between `local` and `local + flush` of the most recent."""

    sink: int
    local: int
    flush: int

    @property
    def capacity(self) -> int:
        return self.sink + self.local + self.flush

    def boundary(self, length: int) -> int:
        """First position of the recent part of a sequence of `length`; [sink, boundary) is offloaded."""
        moved = max(0, length - self.sink - self.local) // self.flush
        return self.sink + moved * self.flush

    def offloaded(self, length: int) -> int:
        """How many keys of a sequence of `length` are in the host store."""
        return self.boundary(length) - self.sink


class Window:
    """Rows [Hkv, sink + local + flush, 2, D] of a float type; `used` of them are valid, in order of position."""

    def __init__(
        self, shape: WindowShape, kv_heads: int, head_dim: int, dtype: kernels.RowType, device: Device
    ) -> None:
        self.shape = shape
        self._dtype, self._device = dtype, device
        self.rows = device.zeros((kv_heads, shape.capacity, 2, head_dim), TORCH_DTYPE[dtype])
        self.used = 0
        self.table: kernels.RowTable | None = None  # the same memory for the kernels, where they can reach it
        if device.on_host:
            self.table = kernels.RowTable(kv_heads, head_dim, dtype, shape.capacity)
            self.table.append_block(as_array(self.rows))

    @property
    def valid(self) -> torch.Tensor:
        """View [Hkv, used, 2, D]."""
        return self.rows[:, : self.used]

    def fork(self) -> Window:
        """A window with copies of the same rows."""
        kv_heads, _, _, head_dim = self.rows.shape
        fork = Window(self.shape, kv_heads, head_dim, self._dtype, self._device)
        fork.replace(self.valid)
        return fork

    def replace(self, *parts: torch.Tensor) -> None:
        """Hold exactly the rows of these parts [Hkv, n, 2, D], in order: copies, not views of this window."""
        count = 0
        for part in parts:
            self.rows[:, count : count + part.shape[1]] = part
            count += part.shape[1]
        self.used = count

    def append_one(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the row of key and value [Hkv, D], rounded; there must be room."""
        row = self.rows[:, self.used]  # [Hkv, 2, D]
        row[:, 0] = key
        row[:, 1] = value
        self.used += 1

    def append_here(self, key: np.ndarray, value: np.ndarray) -> None:
        """The same of a window in host memory, key and value float32: by the kernels, in a fifth of the time."""
        assert self.table is not None
        kernels.write_row(self.table, self.used, key, value)
        self.used += 1
