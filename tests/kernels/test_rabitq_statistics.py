"""The signature sampler over many rotations: how often a key is taken, and that the estimate is right on average.

Signatures are not independent between keys and their error is Gaussian only nearly, so u is held to a stated tolerance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import signature_deviation, signature_probability, with_tail
from tests.kernels.data import log_normal, make_basis, make_table
from tests.tolerances import INCLUSION, UNNORMALISED

ROTATIONS, COUNT, H = 256, 2048, 4
BUDGET = 0.04


def realistic(head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries [H, D] and rows [1, N, 2, D] as models have them: keys in a narrow cone, clusters of unequal size, a few
    large channels, and means that drift from cell to cell; queries that point away from the mean, towards a cluster."""
    rng = np.random.default_rng(7)
    cluster = rng.choice(32, size=COUNT, p=(1 / np.arange(1, 33)) / (1 / np.arange(1, 33)).sum())
    centres, mean = rng.normal(size=(32, head_dim)), 2 * rng.normal(size=head_dim)
    keys = mean + 0.5 * centres[cluster] + rng.normal(size=(COUNT, head_dim))
    keys += np.repeat(0.3 * rng.normal(size=(COUNT // 256, head_dim)), 256, axis=0)
    keys[:, :2] *= 4
    q = -0.3 * mean + centres[[0, 3, 11, 25]] + 0.5 * rng.normal(size=(H, head_dim))
    values = 0.5 * centres[cluster] + rng.normal(size=(COUNT, head_dim))
    return q.astype(np.float32), np.stack([keys, values], axis=1)[None].astype(np.float32)


@dataclass
class Draws:
    """Per rotation and head: hits and π [N], Σ e^s/π and Σ e^s/π·v over e^top, the output, its estimated error."""

    hits: np.ndarray
    pi: np.ndarray
    denominators: np.ndarray
    numerators: np.ndarray
    outs: np.ndarray
    errors: np.ndarray
    exact: np.ndarray  # [H, D]
    total: np.ndarray  # [H], Σ e^s over e^top
    weighted: np.ndarray  # [H, D]


@pytest.fixture(scope="module", params=[(64, 128, 0.0), (128, 128, 0.0), (96, 128, 0.25)])
def draws(request: pytest.FixtureRequest) -> Draws:
    head_dim, bits, tail = request.param
    q, rows = realistic(head_dim)
    table, scale, weights = make_table(rows, "bfloat16"), head_dim**-0.5, log_normal()
    stored = table.read(0, COUNT)[0].astype(np.float64)
    s = scale * (q.astype(np.float64) @ stored[:, 0].T)  # [H, N]
    exps = np.exp(s - s.max(axis=1, keepdims=True))
    hits, pis, denominators, numerators, outs, errors = [], [], [], [], [], []
    for seed in range(ROTATIONS):
        basis = make_basis(bits, head_dim, seed)
        group = kernels.SignedRows(table, [kernels.sign_rows(table, 0, COUNT, basis, 1)])
        budget = np.full((1, H), BUDGET, np.float32)
        asked = {"budget": budget, "tail": tail, "key": (seed, 0), "scale": scale, "threads": 1}
        done = kernels.rabitq_attend(q[None], basis, [group], weights, **asked)
        found = kernels.rabitq_sample(q[None], basis, [group], **asked)[0]
        hit = np.zeros((H, COUNT), dtype=bool)
        for h in range(H):
            hit[h, found[h]] = True
        total = np.exp(done.lse[0].astype(np.float64) - s.max(axis=1))
        hits.append(hit)
        pis.append(probabilities(q, stored, basis, group, tail, scale, seed))
        denominators.append(total)
        numerators.append(done.out[0].astype(np.float64) * total[:, None])
        outs.append(done.out[0].astype(np.float64))
        errors.append(done.error[0])
    weighted = exps @ stored[:, 1]
    total = exps.sum(axis=1)
    return Draws(*map(np.array, (hits, pis, denominators, numerators, outs, errors)), weighted / total[:, None], total,
                 weighted)  # fmt: skip


def probabilities(q, stored, basis, group, tail, scale, seed) -> np.ndarray:
    """π [H, N] in float64, by the threshold that the scores of these kernels give."""
    (scores,), units = kernels.rabitq_scores(q[None], basis, [group], key=(seed, 0), scale=scale)
    f = kernels.widen(group.blocks[0].factors)[0]
    x = stored[:, 0] - kernels.widen(group.blocks[0].means)[0].repeat(256, axis=0)
    rate = tail * np.float32(BUDGET)
    share, pi = (np.float32(BUDGET) - rate) / (1 - rate), []
    for h in range(H):
        bound = np.sort(scores[h])[-math.floor(share * COUNT + 0.5)]
        query = q[h].astype(np.float64) * scale
        sigma = signature_deviation(query, x, basis.bits, f, unit=float(units[0, h]))
        u = signature_probability(stored[:, 0] @ query, (float(bound) - 0.5) * units[0, h], sigma)
        pi.append(with_tail(u, float(rate)))
    return np.array(pi)


def test_keys_appear_as_often_as_their_probability_says(draws):
    """Must show: within 0.03 in each tenth of π. Keys are sorted into tenths by π in that rotation."""
    for low in np.arange(0, 1, 0.1):
        inside = (draws.pi >= low) & (draws.pi < low + 0.1 + 1e-9)
        assert inside.sum() > 1000
        assert abs(draws.hits[inside].mean() - draws.pi[inside].mean()) <= INCLUSION
    unlikely = draws.pi < 0.1  # most keys: those that jitter alone takes
    assert 0.9 < draws.hits[unlikely].sum() / draws.pi[unlikely].sum() < 1.1


def test_the_unnormalised_estimate_is_right_on_average(draws):
    """Must show: mean over rotations within 2% of exact, beside 4 standard errors."""
    spread = draws.denominators.std(axis=0, ddof=1) / math.sqrt(ROTATIONS)
    assert (np.abs(draws.denominators.mean(axis=0) - draws.total) <= 4 * spread + UNNORMALISED * draws.total).all()
    assert (spread < 0.05 * draws.total).all()  # or the line above says little
    spread = np.linalg.norm(draws.numerators.std(axis=0, ddof=1), axis=1) / math.sqrt(ROTATIONS)
    off = np.linalg.norm(draws.numerators.mean(axis=0) - draws.weighted, axis=1)
    assert (off <= 4 * spread + UNNORMALISED * np.linalg.norm(draws.weighted, axis=1)).all()


def test_bias_after_self_normalisation_is_small(draws):
    bias = np.linalg.norm(draws.outs.mean(axis=0) - draws.exact, axis=1)
    one_draw = np.sqrt(((draws.outs - draws.exact) ** 2).sum(axis=2).mean(axis=0))
    assert (bias <= 0.5 * one_draw).all()


def test_the_estimated_error_is_about_the_true_one(draws):
    """RMS over rotations, per head; EVIDENCE.md: true / estimated 1.20 to 1.29 at the median, before calibration."""
    true = np.sqrt((((draws.outs - draws.exact) ** 2).sum(axis=2)).mean(axis=0)) / np.linalg.norm(draws.exact, axis=1)
    estimated = np.sqrt((draws.errors.astype(np.float64) ** 2).mean(axis=0))
    assert (true / estimated > 0.5).all()
    assert (true / estimated < 2).all()
