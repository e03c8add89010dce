"""SimHash codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from magicpig_cli.kernels.rows import RowTable

_CHUNK_ROWS = 4096  # rows hashed at once: bounds the float64 projections


def pack_projection(matrix: np.ndarray, K: int, L: int) -> np.ndarray:
    """float64 [D, L·K]."""
    return matrix.astype(np.float64)


def project(x: np.ndarray, packed: np.ndarray, K: int, L: int) -> np.ndarray:
    """float32 [n, L·K] of x float32 [n, D]."""
    with np.errstate(invalid="ignore", over="ignore"):
        projected: np.ndarray = x.astype(np.float64) @ packed
        return projected.astype(np.float32)


def _codes(x: np.ndarray, packed: np.ndarray, bias: np.ndarray | float, K: int, L: int) -> np.ndarray:
    """uint16 [n, L]: bit k of table l says whether column l·K + k exceeds the bias."""
    bits = project(x, packed, K, L) > bias
    codes: np.ndarray = (bits.reshape(len(x), L, K) << np.arange(K)).sum(axis=2)
    return codes.astype(np.uint16)


def hash_rows(
    table: RowTable,
    start: int,
    stop: int,
    packed: np.ndarray,
    K: int,
    L: int,
    bias: np.ndarray,
    threads: int,
    out: np.ndarray,
    first_head: int,
) -> None:
    """Codes of the keys in rows [start, stop) into out uint16 [heads, L, n], of the kv heads from first_head on."""
    for first in range(start, stop, _CHUNK_ROWS):
        last = min(first + _CHUNK_ROWS, stop)
        keys = table.read(first, last)[:, :, 0]
        for at, h in enumerate(range(first_head, first_head + out.shape[0])):
            out[at, :, first - start : last - start] = _codes(keys[h], packed, bias[h], K, L).T


def hash_queries(q: np.ndarray, packed: np.ndarray, K: int, L: int, threads: int) -> np.ndarray:
    """uint16 [B, H, L] of q float32 [B, H, D]."""
    B, H, D = q.shape
    return _codes(q.reshape(B * H, D), packed, 0.0, K, L).reshape(B, H, L)
