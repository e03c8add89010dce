"""Host memory for what is read again and again: 2 MiB aligned, huge pages where the system grants them.

An array keeps its mapping alive and gives it back to the system when the last view of it is gone. With huge pages that
is quick, and no decode step waits for it: 64 MiB in 0.2 ms, where 4 KiB pages take 3.9 ms (docs/decisions/004).

The first touch is not: 0.5 ms per 2 MiB, and up to 6 ms in a virtual machine whose host has to find the page. So what
a decode step will write to is touched by a worker thread before (`touch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
_FILLED = 0.75  # of a last page, for it to be a huge one: the rest of it is committed too
_SHARED_FROM = 128 << 10  # bytes; a short array would keep all of a shared piece


def aligned_bytes(size: int) -> np.ndarray:
    """`size` zero bytes starting at a multiple of 2 MiB, committed when first touched.

    Raises MemoryError where the system refuses them (a limit of the process, no overcommitment).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        area = mmap.mmap(-1, size + 2 * HUGE_PAGE_BYTES, flags=flags)
    except OSError as error:
        raise MemoryError(f"the system refuses another {size:,} bytes: {error.strerror}") from error
    raw = np.frombuffer(area, dtype=np.uint8)
    skip = -raw.ctypes.data % HUGE_PAGE_BYTES
    whole, rest = divmod(size, HUGE_PAGE_BYTES)
    if rest >= _FILLED * HUGE_PAGE_BYTES:
        whole += 1
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: 4 KiB pages work too
            area.madvise(mmap.MADV_HUGEPAGE, skip, whole * HUGE_PAGE_BYTES)
    return raw[skip : skip + size]


class Arena:
    """Arrays one behind the other, in pieces that live as long as any array in them.

    Most weights of a small model are shorter than a huge page, and so are the tables of a short prompt. Small pages
    cost a walk through the page tables every 4 KiB, in a virtual machine a walk through two (docs/decisions/005, 025).
    """

    _ALIGNMENT = 64  # bytes: a cache line

    def __init__(self, piece_bytes: int = 64 << 20) -> None:
        """piece_bytes: asked for at once; what is not written to is not committed."""
        self._piece_bytes = piece_bytes
        self._free = np.empty(0, dtype=np.uint8)
        self._lock = threading.Lock()

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array whose contents are not defined. Raises MemoryError."""
        array: np.ndarray = self._bytes(_size(shape, dtype)).view(dtype).reshape(shape)
        return array

    def _bytes(self, size: int) -> np.ndarray:
        if size >= self._piece_bytes:
            return aligned_bytes(size)
        with self._lock:
            if len(self._free) < size:
                self._free = aligned_bytes(self._piece_bytes)
            taken, self._free = self._free[:size], self._free[size + -size % self._ALIGNMENT :]
        return taken


_shared = Arena(2 * HUGE_PAGE_BYTES)  # short pieces, because arrays of all kinds share them


def kept_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose contents are not defined, for what is read again and again: see `kept_arrays`."""
    (array,) = kept_arrays((shape, dtype))
    return array


def kept_arrays(*kinds: tuple[tuple[int, ...], Any]) -> tuple[np.ndarray, ...]:
    """Arrays (shape, dtype) in one memory, which live and die together; their contents are not defined.

    Each begins on a cache line. From 2 MiB on they have huge pages of their own, from 128 KiB on they share some with
    others. Raises MemoryError.
    """
    starts = [0]
    for shape, dtype in kinds:
        starts.append(starts[-1] + -(-_size(shape, dtype) // Arena._ALIGNMENT) * Arena._ALIGNMENT)
    memory = _memory(starts[-1])
    return tuple(
        memory[start : start + _size(shape, dtype)].view(dtype).reshape(shape)
        for start, (shape, dtype) in zip(starts, kinds, strict=False)
    )


def _memory(size: int) -> np.ndarray:
    if size < _SHARED_FROM:
        alone = np.empty(size + Arena._ALIGNMENT, dtype=np.uint8)
        return alone[-alone.ctypes.data % Arena._ALIGNMENT :][:size]
    if size < HUGE_PAGE_BYTES:
        return _shared.array((size,), np.uint8)
    return aligned_bytes(size)


def _size(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * int(np.dtype(dtype).itemsize)


def touch(*arrays: np.ndarray, then: Callable[[], None] | None = None) -> Future[None]:
    """Have memory that nobody has written to yet committed by a worker; nobody may write to it until that is done.

    then: called by the worker afterwards.
    """
    return _worker().submit(_fill_with_zeros, arrays, then)


@cache
def _worker() -> ThreadPoolExecutor:
    """One thread for all: what it waits for is the system's memory, not a core."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="magicpig-memory")


def _fill_with_zeros(arrays: Sequence[np.ndarray], then: Callable[[], None] | None) -> None:
    for array in arrays:
        array.fill(0)  # does not hold the GIL
    if then is not None:
        then()


def give_back_freed() -> None:
    """Return to the system the pages that malloc has free and keeps; where it is not glibc's, nothing happens.

    glibc up to 2.37 does not find a hole again for an aligned block of the very size it had, which is what torch asks
    for in every layer and chunk. So the copies of a chunk's rows stayed behind: a prompt took twice its rows (24 MiB
    beside 22 per 1,024 tokens of the demo model). A call takes 3 to 12 ms after a chunk of 512 tokens.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # musl, macOS, Windows
        return None
