"""Rows that are written one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from magicpig_cli.kernels.rows import RowTable


def write_row(table: RowTable, row: int, key: np.ndarray, value: np.ndarray) -> None:
    """Row `row` of the table, float32 or bfloat16, becomes key and value [Hkv, D]."""
    block, offset = divmod(row, table.block_rows)
    values = np.stack([key, value], axis=1)
    table.blocks[block][:, offset] = values if table.dtype == "float32" else _rounded(values)


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 → bits of bfloat16, to nearest even."""
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest_bfloat16(values))


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """The same of finite or infinite numbers."""
    bits = values.view(np.uint32)
    upper: np.ndarray = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return upper
