"""Baselines that see every key: what they choose, that they are unbiased, and that choosing all is exact attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.attention.oracle import BASELINES, FullScores, WholeStore, oracle_probabilities, pick_oracle, pick_top
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.errors import MagicpigError
from tests import tolerances

HEADS, KV_HEADS, DIM, TOKENS = 6, 2, 16, 700
STAGING = Staging(torch.device("cpu"))
RULES = [LogitRule(DIM**-0.5), LogitRule(DIM**-0.5, softcap=3.0)]


def no_draws() -> torch.Tensor:
    raise AssertionError("nothing is drawn")


@pytest.mark.parametrize("budget", [0.001, 0.02, 0.3, 0.97])
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 300.0])
def test_probabilities_use_the_budget_and_follow_the_weights(budget, spread):
    logits = spread * torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    u = oracle_probabilities(logits, budget)
    assert u.min() >= 0
    assert u.max() <= 1
    assert u.sum(dim=-1).tolist() == pytest.approx([500 * budget] * 3)
    weights = (logits.double() - logits.amax(dim=-1, keepdim=True)).exp()
    for row, w in zip(u, weights, strict=True):
        open_ones = (row < 1) & (w > 1e-25)
        ratio = row[open_ones] / w[open_ones]
        if len(ratio):
            assert float(ratio.max() / ratio.min()) == pytest.approx(1)
            assert float(w[row >= 1].min() if (row >= 1).any() else w.max()) >= float(w[open_ones].max())


def test_by_hand():
    logits = torch.tensor([[8.0, 4.0, 2.0, 2.0]]).log()
    assert oracle_probabilities(logits, 0.25)[0].tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125])
    assert oracle_probabilities(logits, 0.625)[0].tolist() == pytest.approx([1, 0.75, 0.375, 0.375])
    assert oracle_probabilities(logits, 1.0)[0].tolist() == [1, 1, 1, 1]
    assert pick_top(logits, 0.5, no_draws).exp()[0].tolist() == pytest.approx([8, 4, 0, 0])
    assert pick_top(logits, 0.01, no_draws).exp()[0].tolist() == pytest.approx([8, 0, 0, 0])
    drawn = pick_oracle(logits, 0.25, lambda: torch.tensor([[0.4, 0.3, 0.1, 0.9]]).double())
    assert drawn.exp()[0].tolist() == pytest.approx([16, 0, 16, 0])


class Layer:
    """One layer with rows of its own, and a step of any attention over a fork of it."""

    def __init__(self, seed: int = 0, tokens: int = TOKENS) -> None:
        generator = torch.Generator().manual_seed(seed)
        pool = BlockPool(KV_HEADS, DIM, "float32", 256)
        self.cache = LayerCache(LayerSpec(KV_HEADS, DIM), WindowShape(4, 64, 64), pool, STAGING)
        self.cache.extend(torch.randn(KV_HEADS, tokens, 2, DIM, generator=generator))
        self.q = 2 * torch.randn(1, HEADS, 1, DIM, generator=generator)
        self.new = torch.randn(2, 1, KV_HEADS, 1, DIM, generator=generator)


def step(attention: Attention, layers: list[Layer], rule: LogitRule, sampled: list[bool] | None = None):
    record = StepRecorder(errors=[])
    caches = [layer.cache.fork() for layer in layers]
    for cache, flag in zip(caches, sampled or [True] * len(caches), strict=True):
        if flag:
            attention.build_index(5, cache)
    q, new = torch.cat([layer.q for layer in layers]), torch.cat([layer.new for layer in layers], dim=1)
    out = attention.step(5, caches, sampled or [True] * len(layers), q, new[0], new[1], rule, record)
    return out[:, 0], record


def full_scores(name: str, budget: float, seed: int = 0) -> Attention:
    return Attention(FullScores(name, budget, seed, 1, STAGING), torch.float32, 1, STAGING)


def middle(layer: Layer, rule: LogitRule, name: str, budget: float, seed: int = 0):
    """Exponents' sum and weighted values [H, 1 + D] of the chosen keys alone, and how many these are."""
    sampler = FullScores(name, budget, seed, 1, STAGING)
    layer.cache.index = sampler.new_index(5, layer.cache)
    layer.cache.index.extend()
    found = sampler.attend(5, layer.q[:, :, 0].numpy(), [layer.cache], rule, StepRecorder())
    total = found.partial.lse.double().exp()
    sums = torch.cat([total.unsqueeze(-1), found.partial.out.double() * total.unsqueeze(-1)], dim=-1)
    return sums[0].numpy(), int(found.sampled.sum())


