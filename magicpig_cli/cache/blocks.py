"""Blocks of host memory for rows: 2 MiB aligned, huge pages where the system grants them, never moved.

A row is K and V of one key side by side, so that a sampled key costs one contiguous read. Rows live in blocks
[Hkv, block_rows, 2, W] (W: see `kernels.rows`); a sequence that grows gets further blocks and nothing is copied. Blocks
are cut from larger slabs and need no bookkeeping: a slab's memory goes back to the system when the last view of it is
gone.

Memory that was never touched takes the system 0.5 ms per 2 MiB, and a virtual machine up to 6 ms, so a decode step must
not be the one that touches it first: a worker thread does, in good time (docs/decisions/004).
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np

from magicpig_cli.kernels import NUMPY_TYPE, RowType, row_bytes, row_width
from magicpig_cli.kernels.memory import aligned_bytes

_BLOCKS_PER_SLAB = 32


class BlockPool:
    """Cuts blocks [Hkv, block_rows, 2, W] of one shape from slabs."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: RowType, block_rows: int) -> None:
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.block_rows = block_rows
        self.block_bytes = kv_heads * block_rows * row_bytes(head_dim, dtype)
        self._shape = (kv_heads, block_rows, 2, row_width(head_dim, dtype))
        self._slab: np.ndarray | None = None
        self._next = 0

    def take(self) -> np.ndarray:
        """A fresh zeroed block [Hkv, block_rows, 2, W]: float32, uint16 holding bfloat16 bits, or int8 with scales."""
        if self._slab is None or self._next == _BLOCKS_PER_SLAB:
            self._slab = aligned_bytes(self.block_bytes * _BLOCKS_PER_SLAB)
            self._next = 0
        start = self._next * self.block_bytes
        self._next += 1
        return self._slab[start : start + self.block_bytes].view(NUMPY_TYPE[self.dtype]).reshape(self._shape)

    def prepare(self) -> Future[np.ndarray]:
        """A block as from `take`, all of it touched, once it is done."""
        return _worker().submit(_touched, self.take())


@cache
def _worker() -> ThreadPoolExecutor:
    """One thread for all pools: what it waits for is the system's memory, not a core."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="magicpig-blocks")


def _touched(block: np.ndarray) -> np.ndarray:
    block.fill(0)  # without the GIL
    return block
