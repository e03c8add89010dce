"""The index: however it grew and was cut, it holds the codes of exactly the stored rows, under its first mean."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.attention.lsh import LshHasher, gaussian_directions, pack_signs
from magicpig_cli.cache import index as index_module
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import LshIndex, mean_key
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore

HKV, D, K, L = 2, 16, 4, 6


def store_of(count: int, seed: int = 0) -> RowStore:
    store = RowStore(BlockPool(HKV, D, "float32", block_rows=64))
    generator = torch.Generator().manual_seed(seed)
    store.append(torch.randn(HKV, count, 2, D, generator=generator) + 1.0)
    return store


def hasher(device: str = "cpu") -> LshHasher:
    return LshHasher(layer=1, head_dim=D, K=K, L=L, hash_seed=0, threads=1, staging=Staging(torch.device(device)))


def codes_in(index: LshIndex) -> np.ndarray:
    parts = [kernels.segment_codes(segment) for segment in index.segments]
    tail = index.sampled_rows().tail
    if tail is not None:
        parts.append(tail.codes[:, :, : tail.n])
    return np.concatenate(parts, axis=2)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 300),
    st.lists(st.one_of(st.integers(1, 150), st.integers(-200, -1)), max_size=6),
)
def test_grown_and_cut_equals_built_at_once_with_the_same_mean(first, changes):
    source = store_of(2000).read(0, 2000)
    store = store_of(0)
    store.append(source[:, :first])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "TAIL_ROWS", 32)  # several segments and merges within few rows
        index = LshIndex(hasher(), store, threads=1)
        for change in changes:
            if change > 0:
                store.append(source[:, store.length : store.length + change])
                index.extend()
            else:
                store.truncate(max(1, store.length + change))
                index.truncate(store.length)
            assert index.length == store.length
            bias = hasher().bias(index.mean)
            assert np.array_equal(codes_in(index), hasher().codes(store, 0, store.length, bias))
            starts = [segment.start for segment in index.segments]
            assert starts == sorted(starts)
            assert all(a.start + a.n == b.start for a, b in pairwise(index.segments))


def test_few_segments_after_long_growth(monkeypatch):
    monkeypatch.setattr(index_module, "TAIL_ROWS", 32)
    store = store_of(0)
    rows = store_of(1600).read(0, 1600)
    store.append(rows[:, :64])
    index = LshIndex(hasher(), store, threads=1)
    for start in range(64, 1600, 8):
        store.append(rows[:, start : start + 8])
        index.extend()
        sizes = [segment.n for segment in index.segments]
        # Each segment is more than twice as long as the next: logarithmically many.
        assert all(a > 2 * b for a, b in pairwise(sizes))
    assert len(index.segments) <= 6


def test_no_segment_exceeds_what_its_ids_can_name():
    store = RowStore(BlockPool(1, 8, "bfloat16", block_rows=4096))
    count = kernels.MAX_SEGMENT_ROWS + 5000
    store.append(torch.randn(1, count, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16())
    index = LshIndex(LshHasher(0, 8, 6, 2, 0, 1, Staging(torch.device("cpu"))), store, threads=1)
    assert [segment.n for segment in index.segments] == [kernels.MAX_SEGMENT_ROWS, 5000]
    assert index.length == count


def test_mean_is_that_of_all_stored_keys():
    store = store_of(200)
    assert np.allclose(mean_key(store), store.read(0, 200)[:, :, 0].double().mean(dim=1).numpy(), rtol=1e-6)


def test_outgrown_after_a_quarter_more():
    store = store_of(100)
    index = LshIndex(hasher(), store, threads=1)
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
    device = pack_signs(projected, K, L).numpy().transpose(0, 2, 1)
    differing = device != reference.codes(store, 0, 500, bias)
    near_zero = (projected.abs() < 1e-5).unflatten(-1, (L, K)).any(-1).numpy().transpose(0, 2, 1)
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
    index = LshIndex(hasher(), store, threads=1)
    store.truncate(20)
    index.truncate(20)
    store.append(store_of(100, seed=1).read(0, 100) - 5.0)
    assert store.length < 200
    assert index.outgrown
