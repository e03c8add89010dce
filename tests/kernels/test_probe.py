"""Bandwidth probes read what they are told to, and refuse what is not there."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli import kernels
from tests.kernels.data import ROW_TYPES, make_rows, make_table


@pytest.mark.parametrize("size", [1, 63, 64, 1_000, (1 << 20) + 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_sequential_read_takes_time(isa, size, threads):
    assert kernels.read_sequential(np.ones(size, dtype=np.uint8), threads) > 0


@pytest.mark.parametrize("size", [256, 1 << 20, (1 << 21) + 5 * 256])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_read(isa, size, threads):
    """Whole numbers: their sum is the same in every order."""
    numbers = (np.arange(size // 4) % 7).astype(np.float32)
    assert kernels.isa.backend().read_sequential(numbers.view(np.uint8), threads)[1] == numbers.sum()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_listed_rows_are_read(isa, threads):
    numbers = np.random.default_rng(0).integers(-9, 9, (2, 70, 2, 64)).astype(np.float32)
    table = make_table(numbers, block_rows=32)
    for rows in ([0], [69], list(range(70)), [3, 31, 32, 64]):
        total = kernels.isa.backend().read_rows(table, 1, np.array(rows, dtype=np.int64), threads)[1]
        assert total == numbers[1, rows].sum()


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_read_in_any_number(isa, dtype, threads):
    table = make_table(make_rows(2, 70, 20), dtype, block_rows=32)
    for rows in ([0], [69], list(range(70)), [3, 31, 32, 64]):
        assert kernels.read_rows(table, 1, np.array(rows, dtype=np.int64), threads) > 0


def test_rows_outside_are_refused():
    table = make_table(make_rows(1, 8, 4), block_rows=8)
    for rows in ([8], [-1], []):
        with pytest.raises(ValueError, match="rows"):
            kernels.read_rows(table, 0, np.array(rows, dtype=np.int64), 1)
    with pytest.raises(ValueError, match="kv_head"):
        kernels.read_rows(table, 1, np.array([0], dtype=np.int64), 1)
