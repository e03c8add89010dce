"""Rows of the offloaded keys of one layer and sequence, in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.quantize import quantize
from magicpig_cli.kernels.memory import touch

TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of rows that hold no scales


def as_tensor(block: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor; uint16 arrays hold bfloat16 bits."""
    # A tensor made inside inference mode could only be written to inside it, and rows are written from outside too.
    with torch.inference_mode(False):
        if block.dtype == np.uint16:
            return torch.from_numpy(block.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(block)


def as_array(rows: torch.Tensor) -> np.ndarray:
    """The same memory of a host tensor as the kernels take it."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(np.uint16)
    return rows.numpy()


class RowStore:
    """Rows [Hkv, length, 2, D] over blocks; row r belongs to position `sink + r` of the sequence.

    An int8 store quantizes what it takes in and gives float32 back, the numbers that the kernels compute with. A row
    that was read from it, rounded to bfloat16 and appended again has the same bytes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.table = kernels.RowTable(pool.kv_heads, pool.head_dim, pool.dtype, pool.block_rows)
        self.length = 0
        self._pool = pool
        self._blocks: list[torch.Tensor] = []
        self._arrays: list[np.ndarray] = []  # the same, as the pool gave them
        self._next: tuple[np.ndarray, Future[None]] | None = None  # the block that comes next, and when it is ready

    @property
    def nbytes(self) -> int:
        """Of all blocks as if nobody else held them, the one that is ready for further rows included."""
        return (len(self._blocks) + (self._next is not None)) * self._pool.block_bytes

    def append(self, rows: torch.Tensor) -> None:
        """Copy rows [Hkv, T, 2, D] to the end: of the row type, or of any float type into an int8 store."""
        self._take(quantize(rows) if self._pool.dtype == "int8" else rows)

    def append_stored(self, rows: np.ndarray) -> None:
        """Copy rows [Hkv, T, 2, W] to the end as `stored` gives them."""
        self._take(as_tensor(rows))

    def _take(self, rows: torch.Tensor) -> None:
        """Copy rows [Hkv, T, 2, W] to the end."""
        size = self._pool.block_rows
        taken, count = 0, rows.shape[1]
        while taken < count:
            index, offset = divmod(self.length, size)
            if index == len(self._blocks):
                self._add_block()
            elif self._pool.shared(self._arrays[index]):
                self._part_from_others(index, offset)
            step = min(size - offset, count - taken)
            self._blocks[index][:, offset : offset + step] = rows[:, taken : taken + step]
            self.length += step
            taken += step
        self._make_ready()

    def _make_ready(self) -> None:
        """Have the next block touched beside, once half of the last one is used; `Plan.kv_bytes` counts it."""
        free = len(self._blocks) * self._pool.block_rows - self.length
        if not self._blocks or 2 * free > self._pool.block_rows:
            if self._next is not None:
                self._pool.give_back(self._ready_block())
        elif self._next is None:
            block = self._pool.take()
            self._next = block, touch(block)

    def _add_block(self) -> None:
        """The block that was made ready, or a new one."""
        self._hold(self._pool.take() if self._next is None else self._ready_block())

    def _hold(self, block: np.ndarray) -> None:
        self._blocks.append(as_tensor(block))
        self._arrays.append(block)
        self.table.append_block(block)

    def _part_from_others(self, index: int, rows: int) -> None:
        """Have a block of its own instead of one that others read, with the first `rows` rows of it."""
        shared, block = self._arrays[index], self._copy(index, rows)
        tensor = as_tensor(block)
        self.table.replace_block(index, block)
        self._blocks[index] = tensor
        self._arrays[index] = block
        self._pool.give_back(shared)

    def _copy(self, index: int, rows: int) -> np.ndarray:
        """A new block with the first `rows` rows of an old one."""
        block = self._pool.take()
        block[:, :rows] = self._arrays[index][:, :rows]
        return block

    def _ready_block(self) -> np.ndarray:
        """The block that was made ready, which then is no longer the next one."""
        assert self._next is not None
        block, ready = self._next
        ready.result()
        self._next = None
        return block

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on; their blocks are given back."""
        self.length = min(self.length, length)
        keep = -(-self.length // self._pool.block_rows)
        dropped = self._arrays[keep:]
        del self._blocks[keep:], self._arrays[keep:]
        self.table.drop_blocks(keep)
        for block in dropped:
            self._pool.give_back(block)
        self._make_ready()

    def stored(self, start: int, stop: int, at_most: int | None = None) -> Iterator[np.ndarray]:
        """Rows [start, stop) as they lie here, [Hkv, ≤ at_most, 2, W] of NUMPY_TYPE: views, never beyond a block."""
        size = self._pool.block_rows
        while start < stop:
            index, offset = divmod(start, size)
            step = min(size - offset, stop - start, at_most or size)
            yield self._arrays[index][:, offset : offset + step]
            start += step

    def fork(self) -> RowStore:
        """A store with the same rows: it shares the blocks that are full, and has a copy of the last one if it is not.

        Both go on as if they were alone. `nbytes` of both is the same; the pool counts what they share once.
        """
        fork = RowStore(self._pool)
        full, rest = divmod(self.length, self._pool.block_rows)
        for block in self._arrays[:full]:
            fork._hold(self._pool.share(block))
        if rest:
            fork._hold(self._copy(full, rest))
        fork.length = self.length
        fork._make_ready()
        return fork

    def views(self, start: int, stop: int, at_most: int) -> Iterator[torch.Tensor]:
        """Rows [start, stop) as [Hkv, ≤ at_most, 2, D]: views without copying, or float32 copies of int8 rows."""
        for rows in self.stored(start, stop, at_most):
            yield as_tensor(kernels.widen(rows) if self._pool.dtype == "int8" else rows)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of rows [start, stop) as [Hkv, n, 2, D]."""
        pool = self._pool
        parts = list(self.views(start, stop, at_most=pool.block_rows))
        if not parts:
            return torch.empty(pool.kv_heads, 0, 2, pool.head_dim, dtype=TORCH_DTYPE.get(pool.dtype, torch.float32))
        return torch.cat(parts, dim=1)
