"""The index: however it grew and was cut, it holds the codes of exactly the stored rows, under its first mean."""

from __future__ import annotations

from copy import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.attention.lsh import LshHasher, gaussian_directions, pack_signs
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import IndexSizes, LshIndex, mean_key
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from tests.tolerances import DOT, SUM, U

HKV, D, K, L = 2, 16, 4, 6


def store_of(count: int, seed: int = 0) -> RowStore:
    store = RowStore(BlockPool(HKV, D, "float32", block_rows=64))
    generator = torch.Generator().manual_seed(seed)
    store.append(torch.randn(HKV, count, 2, D, generator=generator) + 1.0)
    return store


def hasher(device: str = "cpu") -> LshHasher:
    return LshHasher(layer=1, head_dim=D, K=K, L=L, hash_seed=0, threads=1, staging=Staging(torch.device(device)))


def make_index(store: RowStore, sizes: IndexSizes | None = None) -> LshIndex:
    """Over everything stored."""
    index = LshIndex(hasher(), store, threads=1, sizes=sizes)
    index.extend()
    return index


def codes_of(store: RowStore, index: LshIndex) -> np.ndarray:
    """uint16 [Hkv, L, n]: all rows of a store hashed at once, as this index should hold them."""
    codes = np.empty((HKV, L, store.length), dtype=np.uint16)
    hasher().codes(store, 0, store.length, hasher().bias(index.mean), codes)
    return codes


def codes_in(index: LshIndex) -> np.ndarray:
    parts = [np.empty((HKV, L, 0), dtype=np.uint16)]
    parts += [kernels.segment_codes(segment) for segment in index.segments]
    tail = index.sampled_rows().tail
    if tail is not None:
        assert tail.start == sum(segment.n for segment in index.segments)
        parts.append(tail.codes[:, :, : tail.n])
    return np.concatenate(parts, axis=2)


def assert_whole(index: LshIndex, codes: np.ndarray) -> None:
    """Every row below `length` exactly once, in segments that follow each other, none small enough to be joined."""
    assert np.array_equal(codes_in(index), codes[:, :, : index.length])
    assert all(a.start + a.n == b.start for a, b in pairwise(index.segments))
    for a, b in pairwise(index.segments):
        assert a.n > 2 * b.n or a.n + b.n > index.sizes.joined
    assert all(segment.n >= index.sizes.tail for segment in index.segments)
    tail = index.sampled_rows().tail
    assert tail is None or tail.n <= index.sizes.room


def assert_samples_as_brute_force(index: LshIndex, codes: np.ndarray) -> None:
    queries = np.random.default_rng(0).integers(0, 1 << K, size=(1, HKV * 2, L)).astype(np.uint16)
    found = kernels.lsh_sample(queries, [index.sampled_rows()])[0]
    for head, rows in enumerate(found):
        hits = (codes[head // 2, :, : index.length] == queries[0, head][:, None]).sum(axis=0)
        assert np.array_equal(rows, np.flatnonzero(hits >= 2))


class Growing:
    """A store and its index under changes, checked after each against hashing everything again."""

    def __init__(self, first: int, sizes: IndexSizes) -> None:
        everything = store_of(2000)
        self.source = everything.read(0, 2000)
        self.store = store_of(0)
        self.store.append(self.source[:, :first])
        self.index = make_index(self.store, sizes)
        self.codes = codes_of(everything, self.index)

    def fork(self, seed: int) -> Growing:
        """Of store and index; further rows are others."""
        fork = copy(self)
        fork.source = torch.cat([self.source[:, : self.store.length], store_of(2000, seed).read(0, 2000)], dim=1)
        fork.store = self.store.fork()
        fork.index = self.index.fork(fork.store)
        everything = store_of(0)
        everything.append(fork.source)
        fork.codes = codes_of(everything, fork.index)
        return fork

    def append(self, count: int) -> None:
        self.store.append(self.source[:, self.store.length : self.store.length + count])

    def change(self, kind: str, amount: int) -> None:
        if kind == "cut":
            self.store.truncate(max(1, self.store.length - amount))
            self.index.truncate(self.store.length)
        elif kind == "prefill":
            self.append(amount)
            self.index.extend()
            assert self.index.length == self.store.length
        elif kind == "flush":  # rows leave the window together, then steps go on
            self.append(amount // 4)
        else:
            for _ in range(amount):
                self.append(kind == "decode")
                self.index.step()
                self.check()
        self.check()

    def check(self) -> None:
        assert self.index.length <= self.store.length
        assert_whole(self.index, self.codes)
        assert_samples_as_brute_force(self.index, self.codes)


SIZES = st.sampled_from(
    [
        IndexSizes(tail=32, room=48, joined=128, segment=200, touch_steps=2, hashed=4, sorted=8),
        IndexSizes(tail=16, room=32, joined=64, segment=512, touch_steps=2, hashed=4, sorted=1),  # tails wait for joins
        IndexSizes(tail=16, room=16, joined=16, segment=32, touch_steps=2, hashed=3, sorted=1000, join_steps=1),
    ]
)
CHANGES = st.lists(
    st.tuples(st.sampled_from(["decode", "idle", "flush", "prefill", "cut"]), st.integers(1, 150)), max_size=6
)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), CHANGES, SIZES)
def test_grown_and_cut_equals_hashing_everything_again(first, changes, sizes):
    growing = Growing(first, sizes)
    for kind, amount in changes:
        growing.change(kind, amount)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), CHANGES, CHANGES, CHANGES, SIZES)
