"""Tables by counting sort: bit-equal to the reference however they were made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from tests.kernels.data import RELAXED


def random_codes(count: int, K: int, L: int, spread: float, seed: int, heads: int = 2) -> np.ndarray:
    """uint16 [Hkv, L, n]; spread 0 puts all rows into few buckets, 1 into all."""
    drawn = np.random.default_rng(seed).integers(0, max(1, int(2**K * spread)) + 1, size=(heads, L, count))
    return np.minimum(drawn, 2**K - 1).astype(np.uint16)


def sorted_tables(codes: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and ids of uint16 [Hkv, L, n] by a stable sort."""
    sizes = [[np.bincount(table, minlength=2**K) for table in head] for head in codes]
    return np.pad(np.cumsum(sizes, axis=2), ((0, 0), (0, 0), (1, 0))), np.argsort(codes, axis=2, kind="stable")


def assert_same(a: kernels.Segment, b: kernels.Segment) -> None:
    assert (a.start, a.n, a.K, a.L) == (b.start, b.n, b.K, b.L)
    assert np.array_equal(a.offsets, b.offsets)
    assert np.array_equal(a.ids, b.ids)


@RELAXED
@given(
    count=st.sampled_from([1, 2, 63, 64, 65, 1000]),
    K=st.sampled_from([1, 8, 10, 12, 16]),
    L=st.sampled_from([2, 3, 7]),
    spread=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    seed=st.integers(0, 100),
    cut=st.floats(0, 1),
)
def test_build_merge_truncate_and_invert(isa, count, K, L, spread, seed, cut):
    codes = random_codes(count, K, L, spread, seed)
    whole = kernels.build_segment(codes, K, 100, 2)
    offsets, ids = sorted_tables(codes, K)
    assert np.array_equal(whole.offsets, offsets)
    assert np.array_equal(whole.ids, ids)
    assert np.array_equal(kernels.segment_codes(whole), codes)
    at = int(cut * count)
    if 0 < at < count:
        left = kernels.build_segment(np.ascontiguousarray(codes[:, :, :at]), K, 100, 1)
        right = kernels.build_segment(np.ascontiguousarray(codes[:, :, at:]), K, 100 + at, 1)
        assert_same(kernels.merge_segments([left, right], 2), whole)
        assert_same(kernels.truncate_segment(whole, at, 2), left)
    assert_same(kernels.truncate_segment(whole, count, 1), whole)


@RELAXED
@given(
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    rows=st.integers(0, 100),
    room=st.integers(0, 40),
    paces=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 100),
)
def test_joined_bit_by_bit_equals_built_at_once(isa, cuts, rows, room, paces, threads, seed):
    """Neighbours and rows behind them, whose codes have room to grow, a few tables at a time."""
    K, L, heads = 6, 7, 2
    codes = random_codes(sum(cuts) + rows, K, L, 0.5, seed)
    parts, start = [], 0
    for n in cuts:
        parts.append(kernels.build_segment(np.ascontiguousarray(codes[:, :, start : start + n]), K, 9 + start, 1))
        start += n
    rest = np.zeros((heads, L, rows + room), dtype=np.uint16)
    rest[:, :, :rows] = codes[:, :, start:]
    joining = kernels.Joining(parts, rows, kv_heads=heads, K=K, L=L, start=9)
    turn = 0
    while not joining.finished:
        with pytest.raises(ValueError, match="want 14 tables made, got"):
            joining.segment()
        joining.advance(paces[turn % len(paces)], rest, threads)
        turn += 1
    assert_same(joining.segment(), kernels.build_segment(codes, K, 9, 1))
    by_head = kernels.Joining(parts, rows, kv_heads=heads, K=K, L=L, start=9)
    for head in range(heads):
        by_head.advance(L + 5, rest[head : head + 1], threads, codes_from=head * L)
        assert by_head.done == (head + 1) * L
    assert_same(by_head.segment(), joining.segment())


@pytest.mark.parametrize("K", [1, 10, 16])
def test_the_longest_segment(isa, K):
    codes = random_codes(kernels.MAX_SEGMENT_ROWS, K, 2, 0.3, seed=1, heads=1)
    codes[0, 1] = 2**K - 1
    whole = kernels.build_segment(codes, K, 0, 2)
    offsets, ids = sorted_tables(codes, K)
    assert np.array_equal(whole.offsets, offsets)
    assert np.array_equal(whole.ids, ids)
    cut = 40_001
    left, right = (
        kernels.build_segment(np.ascontiguousarray(part), K, start, 1)
        for part, start in ((codes[:, :, :cut], 0), (codes[:, :, cut:], cut))
    )
    assert_same(kernels.merge_segments([left, right], 1), whole)
    assert_same(kernels.truncate_segment(whole, cut, 1), left)
    assert np.array_equal(kernels.segment_codes(whole), codes)


