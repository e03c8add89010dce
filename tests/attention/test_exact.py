"""Exact attention and merging against one softmax in float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from magicpig_cli.attention.base import LogitRule, Partial
from magicpig_cli.attention.exact import attend_chunk, attend_step
from magicpig_cli.attention.merge import merge
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.window import WindowShape
from tests.tolerances import close_attention

CPU = torch.device("cpu")
HKV, G, D = 2, 3, 16
SHAPE = WindowShape(4, 16, 8)


def layer(length: int, window: int | None = None, seed: int = 0) -> tuple[LayerCache, torch.Tensor]:
    cache = LayerCache(LayerSpec(HKV, D, window), SHAPE, BlockPool(HKV, D, "float32", block_rows=32), Staging(CPU))
    rows = torch.randn(HKV, length, 2, D, generator=torch.Generator().manual_seed(seed))
    cache.extend(rows)
    return cache, rows


def truth(q: torch.Tensor, rows: torch.Tensor, rule: LogitRule, mask: torch.Tensor | None = None) -> torch.Tensor:
    """q [H, T, D], rows [Hkv, n, 2, D], mask bool [T, n] of what is seen → [H, T, D], all in float64."""
    k, v = rows.double().repeat_interleave(G, dim=0).unbind(dim=2)
    logits = q.double() @ k.transpose(1, 2) * rule.scale
    if rule.softcap is not None:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return logits.softmax(dim=-1) @ v


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 40, 500])
@pytest.mark.parametrize(("before", "count"), [(0, 1), (0, 50), (3, 9), (130, 64), (700, 600), (2200, 40)])
def test_chunk_equals_masked_softmax(before, count, window, softcap):
    cache, rows = layer(before + count, window)
    history = LayerCache(cache.spec, SHAPE, BlockPool(HKV, D, "float32", block_rows=32), Staging(CPU))
    history.extend(rows[:, :before])
    q = torch.randn(HKV * G, count, D, generator=torch.Generator().manual_seed(1)) * 3
    rule = LogitRule(D**-0.5, softcap)
    out = attend_chunk(q, rows[:, before:], history.pieces(at_most=100), before, rule, window, Staging(CPU))
    positions = torch.arange(before, before + count)[:, None]
    keys = torch.arange(before + count)
    mask = (keys <= positions) & (keys > positions - (window or 10**9))
    assert close_attention(out.transpose(0, 1), truth(q, rows, rule, mask), rows)


@pytest.mark.parametrize("cuts", [(0, 4, 90, 2500), (0, 1024, 2048, 2500), (0, 1, 1023, 1025, 2500), (0, 2500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunk_is_the_same_however_its_history_is_cut(cuts, dtype):
    rows = torch.randn(HKV, 2530, 2, D, generator=torch.Generator().manual_seed(4)).to(dtype)
    q = torch.randn(30, HKV * G, D, generator=torch.Generator().manual_seed(5)).transpose(0, 1)  # as the models give it
    rule = LogitRule(D**-0.5)

    def out(*borders: int) -> torch.Tensor:
        history = [(a, rows[:, a:b]) for a, b in pairwise(borders)]
        return attend_chunk(q, rows[:, 2500:], history, 2500, rule, None, Staging(CPU))

    assert torch.equal(out(*cuts), out(0, 700, 1400, 2100, 2500))
    mask = torch.arange(2530) <= torch.arange(2500, 2530)[:, None]
    assert close_attention(out(*cuts).transpose(0, 1), truth(q, rows, rule, mask), rows.float())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "count"), [(9, 3, 64, 300), (4, 1, 80, 20), (4, 4, 24, 1), (4, 2, 16, 2)]
)
def test_chunk_is_the_same_on_every_number_of_threads(heads, kv_heads, dim, count):
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(heads, count, dim, generator=generator)
    rows = torch.randn(kv_heads, 1500 + count, 2, dim, generator=generator)
    before = torch.get_num_threads()
    outs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            history = [(0, rows[:, :1500])]
            outs.append(attend_chunk(q, rows[:, 1500:], history, 1500, LogitRule(dim**-0.5), None, Staging(CPU)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5, 60])
def test_step_equals_softmax_over_what_is_seen(window, softcap):
    lengths = (1, 4, 19, 27, 28, 29, 300)
    layers = [layer(n, window, seed=n) for n in lengths]
    q = torch.randn(len(lengths), HKV * G, D, generator=torch.Generator().manual_seed(2)) * 3
    rule = LogitRule(D**-0.5, softcap)
    done = attend_step(q, [cache for cache, _ in layers], [0] * len(layers), rule, 1, Staging(CPU))
    for row, out, (_, rows) in zip(q, done.out, layers, strict=True):
        seen = rows if window is None else rows[:, -window:]
        assert close_attention(out[:, None], truth(row[:, None], seen, rule), seen)


def test_window_and_store_merge_to_the_whole():
    cache, rows = layer(200)
    q = torch.randn(1, HKV * G, D, generator=torch.Generator().manual_seed(3))
    rule = LogitRule(D**-0.5)
    near = attend_step(q, [cache], [cache.store.length], rule, 1, Staging(CPU))
    boundary = SHAPE.boundary(200)
    k, v = rows[:, 4:boundary].repeat_interleave(G, dim=0).unbind(dim=2)
    logits = (q[0, :, None].double() @ k.double().transpose(1, 2) * rule.scale)[:, 0]
    middle = (logits.softmax(-1)[:, None] @ v.double())[:, 0]
    far = Partial(middle.float()[None], torch.logsumexp(logits, dim=-1).float()[None])
    assert close_attention(merge(near, far).out[0][:, None], truth(q[0][:, None], rows, rule), rows)


def test_empty_parts_merge_away_without_nan():
    empty = Partial(torch.zeros(1, 2, 3), torch.full((1, 2), -torch.inf))
    full = Partial(torch.ones(1, 2, 3), torch.tensor([[0.5, -80.0]]))
    for merged in (merge(empty, full), merge(full, empty)):
        assert torch.equal(merged.out, full.out)
        assert torch.equal(merged.lse, full.lse)
    both = merge(empty, empty)
    assert torch.equal(both.out, empty.out)
    assert torch.isneginf(both.lse).all()
