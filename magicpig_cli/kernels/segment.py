"""Hash tables over at most 65,472 consecutive rows, so that ids and offsets fit in 16 bits (paper section 4.2).

A segment is made by counting sort and never changes; what has been appended since stands in a `Tail`, whose codes
are compared one by one. All operations here are exact: whichever way a segment was made, it has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from magicpig_cli.config import MAX_K
from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import MAX_TABLES, want_array, want_int, want_strided
from magicpig_cli.kernels.memory import kept_arrays, touch

MAX_SEGMENT_ROWS = 65_472  # a multiple of 64, below 2**16
MAX_TAIL_ROWS = 4_096


@dataclass(frozen=True, slots=True)
class Segment:
    """Tables over rows [start, start + n) of a sequence. Made by `build_segment`; contents are trusted.

    Shapes are checked here, once, and not in every call that samples.
    """

    start: int
    n: int
    K: int
    L: int
    offsets: np.ndarray  # uint16 [Hkv, L, 2**K + 1]: where each bucket's ids start, and the end of the last
    ids: np.ndarray  # uint16 [Hkv, L, n]: row − start, by bucket, ascending within one

    def __post_init__(self) -> None:
        want_hash_shape(self.K, self.L)
        want_int("segment start", self.start, 0)
        want_int("segment rows", self.n, 1, MAX_SEGMENT_ROWS)
        want_array("segment ids", self.ids, np.uint16, "Hkv, L, n", (None, self.L, self.n))
        shape = (self.kv_heads, self.L, 2**self.K + 1)
        want_array("segment offsets", self.offsets, np.uint16, "Hkv, L, 2**K + 1", shape)

    @property
    def kv_heads(self) -> int:
        return int(self.ids.shape[0])

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.ids.nbytes


@dataclass(frozen=True, slots=True)
class Tail:
    """Codes of rows [start, start + n) that are not in a segment yet: uint16 [Hkv, L, capacity], n of them valid."""

    start: int
    codes: np.ndarray
    n: int

    def __post_init__(self) -> None:
        want_array("tail codes", self.codes, np.uint16, "Hkv, L, capacity", (None, None, None))
        want_int("tail capacity", self.codes.shape[2], 0, MAX_TAIL_ROWS)
        want_int("tail rows", self.n, 0, self.codes.shape[2])
        want_int("tail start", self.start, 0)


def want_hash_shape(K: int, L: int) -> None:
    """Bits per table and tables that the kernels can work with."""
    want_int("K", K, 1, MAX_K)
    want_int("L", L, 2, MAX_TABLES)


def _room(kv_heads: int, L: int, K: int, n: int) -> tuple[np.ndarray, ...]:
    """Memory for offsets and ids of a segment."""
    return kept_arrays(((kv_heads, L, (1 << K) + 1), np.uint16), ((kv_heads, L, n), np.uint16))


class Joining:
    """A segment in the making: neighbouring segments and the rows after them, a few tables at a time.

    Nothing else changes while it is made, so it can be spread over many steps or dropped half-way.
    """

    def __init__(self, parts: Sequence[Segment], rows: int, *, kv_heads: int, K: int, L: int, start: int) -> None:
        """Of `parts`, in order and without a gap, and `rows` rows after them; the first row of all is `start`."""
        want_hash_shape(K, L)
        want_int("start", start, 0)
        end = start
        for part in parts:
            if (part.K, part.L, part.kv_heads) != (K, L, kv_heads):
                raise ValueError(
                    f"segments: want K, L, Hkv = {(K, L, kv_heads)}, got {(part.K, part.L, part.kv_heads)}"
                )
            if part.start != end:
                raise ValueError(f"segments: want neighbours, got one from {part.start} after row {end}")
            end += part.n
        want_int("segment rows", end - start + rows, 1, MAX_SEGMENT_ROWS)
        self.parts, self.rows = tuple(parts), rows
        self.items = kv_heads * L  # tables of all kv heads, h·L + l
        self.done = 0
        n = end - start + rows
        self._segment = Segment(start, n, K, L, *_room(kv_heads, L, K, n))
        self._touched: Future[None] | None = None

    @property
    def n(self) -> int:
        """Rows of the segment."""
        return self._segment.n

    @property
    def nbytes(self) -> int:
        return self._segment.nbytes

    @property
    def stop(self) -> int:
        """The row after its last."""
        return self._segment.start + self._segment.n

    @property
    def finished(self) -> bool:
        return self.done == self.items

    def prepare(self) -> None:
        """Have the memory of the tables touched beside; `advance` waits for that."""
        self._touched = touch(self._segment.offsets, self._segment.ids)

    def advance(self, items: int, codes: np.ndarray, threads: int, codes_from: int = 0) -> None:
        """Make up to `items` further tables.

        codes: uint16 [heads, L, ≥ rows], contiguous within a table, of the heads from table `codes_from` on.
        """
        want_int("items", items, 0)
        want_int("threads", threads, 1)
        want_strided("codes", codes, np.uint16, "heads, L, rows", (None, self._segment.L, None))
        want_int("rows of codes", codes.shape[2], self.rows)
        want_int("table of the codes", codes_from, 0, self.done)
        if codes_from % self._segment.L:
            raise ValueError(f"table of the codes: want the first of a head, got {codes_from} at L={self._segment.L}")
        want_int("tables of the codes", codes.shape[0] * codes.shape[1], 0, self.items - codes_from)
        last = min(self.done + items, codes_from + codes.shape[0] * codes.shape[1])
        if self._touched is not None:
            self._touched.result()
        if last > self.done:
            made = self._segment
            isa.backend().join(
                self.parts, codes, self.rows, self.done, last, codes_from, made.offsets, made.ids, threads
            )
            self.done = last

    def segment(self) -> Segment:
        """What was made, once it is finished."""
        if not self.finished:
            raise ValueError(f"segment: want {self.items} tables made, got {self.done}")
        return self._segment


def build_segment(codes: np.ndarray, K: int, start: int, threads: int) -> Segment:
    """Tables over n rows with codes uint16 [Hkv, L, n], each < 2**K; the first of them is row `start`."""
    want_array("codes", codes, np.uint16, "Hkv, L, n", (None, None, None))
    heads, L, n = codes.shape
    joining = Joining((), n, kv_heads=heads, K=K, L=L, start=start)
    if codes.size and int(codes.max()) >> K:
        raise ValueError(f"codes: want {K}-bit codes, got {int(codes.max())}")
    joining.advance(joining.items, codes, threads)
    return joining.segment()


def merge_segments(parts: Sequence[Segment], threads: int) -> Segment:
    """One segment over the rows of neighbours; equals `build_segment` of their codes side by side."""
    a = parts[0]
    joining = Joining(parts, 0, kv_heads=a.kv_heads, K=a.K, L=a.L, start=a.start)
    joining.advance(joining.items, np.empty((a.kv_heads, a.L, 0), dtype=np.uint16), threads)
    return joining.segment()


def truncate_segment(segment: Segment, n: int, threads: int) -> Segment:
    """The segment without the rows from its n-th on; equals `build_segment` of the first n codes."""
    want_int("n", n, 1, segment.n)
    want_int("threads", threads, 1)
    if n == segment.n:
        return segment
    offsets, ids = _room(segment.kv_heads, segment.L, segment.K, n)
    isa.backend().truncate_segment(segment, n, offsets, ids, threads)
    return Segment(segment.start, n, segment.K, segment.L, offsets, ids)


def segment_codes(segment: Segment) -> np.ndarray:
    """The codes uint16 [Hkv, L, n] from which the segment was built."""
    codes: np.ndarray = isa.backend().segment_codes(segment)
    return codes
