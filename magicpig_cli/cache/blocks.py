"""Blocks of host memory for rows: 2 MiB aligned, huge pages where the system grants them, never moved.

A row is K and V of one key side by side, so that a sampled key costs one contiguous read. Rows live in blocks
[Hkv, block_rows, 2, W] (W: see `kernels.rows`); a sequence that grows gets further blocks and nothing is copied. Blocks
are cut from larger slabs, whose memory goes back to the system when the last view of them is gone. A sequence that is
cut gives its blocks back, since the others of their slabs may live long: answers taken back and generated again would
take new memory each time.
"""

from __future__ import annotations

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
        self._free: dict[int, list[np.ndarray]] = {}  # blocks given back, by slab

    def take(self) -> np.ndarray:
        """A block [Hkv, block_rows, 2, W]: float32, uint16 holding bfloat16 bits, or int8 with scales.

        Zeroed if it is new; one that was given back holds what it held.
        """
        if self._free:
            slab, blocks = next(iter(self._free.items()))
            block = blocks.pop()
            if not blocks:
                del self._free[slab]
            return block
        if self._slab is None or self._next == _BLOCKS_PER_SLAB:
            self._slab = aligned_bytes(self.block_bytes * _BLOCKS_PER_SLAB)
            self._next = 0
        start = self._next * self.block_bytes
        self._next += 1
        return self._slab[start : start + self.block_bytes].view(NUMPY_TYPE[self.dtype]).reshape(self._shape)

    def give_back(self, block: np.ndarray) -> None:
        """Have a block handed out again, which nobody may read or write any more; a whole slab goes to the system."""
        blocks = self._free.setdefault(id(block.base), [])
        blocks.append(block)
        if len(blocks) == _BLOCKS_PER_SLAB:
            del self._free[id(block.base)]
