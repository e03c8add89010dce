"""Host memory for large arrays: 2 MiB aligned, huge pages where the system grants them, zero until it is written.

An array keeps its mapping alive and gives it back to the system when the last view of it is gone. With huge pages that
is quick, and no decode step waits for it: 64 MiB in 0.2 ms, where 4 KiB pages take 3.9 ms (docs/decisions/004).

The first touch is not: 0.5 ms per 2 MiB, and up to 6 ms in a virtual machine whose host has to find the page. So what
a decode step will write to is touched by a worker thread before (`touch`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2 << 20


def aligned_bytes(size: int) -> np.ndarray:
    """`size` zero bytes starting at a multiple of 2 MiB, committed when first touched.

    Raises MemoryError where the system refuses them (a limit of the process, no overcommitment).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        area = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=flags)
    except OSError as error:
        raise MemoryError(f"the system refuses another {size:,} bytes: {error.strerror}") from error
    raw = np.frombuffer(area, dtype=np.uint8)
    skip = -raw.ctypes.data % HUGE_PAGE_BYTES
    whole = size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES  # a page that is not filled would commit more than was asked for
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages: 4 KiB pages work too
            area.madvise(mmap.MADV_HUGEPAGE, skip, whole)
    return raw[skip : skip + size]


def large_array(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose contents are not defined; on memory of its own from 2 MiB on."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size < HUGE_PAGE_BYTES:
        return np.empty(shape, dtype=dtype)
    array: np.ndarray = aligned_bytes(size).view(dtype).reshape(shape)
    return array


class Arena:
    """Arrays one behind the other, in pieces that live as long as any array in them: most weights of a small model are
    shorter than a huge page. Small pages cost a walk through the page tables every 4 KiB, in a virtual machine a walk
    through two (docs/decisions/005)."""

    _ALIGNMENT = 64  # bytes: a cache line
    _PIECE = 64 << 20  # bytes asked for at once; what is not written to is not committed

    def __init__(self) -> None:
        self._free = np.empty(0, dtype=np.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array whose contents are not defined. Raises MemoryError."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if size >= self._PIECE:
            alone: np.ndarray = aligned_bytes(size).view(dtype).reshape(shape)
            return alone
        if len(self._free) < size:
            self._free = aligned_bytes(self._PIECE)
        taken, self._free = self._free[:size], self._free[size + -size % self._ALIGNMENT :]
        array: np.ndarray = taken.view(dtype).reshape(shape)
        return array


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