def test_forks_grow_and_are_cut_without_the_other_noticing(first, before, left, right, sizes):
    growing = Growing(first, sizes)
    for kind, amount in before:
        growing.change(kind, amount)
    fork = growing.fork(seed=1)
    assert np.array_equal(codes_in(fork.index), codes_in(growing.index))
    assert (fork.index.built, fork.index.nbytes) == (growing.index.built, growing.index.nbytes)
    assert all(mine is yours for mine, yours in zip(fork.index.segments, growing.index.segments, strict=True))
    for changes, one, other in ((left, fork, growing), (right, growing, fork)):
        for kind, amount in changes:
            one.change(kind, amount)
            other.check()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.lists(st.integers(1, 150), max_size=3), st.integers(1, 250), SIZES)
def test_a_fork_of_what_was_read_takes_the_steps_of_an_index_of_its_own(first, turns, steps, sizes):
    """Whenever it is made: the same rows are hashed and the same segments are ready after the same steps."""
    growing, alone = Growing(first, sizes), Growing(first, sizes)
    for turn in turns:
        growing.change("prefill", turn)
        alone.change("prefill", turn)
    early = growing.fork(seed=0)
    late = early.fork(seed=0)
    early.source = late.source = alone.source
    growing.change("decode", 100)  # what the parent does then is its own
    for _ in range(steps):
        for one in (early, late, alone):
            one.append(1)
            one.index.step()
        for fork in (early, late):
            assert fork.index._now.tail_at == alone.index._now.tail_at
            assert [segment.n for segment in fork.index.segments] == [segment.n for segment in alone.index.segments]
            assert np.array_equal(codes_in(fork.index), codes_in(alone.index))


def test_a_fork_begins_a_segment_in_the_making_anew():
    growing = Growing(10, IndexSizes(tail=32, room=64, joined=128, segment=200, touch_steps=2, sorted=4))
    growing.change("decode", 26)
    growing.change("idle", 3)
    assert growing.index._joining is not None
    fork = growing.fork(seed=1)
    growing.change("idle", 60)
    assert [segment.n for segment in growing.index.segments] == [36]
    assert fork.index.segments == ()
    fork.check()
    fork.change("idle", 63)
    assert [segment.n for segment in fork.index.segments] == [36]


def test_a_segment_is_made_over_many_steps_and_changes_nothing_until_it_is_ready():
    growing = Growing(10, IndexSizes(tail=32, room=64, joined=128, segment=200, touch_steps=2, sorted=4))
    seen = []
    for _ in range(100):
        growing.append(1)
        growing.index.step()
        tail = growing.index.sampled_rows().tail
        seen.append((len(growing.index.segments), tail.n if tail else 0))
    assert max(rows for count, rows in seen if count == 0) > 40  # still scanned while tables are made
    assert {count for count, _ in seen} >= {0, 1}


def test_a_cut_drops_what_is_in_the_making():
    growing = Growing(10, IndexSizes(tail=32, room=64, joined=128, segment=200, touch_steps=2, sorted=4))
    growing.change("decode", 26)
    growing.change("idle", 3)
    assert growing.index._joining is not None
    growing.change("cut", 2)  # within the rows of the segment in the making
    assert growing.index.segments == ()
    growing.change("decode", 60)
    assert len(growing.index.segments) == 1


def test_a_prefill_finishes_what_is_in_the_making():
    growing = Growing(10, IndexSizes(tail=32, room=64, joined=128, segment=200, touch_steps=2, sorted=4))
    growing.change("decode", 26)
    growing.change("idle", 3)
    assert growing.index._joining is not None
    growing.change("prefill", 1)
    assert len(growing.index.segments) == 1


