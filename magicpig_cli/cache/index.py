"""LSH tables over the stored rows of one layer and sequence (paper section 4.2; DESIGN.md, "Cache").

Rows are hashed as stored, centred on one mean per KV head that stays fixed while tokens are appended. The index is a
list of segments (tables by counting sort, uint16 ids) followed by a tail of codes that are compared one by one until
there are enough for a segment. Segments of similar size are merged, so a long generation keeps few of them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import TAIL_ROWS

REBUILD_GROWTH = 1.25  # after a prefill that grew the offloaded part by more than a quarter: new mean


class Hasher(Protocol):
    """Codes of stored rows and what the mean contributes to them; implemented in `attention.lsh`."""

    K: int
    L: int

    def bias(self, mean: np.ndarray) -> np.ndarray: ...

    def codes(self, store: RowStore, start: int, stop: int, bias: np.ndarray) -> np.ndarray:
        """uint16 [Hkv, L, stop − start]."""
        ...


def mean_key(store: RowStore) -> np.ndarray:
    """Mean of all stored keys, float32 [Hkv, D]; summed in float64 block by block."""
    total: torch.Tensor | None = None
    for rows in store.views(0, store.length, at_most=store.length):
        part = rows[:, :, 0].sum(dim=1, dtype=torch.float64)
        total = part if total is None else total + part
    assert total is not None, "an empty store has no mean"
    return (total / store.length).to(torch.float32).numpy()


class LshIndex:
    """Tables over rows [0, length) of one store."""

    def __init__(self, hasher: Hasher, store: RowStore, threads: int) -> None:
        """Build over everything stored, with the mean of it."""
        self._hasher = hasher
        self._store = store
        self._threads = threads
        self.mean = mean_key(store)  # float32 [Hkv, D]
        self._bias = hasher.bias(self.mean)  # float32 [Hkv, L·K]
        self.built = store.length  # rows behind the mean
        self.segments: list[kernels.Segment] = []
        self._tail = np.zeros((self.mean.shape[0], hasher.L, TAIL_ROWS), dtype=np.uint16)
        self._tail_rows = 0
        self.extend()

    @property
    def length(self) -> int:
        """Rows that the index covers."""
        return self._sealed + self._tail_rows

    @property
    def _sealed(self) -> int:
        return self.segments[-1].start + self.segments[-1].n if self.segments else 0

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments) + self._tail.nbytes

    @property
    def outgrown(self) -> bool:
        """Whether the store has grown so much that the mean should be taken again."""
        return self._store.length > self.built * REBUILD_GROWTH

    def sampled_rows(self) -> kernels.SampledRows:
        """What the kernels sample from."""
        tail = kernels.Tail(self._sealed, self._tail, self._tail_rows) if self._tail_rows else None
        return kernels.SampledRows(self._store.table, self.mean, self.segments, tail)

    def extend(self) -> None:
        """Take in the rows that were stored since."""
        while self.length < self._store.length:
            room = kernels.MAX_SEGMENT_ROWS - self._tail_rows
            step = min(self._store.length - self.length, room)
            codes = self._hasher.codes(self._store, self.length, self.length + step, self._bias)
            if self._tail_rows + step <= TAIL_ROWS:
                self._tail[:, :, self._tail_rows : self._tail_rows + step] = codes
                self._tail_rows += step
            else:
                self._seal(np.concatenate([self._tail[:, :, : self._tail_rows], codes], axis=2))

    def _seal(self, codes: np.ndarray) -> None:
        """Turn codes [Hkv, L, n] of the rows after the last segment into a segment, and merge what is of a size."""
        segment = kernels.build_segment(np.ascontiguousarray(codes), self._hasher.K, self._sealed, self._threads)
        self._tail_rows = 0
        while self.segments:
            last = self.segments[-1]
            if last.n > 2 * segment.n or last.n + segment.n > kernels.MAX_SEGMENT_ROWS:
                break
            segment = kernels.merge_segments(self.segments.pop(), segment, self._threads)
        self.segments.append(segment)

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self.built = min(self.built, length)  # so that other text after a cut gets a mean of its own
        self._tail_rows = max(0, min(self._tail_rows, length - self._sealed))
        while self.segments and self.segments[-1].start >= length:
            self.segments.pop()
        if self.segments and self._sealed > length:
            last = self.segments.pop()
            self.segments.append(kernels.truncate_segment(last, length - last.start, self._threads))
