"""The sampler over many hash seeds: how often a key is taken, and that the estimate is right on average.

Gaussian projections are independent, so hits of a key over seeds are binomial with the closed form of DESIGN.md.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from magicpig_cli import kernels
from tests.kernels.data import inclusion, log_weights, make_projection, make_table

SEEDS, COUNT, D = 256, 96, 24
GRID = [(1, 2), (1, 150), (8, 2), (8, 150), (8, 300), (10, 150), (10, 300), (12, 300), (16, 300)]


def make_case() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query [D], rows [1, N, 2, D] at angles from 0 to 180°, and their cosines, no centring."""
    rng = np.random.default_rng(5)
    q = rng.normal(size=D)
    rows = rng.normal(size=(1, COUNT, 2, D)).astype(np.float32)
    mix = np.linspace(1, -1, COUNT)[:, None] ** 3
    noise = rng.normal(size=(COUNT, D))
    rows[0, :, 0] = mix * q + np.sqrt(1 - mix**2) * noise
    keys = rows[0, :, 0].astype(np.float64)
    q = q.astype(np.float32)
    return q, rows, keys @ q / np.linalg.norm(keys, axis=1) / np.linalg.norm(q)


def draw(K: int, L: int, q: np.ndarray, rows: np.ndarray):
    """Per hash seed: hits bool [N], and Σ e^s/u·v [D], Σ e^s/u, output [D] of the kernel."""
    table, mu = make_table(rows), np.zeros((1, D), dtype=np.float32)
    weights = log_weights(K, L)
    hits, numerators, denominators, outs = [], [], [], []
    for seed in range(SEEDS):
        projection = make_projection(D, K, L, seed)
        codes = kernels.hash_rows(table, 0, COUNT, projection, None, 1)
        if K < 12:
            groups = [kernels.SampledRows(table, mu, [kernels.build_segment(codes, K, 0, 1)])]
        else:  # 2**K offsets for 96 keys would be most of the time; a tail samples the same
            groups = [kernels.SampledRows(table, mu, [], kernels.Tail(0, codes, COUNT))]
        own = kernels.hash_queries(q[None, None], projection, 1)
        done = kernels.lsh_attend(q[None, None], own, groups, weights, scale=D**-0.5, threads=1)
        hit = np.zeros(COUNT, dtype=bool)
        hit[kernels.lsh_sample(own, groups)[0][0]] = True
        total = math.exp(done.lse[0, 0])
        hits.append(hit)
        numerators.append(done.out[0, 0].astype(np.float64) * total)
        denominators.append(total)
        outs.append(done.out[0, 0].astype(np.float64))
    return np.array(hits), np.array(numerators), np.array(denominators), np.array(outs)


def binomial_interval(n: int, p: float, alpha: float) -> tuple[int, int]:
    """Smallest interval [low, high] with at most alpha / 2 of Binomial(n, p) on either side."""
    k = np.arange(n + 1)
    choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k])
    p = min(max(p, 1e-15), 1 - 1e-15)
    below = np.cumsum(np.exp(choose + k * math.log(p) + (n - k) * math.log1p(-p)))
    return int(np.searchsorted(below, alpha / 2)), int(np.searchsorted(below, 1 - alpha / 2))


@pytest.mark.parametrize(("K", "L"), GRID)
def test_rates_and_means_over_hash_seeds(native_isa, K, L):
    q, rows, cosine = make_case()
    hits, numerators, denominators, _ = draw(K, L, q, rows)
    u = inclusion(cosine, K, L)

    for key in range(COUNT):  # 1e-6 each: 9 grids of 96 keys fail by chance once in a thousand sets of seeds
        low, high = binomial_interval(SEEDS, float(u[key]), 1e-6)
        assert low <= hits[:, key].sum() <= high
    per_seed = hits.sum(axis=1)
    spread = max(per_seed.std(ddof=1), math.sqrt((u * (1 - u)).sum()))
    assert abs(per_seed.mean() - u.sum()) <= 4 * spread / math.sqrt(SEEDS)

    # Keys too rare to appear in 256 seeds carry a part of the sum that no sample mean can show: leave it out.
    exps = np.exp(D**-0.5 * (rows[0, :, 0].astype(np.float64) @ q))
    values = rows[0, :, 1].astype(np.float64)
    rare = u < 20 / SEEDS
    left_out = (hits[:, rare] / u[rare]) * exps[rare]
    denominators = denominators - left_out.sum(axis=1)
    numerators = numerators - left_out @ values[rare]
    wanted = exps[~rare] @ values[~rare]
    assert not rare.all()
    slack = 1e-5  # rounding of the kernel
    # Or by the closed form, if more: a key that nearly every seed hits may be in all of these.
    expected = np.sqrt(exps[~rare] ** 2 * (1 - u[~rare]) / u[~rare])
    spread = max(denominators.std(ddof=1), np.linalg.norm(expected)) / math.sqrt(SEEDS)
    assert abs(denominators.mean() - exps[~rare].sum()) <= 4 * spread + slack * exps.sum()
    of_values = np.linalg.norm(expected[:, None] * values[~rare], axis=0)
    spread = np.maximum(numerators.std(axis=0, ddof=1), of_values) / math.sqrt(SEEDS)
    assert (np.abs(numerators.mean(axis=0) - wanted) <= 4 * spread + slack * exps.sum()).all()


@pytest.mark.parametrize(("K", "L"), [(8, 150), (8, 300), (10, 300)])
def test_bias_after_self_normalisation_is_small(native_isa, K, L):
    """The ratio of two unbiased sums is biased by O(variance); here it stays far below the spread of one draw."""
    q, rows, _ = make_case()
    _, _, _, outs = draw(K, L, q, rows)
    exps = np.exp(D**-0.5 * (rows[0, :, 0].astype(np.float64) @ q))
    exact = exps @ rows[0, :, 1].astype(np.float64) / exps.sum()
    bias = np.linalg.norm(outs.mean(axis=0) - exact)
    one_draw = np.sqrt(((outs - exact) ** 2).sum(axis=1).mean())
    assert bias <= 0.5 * one_draw