def exact(layers: list[Layer], rule: LogitRule) -> torch.Tensor:
    return step(Attention(None, torch.float32, 1, STAGING), layers, rule, [False] * len(layers))[0]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", BASELINES)
def test_all_keys_are_exact_attention(name, rule):
    layer = Layer()
    out, record = step(full_scores(name, 1.0), [layer], rule)
    rows = layer.cache.copy_rows()
    assert tolerances.close_attention(out.transpose(0, 1), exact([layer], rule).transpose(0, 1).double(), rows)
    assert record.sampled[5] == record.offloaded[5] == [HEADS * layer.cache.store.length]


@pytest.mark.parametrize("rule", RULES)
def test_top_keys_are_the_largest_logits(rule):
    layer = Layer()
    _, record = step(full_scores("topk", 0.02), [layer], rule)
    assert record.sampled[5] == [HEADS * round(0.02 * layer.cache.store.length)]
    assert float(record.errors[0].max()) > 0


@pytest.mark.parametrize("rule", RULES)
def test_the_oracle_is_unbiased_before_normalisation(rule):
    """Σ exp(logit)·v and Σ exp(logit) over draws of 400 seeds, against exact ones, within 4 standard errors."""
    layer = Layer()
    drawn = [middle(layer, rule, "oracle", 0.05, seed) for seed in range(400)]
    sums, counts = [x for x, _ in drawn], [count for _, count in drawn]
    wanted, _ = middle(layer, rule, "topk", 1.0)
    deviation = np.std(sums, axis=0, ddof=1) / len(sums) ** 0.5
    assert (np.abs(np.mean(sums, axis=0) - wanted) <= 4 * deviation).all()
    assert len({float(x[0, 1]) for x in sums}) > 300  # another draw for each seed
    keys = HEADS * layer.cache.store.length
    assert np.mean(counts) / keys == pytest.approx(0.05, abs=4 * (0.05 / keys / 400) ** 0.5)


@pytest.mark.parametrize("name", BASELINES)
def test_neighbours_change_nothing(name):
    layers = [Layer(0), Layer(1, tokens=500), Layer(2)]
    together, record = step(full_scores(name, 0.1), layers, RULES[0], [True, False, True])
    for place, layer in enumerate(layers):
        if place == 1:
            alone = exact([layer], RULES[0])
            assert record.sampled[5][place] == record.offloaded[5][place] == 0
        else:
            alone, _ = step(full_scores(name, 0.1), [layer], RULES[0])
        assert torch.equal(together[place], alone[0])
    assert record.errors[0].shape == (2, HEADS)


def test_heads_looked_at_in_parts_give_the_same(monkeypatch):
    whole, _ = step(full_scores("oracle", 0.1), [Layer()], RULES[0])
    monkeypatch.setattr("magicpig_cli.attention.oracle._MOST_FLOATS", 1)
    parts, _ = step(full_scores("oracle", 0.1), [Layer()], RULES[0])
    assert torch.equal(whole, parts)


def test_no_key_at_all_leaves_the_exact_part(monkeypatch):
    nothing = {"topk": lambda logits, *_: torch.full_like(logits, -torch.inf)}
    monkeypatch.setattr("magicpig_cli.attention.oracle.BASELINES", nothing)
    out, record = step(full_scores("topk", 0.1), [Layer()], RULES[0])
    assert record.sampled[5] == [0]
    assert torch.isfinite(out).all()


def test_what_is_sampled_from_grows_and_is_cut_with_the_store():
    layer = Layer()
    index = WholeStore("topk", layer.cache.store)
    assert (index.length, index.nbytes) == (0, 0)
    index.extend()
    before = layer.cache.store.length
    assert index.length == before
    fork = layer.cache.fork()
    fork.extend(torch.randn(KV_HEADS, 200, 2, DIM))
    other = index.fork(fork.store)
    other.step()
    assert (index.length, other.length) == (before, fork.store.length)
    other.truncate(10)
    assert other.length == 10
    with pytest.raises(MagicpigError, match="no index"):
        index.saved(10)
