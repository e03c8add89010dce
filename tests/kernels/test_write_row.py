"""Rows that are written one at a time: rounded as torch rounds, in their place, and nothing beside it."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli import kernels
from tests.kernels.data import make_table, to_bits

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-42, 3.4e38, 1.00390625, 1.01171875], dtype=np.float32)


def empty_table(heads: int, count: int, head_dim: int, dtype: str, block_rows: int) -> kernels.RowTable:
    table = kernels.RowTable(heads, head_dim, dtype, block_rows)
    width, kind = kernels.row_width(head_dim, dtype), kernels.NUMPY_TYPE[dtype]
    for _ in range(0, count, block_rows):
        table.append_block(np.zeros((heads, block_rows, 2, width), dtype=kind))
    return table


def random_row(heads: int, head_dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    key, value = np.random.default_rng(seed).standard_normal((2, heads, head_dim)).astype(np.float32)
    count = min(head_dim, len(SPECIAL))
    key[0, :count], value[-1, :count] = SPECIAL[:count], SPECIAL[:count]
    return key, value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 7, 64, 80])
@pytest.mark.parametrize("row", [0, 4, 5, 12])
def test_a_row_is_written_and_no_other(isa, dtype, head_dim, row):
    table = empty_table(3, 13, head_dim, dtype, block_rows=5)
    before = [block.copy() for block in table.blocks]
    key, value = random_row(3, head_dim, row)
    kernels.write_row(table, row, key, value)
    wanted = np.stack([key, value], axis=1)
    block, offset = divmod(row, 5)
    before[block][:, offset] = wanted if dtype == "float32" else to_bits(wanted)
    for got, want in zip(table.blocks, before, strict=True):
        assert got.tobytes() == want.tobytes()


def test_what_is_no_number_stays_none(isa):
    """0x7fff8000 would round to −0."""
    key = np.array([[np.nan, 1.0]], dtype=np.float32)
    value = np.array([[0x7FFFFFFF, 0xFFC00001]], dtype=np.uint32).view(np.float32)
    table = empty_table(1, 1, 2, "bfloat16", block_rows=1)
    kernels.write_row(table, 0, key, value)
    assert np.isnan(table.read(0, 1)).tolist() == [[[[True, False], [True, True]]]]


@pytest.mark.parametrize(
    ("row", "shape", "dtype", "message"),
    [(13, (3, 8), "float32", "want rows within"), (-1, (3, 8), "float32", "want rows within"),
     (0, (2, 8), "float32", "key: want float32"), (0, (3, 8), "int8", "want float32 or bfloat16 rows")],
)  # fmt: skip
def test_the_door_refuses(row, shape, dtype, message):
    table = empty_table(3, 13, 8, dtype, block_rows=13)
    with pytest.raises(ValueError, match=message):
        kernels.write_row(table, row, np.zeros(shape, np.float32), np.zeros((3, 8), np.float32))


def test_rows_that_may_only_be_read_are_not_written():
    table = make_table(np.zeros((3, 13, 2, 8)))  # as the other tests have them
    with pytest.raises(ValueError, match="can be written to"):
        kernels.write_row(table, 0, *random_row(3, 8, 0))
