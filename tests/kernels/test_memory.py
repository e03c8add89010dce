"""Memory of large arrays: aligned, apart from each other, given back."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from magicpig_cli.kernels.memory import HUGE_PAGE_BYTES, Arena, aligned_bytes, kept_array, kept_arrays

with_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no transparent huge pages"
)
SIZES = (1, 3, 64, 65, 1000, HUGE_PAGE_BYTES, (64 << 20) - 1, (64 << 20) + 1, 5)


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


def test_threads_get_arrays_of_their_own():
    arena = Arena()

    def fill(number: int) -> list[np.ndarray]:
        arrays = [arena.array((777,), np.uint8) for _ in range(500)]
        for array in arrays:
            array.fill(number)
        return arrays

    with ThreadPoolExecutor(4) as pool:
        for number, arrays in enumerate(pool.map(fill, range(4))):
            assert all((array == number).all() for array in arrays)


@pytest.mark.parametrize("rows", [0, 1, 1_000, 30_000, 200_000, 2_000_000])
def test_arrays_that_are_kept_together_lie_apart_and_on_cache_lines(rows):
    arrays = kept_arrays(((3, rows), np.uint16), ((rows, 5), np.uint8), ((2,), np.float32))
    assert [(a.shape, a.dtype) for a in arrays] == [((3, rows), np.uint16), ((rows, 5), np.uint8), ((2,), np.float32)]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        array.fill(number + 1)
    assert all((array == number + 1).all() for number, array in enumerate(arrays))


@with_huge_pages
@pytest.mark.parametrize("size", [128 << 10, 1 << 20, HUGE_PAGE_BYTES, 8 << 20])
def test_kept_arrays_may_lie_on_huge_pages_though_they_be_shorter(size):
    assert _may_be_huge(kept_array((size,), np.uint8))


@with_huge_pages
def test_a_last_page_that_is_nearly_filled_may_be_huge():
    for rest, huge in ((0, True), (HUGE_PAGE_BYTES // 4, False), (HUGE_PAGE_BYTES * 7 // 8, True)):
        memory = aligned_bytes(2 * HUGE_PAGE_BYTES + rest)
        assert (_may_be_huge(memory[:1]), _may_be_huge(memory[-1:])) == (True, huge)


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


def _may_be_huge(array: np.ndarray) -> bool:
    """Whether the system was asked for huge pages where an array ends."""
    last = array.ctypes.data + array.nbytes - 1
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= last < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping holds the array")


def test_aligned_bytes_are_zero_and_aligned():
    memory = aligned_bytes(HUGE_PAGE_BYTES + 5)
    assert (len(memory), memory.ctypes.data % HUGE_PAGE_BYTES, memory.any()) == (HUGE_PAGE_BYTES + 5, 0, False)
