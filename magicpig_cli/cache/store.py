"""Rows of the offloaded keys of one layer and sequence, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.quantize import quantize
from magicpig_cli.cache.rings import Arrival
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


class Bring(Protocol):
    """Begins to bring rows [Hkv, T, 2, D] to the host, and has `then` called with them (`Staging.bring`)."""

    def __call__(self, *, then: Callable[[torch.Tensor], None]) -> Arrival: ...


Place = tuple[torch.Tensor, slice, slice]  # (block, which of its rows, which rows of what is written there)


class RowStore:
    """Rows [Hkv, length, 2, D] over blocks; row r belongs to position `sink + r` of the sequence.

    Rows of a device may still be on their way: whoever reads or moves rows waits for them first.

    An int8 store quantizes what it takes in and gives float32 back, the numbers that the kernels compute with. A row
    that was read from it, rounded to bfloat16 and appended again has the same bytes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.length = 0
        self._table = kernels.RowTable(pool.kv_heads, pool.head_dim, pool.dtype, pool.block_rows)
        self._pool = pool
        self._blocks: list[torch.Tensor] = []
        self._arrays: list[np.ndarray] = []  # the same, as the pool gave them
        self._next: tuple[np.ndarray, Future[None]] | None = None  # the block that comes next, and when it is ready
        self._arriving: list[Arrival] = []  # the rows that came last

    @property
    def table(self) -> kernels.RowTable:
        """The rows for the kernels."""
        self._settle()
        return self._table

    def _settle(self) -> None:
        """Have all rows here."""
        if self._arriving:
            settled = tuple(self._arriving)
            for arrival in settled:
                arrival.settle()
            self._arriving = [arrival for arrival in self._arriving if arrival not in settled]

    @property
    def block_bytes(self) -> int:
        return self._pool.block_bytes

    @property
    def nbytes(self) -> int:
        """Of all blocks as if nobody else held them, the one that is ready for further rows included."""
        return (len(self._blocks) + (self._next is not None)) * self._pool.block_bytes

    def append(self, rows: torch.Tensor) -> None:
        """Copy rows [Hkv, T, 2, D] to the end: of the row type, or of any float type into an int8 store."""
        self._write(self._room(rows.shape[1]), rows)

    def append_stored(self, rows: np.ndarray) -> None:
        """Copy rows [Hkv, T, 2, W] to the end as `stored` gives them."""
        self._put(self._room(rows.shape[1]), as_tensor(rows))

    def append_from(self, count: int, bring: Bring) -> None:
        """Copy `count` rows to the end as `append` does, but when they come: `bring` has them brought."""
        self._arriving.append(bring(then=partial(self._write, self._room(count))))

    def _write(self, places: list[Place], rows: torch.Tensor) -> None:
        self._put(places, quantize(rows) if self._pool.dtype == "int8" else rows)

    @staticmethod
    def _put(places: list[Place], rows: torch.Tensor) -> None:
        """Copy rows [Hkv, T, 2, W] to where there is room for them."""
        for block, there, here in places:
            block[:, there] = rows[:, here]

    def _room(self, count: int) -> list[Place]:
        """Be `count` rows longer, which are then to be written."""
        size = self._pool.block_rows
        places: list[Place] = []
        taken = 0
        while taken < count:
            index, offset = divmod(self.length, size)
            if index == len(self._blocks):
                self._add_block()
            elif self._pool.shared(self._arrays[index]):
                self._part_from_others(index, offset)
            step = min(size - offset, count - taken)
            places.append((self._blocks[index], slice(offset, offset + step), slice(taken, taken + step)))
            self.length += step
            taken += step
        self._make_ready()
        return places

    def _make_ready(self) -> None:
        """Have the next block touched beside, once half of the last one is used; `Plan.kv_bytes` counts it."""
        free = len(self._blocks) * self._pool.block_rows - self.length
        if not self._blocks or 2 * free > self._pool.block_rows:
            if self._next is not None:
                self._pool.give_back(self._ready_block())
        elif self._next is None:
            block = self._pool.take()
            self._next = block, touch(block, then=partial(self._pool.pin, block))

    def _add_block(self) -> None:
        """The block that was made ready, or a new one."""
        self._hold(self._new_block() if self._next is None else self._ready_block())

    def _new_block(self) -> np.ndarray:
        block = self._pool.take()
        self._pool.pin(block)
        return block

    def _hold(self, block: np.ndarray) -> None:
        self._blocks.append(as_tensor(block))
        self._arrays.append(block)
        self._table.append_block(block)

    def _part_from_others(self, index: int, rows: int) -> None:
        """Have a block of its own instead of one that others read, with the first `rows` rows of it."""
        shared, block = self._arrays[index], self._copy(index, rows)
        tensor = as_tensor(block)
        self._table.replace_block(index, block)
        self._blocks[index] = tensor
        self._arrays[index] = block
        self._pool.give_back(shared)

    def _copy(self, index: int, rows: int) -> np.ndarray:
        """A new block with the first `rows` rows of an old one."""
        block = self._new_block()
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
        self._settle()
        self.length = min(self.length, length)
        keep = -(-self.length // self._pool.block_rows)
        dropped = self._arrays[keep:]
        del self._blocks[keep:], self._arrays[keep:]
        self._table.drop_blocks(keep)
        for block in dropped:
            self._pool.give_back(block)
        self._make_ready()

    def stored(self, start: int, stop: int, at_most: int | None = None) -> Iterator[np.ndarray]:
        """Rows [start, stop) as they lie here, [Hkv, ≤ at_most, 2, W] of NUMPY_TYPE: views, never beyond a block."""
        self._settle()
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
        self._settle()
        fork = RowStore(self._pool)
        full, rest = divmod(self.length, self._pool.block_rows)
        for block in self._arrays[:full]:
            fork._hold(self._pool.share(block))
        if rest:
            fork._hold(self._copy(full, rest))
        fork.length = self.length
        fork._make_ready()
        return fork

    def lying(self, start: int, stop: int, at_most: int | None = None) -> Iterator[torch.Tensor]:
        """The same as tensors; `as_numbers` tells what int8 ones mean."""
        return map(as_tensor, self.stored(start, stop, at_most))

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
