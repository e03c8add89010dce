"""While the index grows, every key counts once: sampled from the index, or attended exactly until it is there."""

from __future__ import annotations

import pytest
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.attention.exact import _visible, attend_step
from magicpig_cli.attention.lsh import LshSampler
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import IndexSizes, LshIndex
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import TORCH_DTYPE
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.kernels import RowType, window_type
from tests.fake_device import FakeDevice
from tests.tolerances import close_attention

HKV, G, D = 2, 2, 16
FIRST, STEPS = 100, 260
STAGING = Staging(torch.device("cpu"))
RULE = LogitRule(D**-0.5)


class GrowingLayer:
    """One layer that samples every indexed key: with one bit and 1,000 tables two of them agree for any query."""

    def __init__(self, staging: Staging = STAGING, kind: RowType = "float32") -> None:
        generator = torch.Generator().manual_seed(0)
        row_type = TORCH_DTYPE[window_type(kind)]
        self.keys, self.values = torch.randn(2, HKV, FIRST + STEPS, D, generator=generator).to(row_type)
        self.queries = torch.randn(STEPS, 1, HKV * G, 1, D, generator=generator)
        self.staging = staging
        self.sampler = LshSampler(1, 1000, hash_seed=0, threads=1, staging=staging)
        self.attention = Attention(self.sampler, row_type, 1, staging)
        pool = BlockPool(HKV, D, kind, block_rows=64)
        self.cache = LayerCache(LayerSpec(HKV, D), WindowShape(4, 8, 16), pool, staging)
        self.cache.extend(self.rows(0, FIRST))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.stack([self.keys[:, start:stop], self.values[:, start:stop]], dim=2)

    def step(self) -> StepRecorder:
        record, at = StepRecorder(), self.cache.length
        key, value = self.keys[None, :, at : at + 1], self.values[None, :, at : at + 1]
        q, key, value = map(self.staging.to_device, (self.queries[at - FIRST], key, value))
        before = self.cache.index.length if self.cache.index is not None else 0
        out = self.attention.step(0, [self.cache], [True], q, key, value, RULE, record)
        self.attention.finish(record)
        exact = attend_step(q[:, :, 0].contiguous(), [self.cache], [0], RULE, 1, self.staging)
        found, wanted = map(self.staging.to_host, (out, exact.out))
        assert close_attention(found.transpose(1, 2)[0], wanted[0][:, None], self.cache.copy_rows().float())
        covered = self.cache.index.length if self.staging.on_host else before  # beside a device upkeep comes last
        assert record.sampled[0] == record.offloaded[0] == [covered * HKV * G]
        return record


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("built", [True, False])
def test_every_key_counts_once_at_every_step(built, on_host, kind):
    """`built`: the index was there at first, or the first step begins it. A window on a GPU is merged apart."""
    layer = GrowingLayer(STAGING if on_host else Staging(FakeDevice()), kind)
    if built:
        hasher = layer.sampler.hasher(0, D)
        layer.cache.index = LshIndex(
            hasher, layer.cache.store, 1, IndexSizes(tail=32, room=48, joined=128, segment=512, touch_steps=2)
        )  # fmt: skip
        layer.attention.build_index(0, layer.cache)
    lags = set()
    for _ in range(STEPS):
        layer.step()
        lags.add(layer.cache.store.length - layer.cache.index.length)
    assert 0 in lags
    assert len(lags) > 3  # rows that have left the window and are not in the index yet


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_every_key_counts_once_after_a_cut_at_any_moment(kind):
    layer = GrowingLayer(kind=kind)
    for cut in (1, 3, 17, 30, 64, 35):
        for _ in range(60):
            layer.step()
        layer.cache.truncate(max(FIRST, layer.cache.length - cut))
    layer.step()


@pytest.mark.parametrize("store_from", [0, 1, 63, 64, 75, 80])
def test_rows_beside_the_index_are_the_same_for_kernels_and_devices(store_from):
    """Sink, recent rows and the store from a row on: as runs for the kernels, as pieces for another device."""
    layer = GrowingLayer()
    assert layer.cache.store.length == 80
    everything = layer.rows(0, FIRST)
    wanted = torch.cat([everything[:, :4], everything[:, 4 + store_from :]], dim=1)
    assert torch.equal(torch.cat(list(_visible(layer.cache, store_from)), dim=1), wanted)
    runs = [torch.from_numpy(table.read(start, stop)) for table, start, stop in layer.cache.runs(store_from)]
    assert torch.equal(torch.cat([runs[0], *runs[2:], runs[1]], dim=1), wanted)


@pytest.mark.parametrize("on_host", [True, False])
def test_sequences_do_not_notice_each_other(on_host):
    """One that samples and one that is attended exactly, together and alone: the same bits."""
    staging = STAGING if on_host else Staging(FakeDevice())
    together, alone = ([GrowingLayer(staging), GrowingLayer(staging)] for _ in range(2))
    for layer in (together[0], alone[0]):
        layer.attention.build_index(0, layer.cache)
    attention, flags = together[0].attention, [True, False]
    for step in range(40):
        at = FIRST + step
        q = together[0].queries[step]
        key, value = together[0].keys[None, :, at : at + 1], together[0].values[None, :, at : at + 1]
        caches = [layer.cache for layer in together]
        q, key, value = map(staging.to_device, (q, key, value))
        two = [x.repeat(2, 1, 1, 1) for x in (q, key, value)]
        out = attention.step(0, caches, flags, *two, RULE, StepRecorder())
        for b, (layer, flag) in enumerate(zip(alone, flags, strict=True)):
            single = attention.step(0, [layer.cache], [flag], q, key, value, RULE, StepRecorder())
            assert torch.equal(out[b], single[0])
