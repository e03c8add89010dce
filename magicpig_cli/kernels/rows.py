"""Tables of stored rows: K and V of one key side by side, [2, W] with W elements for the D values of each.

float32: W = D. bfloat16, as its bits (uint16): W = D. int8: W = D + 2, the D values and then their scale, the two
bytes of a bfloat16, lower first; a value means scale · int8, so a row is read in one place.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import MAX_HEAD_DIM, want_array, want_int

RowType = Literal["float32", "bfloat16", "int8"]
SCALE_BYTES = 2
NUMPY_TYPE: dict[str, type] = {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8}
NATIVE_TYPE = {"bfloat16": 0, "float32": 1, "int8": 2}  # as in cyext/simd/rows.h
_BLOCK_KIND = {"float32": "float32", "bfloat16": "bf16 bits (uint16)", "int8": "int8 values and scale"}


def row_width(head_dim: int, dtype: str) -> int:
    """Elements that K or V of a row takes."""
    return head_dim + SCALE_BYTES if dtype == "int8" else head_dim


def row_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of a row: K and V."""
    return 2 * row_width(head_dim, dtype) * np.dtype(NUMPY_TYPE[dtype]).itemsize


def window_type(dtype: RowType) -> RowType:
    """Type of the rows that a store of `dtype` is fed with and that stay near the model: int8 is for rows at rest."""
    return "bfloat16" if dtype == "int8" else dtype


def widen(rows: np.ndarray) -> np.ndarray:
    """Stored rows [..., W] as float32 [..., D]: bfloat16 bits are the upper half of a float32."""
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    if rows.dtype == np.int8:
        scale = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view("<u2").astype(np.uint16)
        values = rows[..., :-SCALE_BYTES].astype(np.float32)
        values *= widen(scale)
        return values
    return rows


class RowTable:
    """Where the rows of one layer and sequence lie: blocks [Hkv, block_rows, 2, W] that never move.

    Row r of head h is row r % block_rows of block r // block_rows. Any block_rows ≥ 1 will do. The table keeps its
    blocks alive; their contents may change between calls, not during one.
    """

    def __init__(self, kv_heads: int, head_dim: int, dtype: RowType, block_rows: int) -> None:
        want_int("kv_heads", kv_heads, 1)
        want_int("head_dim", head_dim, 1, MAX_HEAD_DIM)
        want_int("block_rows", block_rows, 1)
        if dtype not in NUMPY_TYPE:
            raise ValueError(f"dtype: want float32, bfloat16 or int8, got {dtype!r}")
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.block_rows = block_rows
        self.type = NATIVE_TYPE[dtype]
        self._blocks: list[np.ndarray] = []
        self._addresses = np.zeros(8, dtype=np.int64)

    @property
    def addresses(self) -> np.ndarray:
        """int64 [blocks]: where each block starts."""
        return self._addresses[: len(self._blocks)]

    @property
    def blocks(self) -> tuple[np.ndarray, ...]:
        return tuple(self._blocks)

    @property
    def rows(self) -> int:
        """Rows that the blocks have room for."""
        return len(self._blocks) * self.block_rows

    def append_block(self, block: np.ndarray) -> None:
        """Add a block [Hkv, block_rows, 2, W] of the row type, C-contiguous."""
        self._want_block(block)
        if len(self._blocks) == len(self._addresses):
            self._addresses = np.concatenate([self._addresses, np.zeros_like(self._addresses)])
        self._addresses[len(self._blocks)] = block.ctypes.data
        self._blocks.append(block)

    def replace_block(self, index: int, block: np.ndarray) -> None:
        """Have the rows of block `index` in another one from now on."""
        want_int("index", index, 0, len(self._blocks) - 1)
        self._want_block(block)
        self._blocks[index] = block
        self._addresses[index] = block.ctypes.data

    def _want_block(self, block: np.ndarray) -> None:
        shape = (self.kv_heads, self.block_rows, 2, row_width(self.head_dim, self.dtype))
        axes = f"Hkv, block_rows, 2, {'D + 2' if self.dtype == 'int8' else 'D'}"
        want_array("block", block, NUMPY_TYPE[self.dtype], axes, shape, _BLOCK_KIND[self.dtype])

    def drop_blocks(self, keep: int) -> None:
        """Forget all blocks but the first `keep`."""
        want_int("keep", keep, 0)
        del self._blocks[keep:]

    def read(self, start: int, stop: int) -> np.ndarray:
        """A float32 copy [Hkv, stop − start, 2, D] of rows [start, stop)."""
        parts = [np.zeros((self.kv_heads, 0, 2, self.head_dim), dtype=np.float32)]
        while start < stop:
            index, offset = divmod(start, self.block_rows)
            step = min(self.block_rows - offset, stop - start)
            parts.append(widen(self._blocks[index][:, offset : offset + step]))
            start += step
        return np.concatenate(parts, axis=1)


def want_run(name: str, table: RowTable, start: int, stop: int) -> None:
    """Require that rows [start, stop) lie in the table."""
    if not isinstance(table, RowTable):
        raise TypeError(f"{name}: want a RowTable, got {type(table).__name__}")
    if not 0 <= start <= stop <= table.rows:
        raise ValueError(f"{name}: want rows within [0, {table.rows}), got [{start}, {stop})")


def write_row(table: RowTable, row: int, key: np.ndarray, value: np.ndarray) -> None:
    """Row `row` of a table of float32 or bfloat16 becomes key and value, float32 [Hkv, D], rounded to nearest even."""
    shape = (table.kv_heads, table.head_dim)
    want_run("row", table, row, row + 1)
    if table.dtype == "int8":
        raise ValueError("table: want float32 or bfloat16 rows, got int8")
    if not table._blocks[row // table.block_rows].flags.writeable:
        raise ValueError("table: want a block that can be written to")
    want_array("key", key, np.float32, "Hkv, D", shape)
    want_array("value", value, np.float32, "Hkv, D", shape)
    isa.backend().write_row(table, row, key, value)
