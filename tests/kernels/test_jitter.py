"""The pool of jitter: quantiles of an exponential distribution in an order that tells nothing; where heads begin."""

from __future__ import annotations

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.kernels.jitter import jitter_pool, jitter_start
from magicpig_cli.kernels.signature_shape import JITTER_NATS, SIGNATURE_GROUP, TOP_SCORE
from tests.kernels.data import budgets, make_basis, make_signed, make_table

STANDARD_ERRORS = 4.5


def test_the_pool_has_the_exponential_distribution():
    nats = np.sort(jitter_pool() * (JITTER_NATS / TOP_SCORE))
    wanted = -np.log(1 - (np.arange(kernels.JITTER_ROWS) + 0.5) / kernels.JITTER_ROWS)
    assert np.abs(nats - wanted).max() <= JITTER_NATS / TOP_SCORE / 2 * (1 + 1e-9)
    assert jitter_pool().max() <= TOP_SCORE


def test_neighbours_in_the_pool_are_independent():
    u = np.exp(-jitter_pool() * (JITTER_NATS / TOP_SCORE)) - 0.5
    for apart in (1, 2, 31, 32, 256, 4096):
        correlation = float((u * np.roll(u, apart)).mean() * 12)
        assert abs(correlation) < STANDARD_ERRORS / kernels.JITTER_ROWS**0.5
    cells = u.reshape(-1, 256).mean(axis=1) * (12 * 256) ** 0.5
    assert abs((cells**2).mean() - 1) < STANDARD_ERRORS * (2 / len(cells)) ** 0.5  # as uneven as chance, and no more


def test_heads_layers_and_seeds_begin_in_places_of_their_own():
    starts = {jitter_start((seed, layer), h) for seed in (0, 1, 2**64 - 1) for layer in range(8) for h in range(4)}
    assert len(starts) > 90  # of 96
    assert all(start % SIGNATURE_GROUP == 0 and 0 <= start < kernels.JITTER_ROWS for start in starts)


def test_keys_are_taken_in_proportion_to_their_weight(isa):
    """Logits of 0, −1 and −2 in turn, that signatures of one dimension tell exactly: as often as exp(logit) says."""
    count, budget = 16_384, 0.02
    rows = np.zeros((1, count, 2, 1), dtype=np.float32)
    logits = np.resize([0.0, -1.0, -2.0], count)
    rows[0, :, 0, 0] = logits
    basis = make_basis(32, 1)
    group, q = make_signed(make_table(rows), count, basis), np.ones((1, 1, 1), dtype=np.float32)
    taken = np.zeros(3)
    for seed in range(20):
        (found,) = kernels.rabitq_sample(
            q, basis, [group], budget=budgets(1, 1, budget), tail=0.0, key=(seed, 0), scale=1.0
        )  # fmt: skip
        taken += [(logits[found[0]] == level).sum() for level in (0.0, -1.0, -2.0)]
    wanted = 20 * budget * count * np.exp([0.0, -1.0, -2.0]) / np.exp([0.0, -1.0, -2.0]).sum()
    assert (np.abs(taken - wanted) < STANDARD_ERRORS * np.sqrt(wanted)).all()


def test_the_pool_is_entered_near_its_end_where_other_tests_count_on_it():
    assert all(kernels.JITTER_ROWS - jitter_start((13477, 2), h) <= 256 for h in (0, 1))
