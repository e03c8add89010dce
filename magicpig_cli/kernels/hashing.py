"""SimHash codes of rows and queries (paper section 4.2): K signs of Gaussian projections, packed as an integer.

The rule that everything else rests on: the sum behind a bit is accumulated over d in order, so the code of a row
depends on the row, the projection and the bias alone; not on how many rows were hashed with it, nor on threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import want_array, want_int, want_queries, want_strided
from magicpig_cli.kernels.rows import RowTable, want_run
from magicpig_cli.kernels.segment import want_hash_shape


class Projection:
    """float32 [D, L·K]: column l·K + k is bit k of table l. Also holds it as the kernels want it."""

    def __init__(self, matrix: np.ndarray, K: int, L: int) -> None:
        want_hash_shape(K, L)
        want_array("projection", matrix, np.float32, "D, L·K", (None, L * K))
        self.matrix = matrix
        self.K = K
        self.L = L
        self._packed: dict[str, Any] = {}

    @property
    def head_dim(self) -> int:
        return int(self.matrix.shape[0])

    def packed(self) -> Any:
        """The matrix in the layout of the current kernels, made once."""
        backend = isa.backend()
        if backend.TIER not in self._packed:
            self._packed[backend.TIER] = backend.pack_projection(self.matrix, self.K, self.L)
        return self._packed[backend.TIER]

    def bias(self, mu: np.ndarray) -> np.ndarray:
        """What `mu` float32 [Hkv, D] projects to: float32 [Hkv, L·K], in the arithmetic of the hash."""
        want_array("mu", mu, np.float32, "Hkv, D", (None, self.head_dim))
        bias: np.ndarray = isa.backend().project(mu, self.packed(), self.K, self.L)
        return bias


def hash_rows(
    table: RowTable,
    start: int,
    stop: int,
    projection: Projection,
    bias: np.ndarray | None,
    threads: int,
    out: np.ndarray | None = None,
    first_head: int = 0,
) -> np.ndarray:
    """Codes uint16 [Hkv, L, stop − start] of the keys in rows [start, stop), centred by `bias` float32 [Hkv, L·K].

    They are written to `out` uint16 [heads, L, n], where it is given: contiguous within a table, for as many kv heads
    as it has, from `first_head` on.
    """
    want_run("rows", table, start, stop)
    want_int("threads", threads, 1)
    if projection.head_dim != table.head_dim:
        raise ValueError(f"projection: want a head dim of {table.head_dim}, got {projection.head_dim}")
    columns = projection.L * projection.K
    if bias is None:
        bias = np.zeros((table.kv_heads, columns), dtype=np.float32)
    want_array("bias", bias, np.float32, "Hkv, L·K", (table.kv_heads, columns))
    if out is None:
        out = np.empty((table.kv_heads, projection.L, stop - start), dtype=np.uint16)
    want_strided("out", out, np.uint16, "heads, L, n", (None, projection.L, stop - start))
    want_int("first_head", first_head, 0, table.kv_heads - out.shape[0])
    isa.backend().hash_rows(
        table, start, stop, projection.packed(), projection.K, projection.L, bias, threads, out, first_head
    )
    return out


def hash_queries(q: np.ndarray, projection: Projection, threads: int) -> np.ndarray:
    """Codes uint16 [B, H, L] of queries float32 [B, H, D]; queries are never centred."""
    want_queries(q, None, projection.head_dim)
    want_int("threads", threads, 1)
    codes: np.ndarray = isa.backend().hash_queries(q, projection.packed(), projection.K, projection.L, threads)
    return codes