def test_threads_change_nothing(native_isa):
    codes = random_codes(3000, 10, 37, 1.0, seed=3)
    wanted = kernels.build_segment(codes, 10, 0, 1)
    for threads in (2, 3):
        assert_same(kernels.build_segment(codes, 10, 0, threads), wanted)


def test_bytes_are_those_of_ids_and_offsets(isa):
    segment = kernels.build_segment(random_codes(50, 4, 3, 1.0, seed=0), 4, 0, 1)
    assert segment.nbytes == 2 * 3 * (50 + 17) * 2


def test_read_only_codes(isa):
    codes = random_codes(50, 4, 3, 1.0, seed=0)
    codes.flags.writeable = False
    assert np.array_equal(kernels.segment_codes(kernels.build_segment(codes, 4, 0, 1)), codes)


def half_made(codes: np.ndarray) -> kernels.Joining:
    """The tables of the first of two heads."""
    joining = kernels.Joining([], codes.shape[2], kv_heads=2, K=4, L=3, start=7)
    joining.advance(3, codes, 1)
    return joining


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c, s: kernels.build_segment(c.astype(np.int64), 4, 0, 1), "codes: want uint16"),
        (lambda c, s: kernels.build_segment(c, 3, 0, 1), "want 3-bit codes, got"),
        (lambda c, s: kernels.build_segment(c, 17, 0, 1), "K: want 1 to 16, got 17"),
        (lambda c, s: kernels.build_segment(c[:, :1].copy(), 4, 0, 1), "L: want 2 to"),
        (lambda c, s: kernels.build_segment(c[:, :, ::2], 4, 0, 1), "C-contiguous"),
        (lambda c, s: kernels.build_segment(np.zeros((1, 2, 65_473), np.uint16), 4, 0, 1), "1 to 65472, got 65473"),
        (lambda c, s: kernels.build_segment(c[:, :, :0].copy(), 4, 0, 1), "segment rows: want 1 to 65472, got 0"),
        (lambda c, s: kernels.merge_segments([s, s], 1), "want neighbours"),
        (
            lambda c, s: kernels.Joining([s], 1, kv_heads=2, K=4, L=3, start=7).advance(1, c[:, :, :0], 1),
            "rows of codes: want 1 or more, got 0",
        ),
        (
            lambda c, s: kernels.Joining([s], 1, kv_heads=2, K=4, L=3, start=7).advance(1, c[:, :, ::2], 1),
            "codes: want uint16",
        ),
        (
            lambda c, s: kernels.Joining([s], 1, kv_heads=2, K=4, L=3, start=7).advance(1, c, 1, codes_from=3),
            "table of the codes: want 0 to 0, got 3",
        ),
        (
            lambda c, s: half_made(c).advance(1, c[1:], 1, codes_from=2),
            "table of the codes: want the first of a head, got 2 at L=3",
        ),
        (lambda c, s: half_made(c).advance(1, c, 1, codes_from=3), "tables of the codes: want 0 to 3, got 6"),
        (lambda c, s: kernels.Joining([s], 1, kv_heads=2, K=5, L=3, start=7), "segments: want K, L, Hkv"),
        (lambda c, s: kernels.Joining([], 0, kv_heads=2, K=5, L=3, start=7), "segment rows: want 1 to 65472, got 0"),
        (lambda c, s: kernels.truncate_segment(s, 0, 1), "n: want 1 to 50, got 0"),
        (lambda c, s: kernels.truncate_segment(s, 51, 1), "n: want 1 to 50, got 51"),
        (lambda c, s: replace(s, n=49), r"segment ids: want uint16 \[Hkv, L, n\] = \(any, 3, 49\)"),
        (lambda c, s: replace(s, K=5), r"segment offsets: want uint16 .* = \(2, 3, 33\)"),
        (lambda c, s: replace(s, offsets=s.offsets[:, :, ::2]), "segment offsets: want"),
        (lambda c, s: replace(s, start=-1), "segment start: want 0 or more, got -1"),
        (lambda c, s: kernels.Tail(0, np.zeros((1, 2, 4097), np.uint16), 1), "tail capacity: want 0 to 4096"),
        (lambda c, s: kernels.Tail(0, np.zeros((1, 2, 8), np.uint16), 9), "tail rows: want 0 to 8, got 9"),
    ],
)
def test_the_door_names_what_is_wrong(make, message):
    codes = random_codes(50, 4, 3, 1.0, seed=0)
    segment = kernels.build_segment(codes, 4, 7, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        make(codes, segment)
