"""LSH tables over the stored rows of one layer and sequence (paper section 4.2; DESIGN.md, "Cache").

Rows are hashed as stored, centred on one mean per KV head that stays fixed while tokens are appended. The index is a
list of segments (tables by counting sort, uint16 ids) followed by a tail of codes that are compared one by one. It
covers rows [0, length); what is stored beyond that is attended exactly, so it may always lag behind.

A prefill brings it up at once (`extend`). A decode step does little (`step`): it hashes a few rows, or makes a few
tables of the segment that will take the place of a full tail and of the small segments before it. Until it is ready
these are read as before: what is sampled never depends on how far that has come (docs/decisions/004-index-growth.md).
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.base import Index
from magicpig_cli.cache.saved_tables import SavedTables
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import JOINED_ROWS, REBUILD_GROWTH, TAIL_ROOM, TAIL_ROWS
from magicpig_cli.kernels import Segment


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """How an index grows, in rows."""

    tail: int = TAIL_ROWS  # a tail of so many becomes a segment
    room: int = TAIL_ROOM  # the longest tail, while that is under way
    joined: int = JOINED_ROWS  # the longest segment that decode steps make of smaller ones
    segment: int = kernels.MAX_SEGMENT_ROWS  # the longest that a prefill makes
    hashed: int = 4  # rows hashed per step: a tile of the hash kernel; fewer would not be cheaper
    sorted: int = 24  # ids per table and step, on average, that a segment in the making advances by
    touch_steps: int = 64  # before, while its memory is touched beside: a fixed number, however long that takes
    join_steps: int = 448  # but at least so fast that it is ready in so many further steps

    def __post_init__(self) -> None:
        if not 1 <= self.tail <= self.room <= min(2 * self.tail, kernels.MAX_TAIL_ROWS):
            raise ValueError(f"room: want from {self.tail} to twice that, got {self.room}")
        if not self.room <= self.joined < self.segment <= kernels.MAX_SEGMENT_ROWS:
            raise ValueError(
                f"joined, segment: want them to ascend from {self.room}, got {self.joined}, {self.segment}"
            )


class Hasher(Protocol):
    """Codes of stored rows and what the mean contributes to them; implemented in `attention.lsh`."""

    K: int
    L: int

    def bias(self, mean: np.ndarray) -> np.ndarray: ...

    def codes(
        self, store: RowStore, start: int, stop: int, bias: np.ndarray, out: np.ndarray, first_head: int = 0
    ) -> None:
        """Codes of rows [start, stop) into out uint16 [heads, L, n], of the KV heads from first_head on."""
        ...


def mean_key(store: RowStore) -> np.ndarray:
    """Mean of all stored keys, float32 [Hkv, D]; summed in float64 block by block."""
    total: torch.Tensor | None = None
    for rows in store.views(0, store.length, at_most=store.length):
        part = rows[:, :, 0].sum(dim=1, dtype=torch.float64)
        total = part if total is None else total + part
    assert total is not None, "an empty store has no mean"
    return (total / store.length).to(torch.float32).numpy()


@dataclass(frozen=True, slots=True)
class _Content:
    """What is sampled from. Replaced as a whole, so that an interrupt leaves the index before or after a change."""

    segments: tuple[Segment, ...] = ()
    tail_at: int = 0  # column of the tail's memory in which its first row stands
    tail_rows: int = 0

    @property
    def sealed(self) -> int:
        return self.segments[-1].start + self.segments[-1].n if self.segments else 0

    @property
    def length(self) -> int:
        return self.sealed + self.tail_rows


class LshIndex(Index):
    """Tables over rows [0, length) of one store; none at first."""

    sampler = "lsh"

    def __init__(
        self, hasher: Hasher, store: RowStore, threads: int, sizes: IndexSizes | None = None,
        mean: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Centred on `mean`, float32 [Hkv, D]; None: on the mean of everything that is stored now."""
        self.sizes = sizes or IndexSizes()
        self._hasher = hasher
        self._store = store
        self._threads = threads
        self.mean = mean_key(store) if mean is None else mean  # float32 [Hkv, D]
        self._bias = hasher.bias(self.mean)  # float32 [Hkv, L·K]
        self.built = store.length  # rows behind the mean
        self._now = _Content()
        self._tail = np.zeros(self._heads * hasher.L * self.sizes.room + self.sizes.room, dtype=np.uint16)
        self._joining: kernels.Joining | None = None
        self._join_first = 0  # segments from here on go into it
        self._join_steps = 0  # steps that it has had

    @property
    def _heads(self) -> int:
        return int(self.mean.shape[0])

    @property
    def length(self) -> int:
        """Rows that are sampled from; those stored beyond are to be attended exactly."""
        return self._now.length

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self._now.segments

    @property
    def parts(self) -> tuple[Segment, ...]:
        """The segments. One in the making comes on top for a while: `Plan.growth_bytes`."""
        return self._now.segments

    @property
    def own_bytes(self) -> int:
        """Of the tail."""
        return self._tail.nbytes

    def fork(self, store: RowStore) -> LshIndex:
        """The same index over a fork of its store: the same mean and segments, which never change; a tail of its own.

        A segment in the making is not taken along: the fork begins it anew with its next steps. So what its steps do
        depends on what is sampled from here, not on how far that has come.
        """
        fork = copy(self)
        fork._store = store
        fork._joining = None
        fork._tail = np.zeros(self._tail.shape, dtype=self._tail.dtype)
        tail = slice(0, self._now.tail_rows)
        fork._tail_codes(self._now.tail_at)[:, :, tail] = self._tail_codes(self._now.tail_at)[:, :, tail]
        return fork

    @property
    def making_bytes(self) -> int:
        """Of the segment in the making, which stands beside what it will take the place of."""
        return 0 if self._joining is None else self._joining.nbytes

    @property
    def outgrown(self) -> bool:
        """Whether the store has grown so much that the mean should be taken again."""
        return self._store.length > self.built * REBUILD_GROWTH

    def _tail_codes(self, at: int) -> np.ndarray:
        """uint16 [Hkv, L, room], its first row in column `at`: moving that frees rows without copying the others.

        With at > 0 the last `at` rows of a table are the first of the next one, and never valid ones.
        """
        size = self._heads * self._hasher.L * self.sizes.room
        return self._tail[at : at + size].reshape(self._heads, self._hasher.L, self.sizes.room)

    def sampled_rows(self) -> kernels.SampledRows:
        """What the kernels sample from."""
        now = self._now
        tail = kernels.Tail(now.sealed, self._tail_codes(now.tail_at), now.tail_rows) if now.tail_rows else None
        return kernels.SampledRows(self._store.table, self.mean, now.segments, tail)

    # --- one decode step ---

    def step(self) -> None:
        """One piece of what is left to do, never two: what a step may take at most decides about stalls, not the sum.

        First rows that are not covered yet, as long as the tail has room, then the segment in the making.
        """
        now = self._now
        fresh = min(self.sizes.hashed, self.sizes.room - now.tail_rows, self._store.length - now.length)
        if now.tail_at:
            self._to_front()
        elif fresh > 0:
            self._hash(fresh)
        elif self._joining is not None:
            self._join_steps += 1
            self._advance_join(self._due(self._joining) - self._joining.done)
        elif now.tail_rows >= self.sizes.tail:
            self._begin_join()

    def _hash(self, count: int) -> None:
        """Take the next `count` rows into the tail."""
        now, start = self._now, self.length
        out = self._tail_codes(now.tail_at)[:, :, now.tail_rows : now.tail_rows + count]
        self._hasher.codes(self._store, start, start + count, self._bias, out)
        self._now = replace(now, tail_rows=now.tail_rows + count)

    def _begin_join(self) -> None:
        """Start to make a segment of the tail and of the segments before it that are not much larger."""
        rows = self._now.tail_rows
        self._join_first = self._first_of_a_size(self.segments, rows, self.sizes.joined)
        self._join_steps = 0
        joining = self._new_segment(self.segments[self._join_first :], rows)
        joining.prepare()
        self._joining = joining

    def _due(self, joining: kernels.Joining) -> int:
        """Tables that should be made after so many steps: a function of the steps alone."""
        buckets = 1 << self._hasher.K
        cost = joining.n + 2 * buckets * (1 + len(joining.parts))  # of one table, in ids: a bucket costs about two
        pace = max(self.sizes.sorted, -(-cost // self.sizes.join_steps))
        return min(joining.items, joining.items * pace * max(0, self._join_steps - self.sizes.touch_steps) // cost)

    def _advance_join(self, tables: int) -> None:
        if not tables:
            return
        assert self._joining is not None
        joining, now = self._joining, self._now
        joining.advance(tables, self._tail_codes(now.tail_at), self._threads)
        if joining.finished:
            segments = (*now.segments[: self._join_first], joining.segment())
            self._joining = None  # first: an interrupt in between costs a join, the other way it would be made twice
            self._now = _Content(segments, now.tail_at + joining.rows, now.tail_rows - joining.rows)

    def _to_front(self) -> None:
        """Move the tail to the start of its memory, where the rows stood that are in a segment now."""
        now = self._now
        if not now.tail_at:
            return
        rows = now.tail_rows  # at most tail_at, so nothing that is valid is overwritten
        self._tail_codes(0)[:, :, :rows] = self._tail_codes(now.tail_at)[:, :, :rows]
        self._now = _Content(now.segments, 0, rows)

    # --- all at once ---

    def extend(self) -> None:
        """Take in all rows that were stored since, and finish what is in the making."""
        if self._joining is not None:
            self._advance_join(self._joining.items)
        self._to_front()
        while missing := self._store.length - self.length:
            count = min(missing, self.sizes.segment - self._now.tail_rows)
            if self._now.tail_rows + count <= self.sizes.tail:
                self._hash(count)
            else:
                self._seal(count)

    def _seal(self, count: int) -> None:
        """A segment of the tail, the next `count` rows, and the segments before that are not much larger.

        Head by head: the codes of one head are all the memory that is needed beside the segment itself.
        """
        now = self._now
        rows, L = now.tail_rows + count, self._hasher.L
        first = self._first_of_a_size(now.segments, rows, self.sizes.segment)
        joining = self._new_segment(now.segments[first:], rows)
        codes = np.empty((1, L, rows), dtype=np.uint16)
        for head in range(self._heads):
            codes[0, :, : now.tail_rows] = self._tail_codes(now.tail_at)[head, :, : now.tail_rows]
            fresh = codes[:, :, now.tail_rows :]
            self._hasher.codes(self._store, now.length, now.length + count, self._bias, fresh, head)
            joining.advance(L, codes, self._threads, codes_from=head * L)
        self._now = _Content((*now.segments[:first], joining.segment()))

    def _new_segment(self, parts: tuple[Segment, ...], rows: int) -> kernels.Joining:
        start = parts[0].start if parts else self._now.sealed
        return kernels.Joining(
            parts, rows, kv_heads=self._heads, K=self._hasher.K, L=self._hasher.L, start=start
        )  # fmt: skip

    @staticmethod
    def _first_of_a_size(segments: tuple[Segment, ...], rows: int, limit: int) -> int:
        """From which segment on they go into one of `rows` rows after them: each at most twice what follows it."""
        first = len(segments)
        while first and segments[first - 1].n <= min(2 * rows, limit - rows):
            first -= 1
            rows += segments[first].n
        return first

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        self.built = min(self.built, length)  # so that other text after a cut gets a mean of its own
        if self._joining is not None and length < self._joining.stop:
            self._joining = None
        now = self._now
        if length >= now.length:
            return
        if length >= now.sealed:
            self._now = replace(now, tail_rows=length - now.sealed)
            return
        kept = tuple(segment for segment in now.segments if segment.start + segment.n <= length)
        self._now = _Content(kept)
        if self.length < length:
            cut = next(segment for segment in now.segments if segment.start == self.length)
            self._add_cut(kernels.truncate_segment(cut, length - cut.start, self._threads))

    def saved(self, length: int) -> SavedTables:
        """What it is made of below row `length`: segments, which never change, and a copy of the tail's codes."""
        now = self._now
        length = min(length, now.length)
        segments = tuple(segment for segment in now.segments if segment.start < length)
        last_rows = min(segments[-1].n, length - segments[-1].start) if segments else 0
        tail = self._tail_codes(now.tail_at)[:, :, : max(0, length - now.sealed)].copy()
        cut = bool(segments) and last_rows < segments[-1].n
        return SavedTables(self.mean, min(self.built, length), segments, last_rows, tail, cut)

    @classmethod
    def restored(
        cls, saved: SavedTables, hasher: Hasher, store: RowStore, threads: int, sizes: IndexSizes | None = None
    ) -> LshIndex:
        """The index that `saved` was read of. Rows beyond its store are to be cut off before it is used."""
        index = cls(hasher, store, threads, sizes, saved.mean)
        index.built = saved.built
        rows = saved.tail.shape[2]
        index._tail_codes(0)[:, :, :rows] = saved.tail
        index._now = _Content(saved.segments, 0, rows)
        if saved.cut:
            index._now = _Content(saved.segments[:-1])
            index._add_cut(saved.segments[-1])
        return index

    def _add_cut(self, cut: Segment) -> None:
        """Take back what is left of a segment: as a tail if it is no longer than one, else with its neighbours."""
        kept = self.segments
        if cut.n <= self.sizes.tail:
            self._tail_codes(0)[:, :, : cut.n] = kernels.segment_codes(cut)
            self._now = _Content(kept, 0, cut.n)
        else:
            first = self._first_of_a_size(kept, cut.n, self.sizes.segment)
            merged = kernels.merge_segments((*kept[first:], cut), self._threads)
            self._now = _Content((*kept[:first], merged))