def test_a_step_does_little_however_long_the_index(monkeypatch):
    """Rows hashed and ids moved per step, whatever falls due: the work of a step is bounded, so its time is."""
    sizes = IndexSizes(tail=64, room=128, joined=1024, segment=2048, touch_steps=2, hashed=4, sorted=48)
    growing = Growing(1, sizes)
    work, hashed = [0], [0]
    advance, codes = kernels.Joining.advance, LshHasher.codes

    def counting_advance(joining, items, *args):
        work[-1] += min(items, joining.items - joining.done) * joining.n
        advance(joining, items, *args)

    def counting_codes(self, store, start, stop, *args):
        hashed[-1] += stop - start
        codes(self, store, start, stop, *args)

    monkeypatch.setattr(kernels.Joining, "advance", counting_advance)
    monkeypatch.setattr(LshHasher, "codes", counting_codes)
    for _ in range(1900):
        growing.append(1)
        work.append(0)
        hashed.append(0)
        growing.index.step()
    assert max(hashed) <= 4
    assert max(work) <= HKV * L * 48 + 1024  # and one table, as they are not cut
    assert growing.index.length == growing.store.length
    assert len(growing.index.segments) <= 4


def test_rows_that_were_stored_long_before_are_taken_in_bit_by_bit():
    store = store_of(500)
    index = LshIndex(
        hasher(), store, threads=1, sizes=IndexSizes(tail=32, room=64, joined=128, segment=200, touch_steps=2)
    )
    assert index.length == 0
    for _ in range(200):
        index.step()
    assert index.length == 500
    assert_whole(index, codes_of(store, index))


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="room: want from 10 to twice that, got 21"):
        IndexSizes(tail=10, room=21)
    with pytest.raises(ValueError, match="ascend from 20"):
        IndexSizes(tail=10, room=20, joined=19)


def test_no_segment_exceeds_what_its_ids_can_name():
    store = RowStore(BlockPool(1, 8, "bfloat16", block_rows=4096))
    count = kernels.MAX_SEGMENT_ROWS + 5000
    store.append(torch.randn(1, count, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16())
    index = LshIndex(LshHasher(0, 8, 6, 2, 0, 1, Staging(torch.device("cpu"))), store, threads=1)
    index.extend()
    assert [segment.n for segment in index.segments] == [kernels.MAX_SEGMENT_ROWS, 5000]
    assert index.length == count


def test_mean_is_that_of_all_stored_keys():
    store = store_of(200)
    keys = store.read(0, 200)[:, :, 0].double()
    error = np.abs(mean_key(store) - keys.mean(dim=1).numpy())
    assert (error <= SUM * U * keys.abs().mean(dim=1).numpy()).all()


def test_outgrown_after_a_quarter_more():
    store = store_of(100)
    index = make_index(store)
    store.append(store_of(25).read(0, 25))
    assert not index.outgrown
    store.append(store_of(1).read(0, 1))
    assert index.outgrown


def test_projections_on_a_device_give_the_codes_of_the_kernels():
    """What a GPU run does with torch, against the kernels: signs may differ only within rounding of zero."""
    store = store_of(500)
    mean = mean_key(store)
    reference = hasher()
    bias = reference.bias(mean)
    matrix = torch.from_numpy(gaussian_directions(0, 1, D, K * L))
    keys = store.read(0, 500)[:, :, 0]
    projected = keys @ matrix - torch.from_numpy(bias).unsqueeze(1)
    codes = np.empty((HKV, L, 500), dtype=np.uint16)
    reference.codes(store, 0, 500, bias, codes)
    powers = 2 ** torch.arange(K, dtype=torch.int32)
    device = pack_signs(projected, powers, L).numpy().view(np.uint16).transpose(0, 2, 1)
    differing = device != codes
    rounding = 2 * DOT * U * (keys.abs() @ matrix.abs() + torch.from_numpy(np.abs(bias)).unsqueeze(1))
    near_zero = (projected.abs() <= rounding).unflatten(-1, (L, K)).any(-1).numpy().transpose(0, 2, 1)
    assert not (differing & ~near_zero).any()
    assert near_zero.mean() < 0.01


def test_directions_depend_on_seed_and_layer_alone():
    first = gaussian_directions(3, 5, D, 24)
    assert np.array_equal(first, gaussian_directions(3, 5, D, 24))
    assert not np.array_equal(first, gaussian_directions(3, 6, D, 24))
    assert not np.array_equal(first, gaussian_directions(4, 5, D, 24))
    assert abs(first.mean()) < 0.2
    assert 0.8 < first.std() < 1.2


def test_after_a_cut_other_text_gets_its_own_mean():
    store = store_of(200)
    index = make_index(store)
    store.truncate(20)
    index.truncate(20)
    store.append(store_of(100, seed=1).read(0, 100) - 5.0)
    assert store.length < 200
    assert index.outgrown
