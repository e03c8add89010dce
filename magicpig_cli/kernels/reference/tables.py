"""Hash tables over consecutive rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from magicpig_cli.kernels.segment import Segment


def join(
    parts: Sequence[Segment],
    codes: np.ndarray,
    rows: int,
    first: int,
    last: int,
    codes_from: int,
    offsets: np.ndarray,
    ids: np.ndarray,
    threads: int,
) -> None:
    """Tables [first, last), counted over heads, of segments and further rows: a stable sort of all codes by value."""
    L, K = ids.shape[1], (offsets.shape[2] - 1).bit_length() - 1
    for item in range(first, last):
        h, table = divmod(item, L)
        at = divmod(item - codes_from, L)
        known = [_table_codes(part, h, table) for part in parts]
        everything = np.concatenate([*known, *([codes[at][:rows]] if rows else [])])
        offsets[h, table] = np.concatenate([[0], np.cumsum(np.bincount(everything, minlength=2**K))])
        ids[h, table] = np.argsort(everything, kind="stable")


def _table_codes(segment: Segment, h: int, table: int) -> np.ndarray:
    """uint16 [n]: the bucket in which each id of a table stands."""
    codes = np.empty(segment.n, dtype=np.uint16)
    sizes = np.diff(segment.offsets[h, table].astype(np.int64))
    codes[segment.ids[h, table]] = np.repeat(np.arange(2**segment.K, dtype=np.uint16), sizes)
    return codes


def segment_codes(segment: Segment) -> np.ndarray:
    """uint16 [Hkv, L, n]."""
    heads, L, _ = segment.ids.shape
    return np.stack([np.stack([_table_codes(segment, h, table) for table in range(L)]) for h in range(heads)])


def truncate_segment(segment: Segment, n: int, offsets: np.ndarray, ids: np.ndarray, threads: int) -> None:
    """By definition: the tables over the first n codes."""
    join((), segment_codes(segment)[:, :, :n], n, 0, ids.shape[0] * ids.shape[1], 0, offsets, ids, threads)
