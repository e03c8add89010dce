"""Blocks of host memory for rows: 2 MiB aligned, huge pages where the system grants them, never moved.

A row is K and V of one key side by side, so that a sampled key costs one contiguous read. Rows live in blocks
[Hkv, block_rows, 2, W] (W: see `kernels.rows`); a sequence that grows gets further blocks and nothing is copied. Blocks
are cut from slabs, whose memory goes back to the system when all blocks of them have been given back.

A block may have several holders, each with an array of its own over the same memory, so that sequences that begin
alike hold its rows once. Who is not its only holder must not write to it. A holder gives it back, or forgets the array:
what an interrupt loses on its way to somebody is found again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from magicpig_cli.kernels import NUMPY_TYPE, RowType, row_bytes, row_width
from magicpig_cli.kernels.memory import HUGE_PAGE_BYTES, aligned_bytes

# A slab that one block keeps alive is memory that nobody can use but this pool. Small slabs lose less: with 8 blocks of
# 768 KiB (the demo model) a batch of very different lengths keeps 2.6% more than it uses, with 32 blocks 16%, whichever
# slab is used first (docs/decisions/010-shared-rows.md). A slab costs up to three mappings, of which a process may have
# 65,530: hence the share of what is in use.
_SMALLEST_SLAB = 4 << 20  # bytes
_LARGEST_ROUNDING = 16 << 20  # bytes: no slab is made as large as that to fill its last huge page
_SLABS_PER_POOL = 1024  # a slab has at most one in so many of the blocks in use, or is of the smallest size


class _Slab:
    """Memory for some blocks, and how many hold each of them."""

    def __init__(self, count: int, block_bytes: int) -> None:
        self.memory = aligned_bytes(count * block_bytes)
        self.holders = [0] * count
        self.used = 0  # blocks that somebody holds
        self.pinned = False  # or that was asked for


class _Hold(weakref.ref):  # type: ignore[type-arg]  # not subscriptable at run time in Python 3.10
    """One holder's array of a block, as long as there is that array."""

    __slots__ = ("ended", "key", "number", "slab")
    key: int  # id of the array
    slab: _Slab
    number: int
    ended: bool  # given back: that the array is then forgotten too means nothing


class BlockPool:
    """Hands out blocks [Hkv, block_rows, 2, W] of one shape, and knows who holds them."""

    def __init__(
        self, kv_heads: int, head_dim: int, dtype: RowType, block_rows: int,
        pin: Callable[[np.ndarray], None] | None = None,
    ) -> None:  # fmt: skip
        """pin: lets a device copy straight out of a slab, which takes milliseconds (`Staging.pin`)."""
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.block_rows = block_rows
        self.block_bytes = kv_heads * block_rows * row_bytes(head_dim, dtype)
        self._shape = (kv_heads, block_rows, 2, row_width(head_dim, dtype))
        self._pin = pin
        self._slabs: dict[_Slab, None] = {}  # all of which a block is held, the oldest first
        self._open: dict[_Slab, None] = {}  # those with blocks that nobody holds
        self._holds: dict[int, _Hold] = {}  # by id of the array
        self._lost: deque[_Hold] = deque()  # whose arrays were forgotten
        self._used = 0  # blocks that somebody holds, of all slabs
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that somebody holds, each counted once."""
        with self._lock:
            self._collect()
            return self._used * self.block_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of all slabs: what is held, and what is kept for blocks to come because others of a slab are held."""
        with self._lock:
            self._collect()
            return sum(slab.memory.nbytes for slab in self._slabs)

    def take(self) -> np.ndarray:
        """A block [Hkv, block_rows, 2, W] for its first holder: float32, uint16 with bfloat16 bits, or scaled int8.

        Zeroed if it is new; one that was given back holds what it held.
        """
        with self._lock:
            self._collect()
            slab = next(iter(self._open), None) or self._new_slab()
            return self._hand_out(slab, slab.holders.index(0))

    def share(self, block: np.ndarray) -> np.ndarray:
        """The same block for one more holder: another array over the same memory, to be read only."""
        with self._lock:
            hold = self._hold(block)
            return self._hand_out(hold.slab, hold.number)

    def pin(self, block: np.ndarray) -> None:
        """Have copies of a block go straight to a device, where there is one that grants it."""
        if self._pin is None:
            return
        with self._lock:
            slab = self._hold(block).slab
            asked, slab.pinned = slab.pinned, True
        if not asked:
            self._pin(slab.memory)

    def shared(self, block: np.ndarray) -> bool:
        """Whether others hold this block too."""
        with self._lock:
            self._collect()
            hold = self._hold(block)
            return hold.slab.holders[hold.number] > 1

    def give_back(self, block: np.ndarray) -> None:
        """One holder needs it no longer. The last one makes it free; a slab without holders goes to the system."""
        with self._lock:
            self._collect()
            self._end(self._hold(block))

    def _hold(self, block: np.ndarray) -> _Hold:
        hold = self._holds.get(id(block))
        if hold is None or hold() is not block:
            raise ValueError("block: want one that was handed out and has not been given back")
        return hold

    def _hand_out(self, slab: _Slab, number: int) -> np.ndarray:
        start = number * self.block_bytes
        memory = slab.memory[start : start + self.block_bytes]
        block: np.ndarray = memory.view(NUMPY_TYPE[self.dtype]).reshape(self._shape)
        hold = _Hold(block, self._lost.append)
        hold.key, hold.slab, hold.number, hold.ended = id(block), slab, number, False
        slab.holders[number] += 1
        if slab.holders[number] == 1:
            slab.used += 1
            self._used += 1
            if slab.used == len(slab.holders):
                self._open.pop(slab, None)
        self._holds[hold.key] = hold
        return block

    def _end(self, hold: _Hold) -> None:
        slab = hold.slab
        hold.ended = True
        if self._holds.get(hold.key) is hold:  # of a forgotten array another one may have the id by now
            del self._holds[hold.key]
        slab.holders[hold.number] -= 1
        if slab.holders[hold.number] == 0:
            slab.used -= 1
            self._used -= 1
            self._open[slab] = None
            if not slab.used:
                del self._open[slab], self._slabs[slab]

    def _collect(self) -> None:
        """Take back what was forgotten. (A callback may come at any moment, so it only notes it.)"""
        while self._lost:
            hold = self._lost.popleft()
            if not hold.ended:
                self._end(hold)

    def _new_slab(self) -> _Slab:
        whole = HUGE_PAGE_BYTES // math.gcd(HUGE_PAGE_BYTES, self.block_bytes)  # blocks that fill huge pages
        if whole * self.block_bytes > _LARGEST_ROUNDING:
            whole = 1
        share = self._used // _SLABS_PER_POOL
        wanted = max(share, -(-_SMALLEST_SLAB // self.block_bytes))
        slab = _Slab(-(-wanted // whole) * whole, self.block_bytes)
        self._slabs[slab] = None
        self._open[slab] = None
        return slab
