"""Memory of large arrays: aligned, apart from each other, given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from magicpig_cli.kernels.memory import HUGE_PAGE_BYTES, Arena, aligned_bytes

SIZES = (1, 3, 64, 65, 1000, HUGE_PAGE_BYTES, Arena._PIECE - 1, Arena._PIECE + 1, 5)


def test_arrays_of_an_arena_do_not_touch_each_other():
    arena = Arena()
    arrays = [arena.array((size,), np.uint8) for size in SIZES]
    for number, array in enumerate(arrays):
        array.fill(number + 1)
    assert all((array == number + 1).all() for number, array in enumerate(arrays))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.int8])
def test_arrays_of_an_arena_begin_on_a_cache_line(dtype):
    arena = Arena()
    for shape in ((3, 5), (7,), (), (0, 4), (1, 1)):
        array = arena.array(shape, dtype)
        assert (array.shape, array.dtype, array.ctypes.data % 64) == (shape, dtype, 0)


def test_short_arrays_share_huge_pages():
    """The weights of a small model would each stay below one."""
    arena = Arena()
    pages = {arena.array((100_000,), np.uint8).ctypes.data // HUGE_PAGE_BYTES for _ in range(40)}
    assert len(pages) <= 3


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says what is resident there")
def test_an_array_outlives_its_arena_and_takes_its_memory_with_it():
    array = Arena().array((4 * HUGE_PAGE_BYTES,), np.uint8)
    array.fill(7)
    held = _resident()
    assert array.min() == array.max() == 7
    del array
    assert held - _resident() > 3 * HUGE_PAGE_BYTES


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_aligned_bytes_are_zero_and_aligned():
    memory = aligned_bytes(HUGE_PAGE_BYTES + 5)
    assert (len(memory), memory.ctypes.data % HUGE_PAGE_BYTES, memory.any()) == (HUGE_PAGE_BYTES + 5, 0, False)
