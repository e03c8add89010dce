"""Hash tables over at most 65,472 consecutive rows, so that ids and offsets fit in 16 bits (paper section 4.2).

A segment is made by counting sort and never changes; what has been appended since stands in a `Tail`, whose codes
are compared one by one. All operations here are exact: whichever way a segment was made, it has the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from magicpig_cli.config import MAX_K
from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import MAX_TABLES, want_array, want_int

MAX_SEGMENT_ROWS = 65_472  # a multiple of 64, below 2**16
MAX_TAIL_ROWS = 4_096


@dataclass(frozen=True, slots=True)
class Segment:
    """Tables over rows [start, start + n) of a sequence. Made by `build_segment`; contents are trusted."""

    start: int
    n: int
    K: int
    L: int
    offsets: np.ndarray  # uint16 [Hkv, L, 2**K + 1]: where each bucket's ids start, and the end of the last
    ids: np.ndarray  # uint16 [Hkv, L, n]: row − start, by bucket, ascending within one

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


def build_segment(codes: np.ndarray, K: int, start: int, threads: int) -> Segment:
    """Tables over n rows with codes uint16 [Hkv, L, n], each < 2**K; the first of them is row `start`."""
    want_array("codes", codes, np.uint16, "Hkv, L, n", (None, None, None))
    want_hash_shape(K, codes.shape[1])
    want_int("segment rows", codes.shape[2], 1, MAX_SEGMENT_ROWS)
    want_int("start", start, 0)
    want_int("threads", threads, 1)
    if codes.size and int(codes.max()) >> K:
        raise ValueError(f"codes: want {K}-bit codes, got {int(codes.max())}")
    offsets, ids = isa.backend().build_segment(codes, K, threads)
    return Segment(start, codes.shape[2], K, codes.shape[1], offsets, ids)


def merge_segments(a: Segment, b: Segment, threads: int) -> Segment:
    """One segment over the rows of both; equals `build_segment` of their codes side by side."""
    want_int("threads", threads, 1)
    if (a.K, a.L, a.ids.shape[0]) != (b.K, b.L, b.ids.shape[0]):
        raise ValueError(
            f"segments: want one K, L, Hkv, got {(a.K, a.L, a.ids.shape[0])}, {(b.K, b.L, b.ids.shape[0])}"
        )
    if b.start != a.start + a.n:
        raise ValueError(f"segments: want neighbours, got one that ends at {a.start + a.n} and one from {b.start}")
    want_int("segment rows", a.n + b.n, 1, MAX_SEGMENT_ROWS)
    offsets, ids = isa.backend().merge_segments(a, b, threads)
    return Segment(a.start, a.n + b.n, a.K, a.L, offsets, ids)


def truncate_segment(segment: Segment, n: int, threads: int) -> Segment:
    """The segment without the rows from its n-th on; equals `build_segment` of the first n codes."""
    want_int("n", n, 1, segment.n)
    want_int("threads", threads, 1)
    if n == segment.n:
        return segment
    offsets, ids = isa.backend().truncate_segment(segment, n, threads)
    return Segment(segment.start, n, segment.K, segment.L, offsets, ids)


def segment_codes(segment: Segment) -> np.ndarray:
    """The codes uint16 [Hkv, L, n] from which the segment was built."""
    codes: np.ndarray = isa.backend().segment_codes(segment)
    return codes
