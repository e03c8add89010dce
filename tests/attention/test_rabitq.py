"""Rotations, and how a budget follows an error."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli.attention.rabitq import next_budgets, random_rotation, signature_directions
from magicpig_cli.config import BUDGET_RANGE


@pytest.mark.parametrize("dim", [1, 2, 24, 64, 80, 128])
def test_rotations_are_orthogonal(dim):
    matrix = random_rotation(np.random.default_rng(dim), dim)
    assert np.abs(matrix @ matrix.T - np.eye(dim)).max() < 1e-13


def test_rotations_are_uniform():
    """Haar: entries of a random rotation have mean 0 and variance 1/D, and rows do not depend on each other's signs."""
    dim, draws = 4, 4000
    rng = np.random.default_rng(0)
    drawn = np.stack([random_rotation(rng, dim) for _ in range(draws)])
    error = 4 / np.sqrt(draws)  # four standard errors of values of order 1
    assert np.abs(drawn.mean(axis=0)).max() < error / np.sqrt(dim)
    assert np.abs((drawn**2).mean(axis=0) - 1 / dim).max() < error / dim
    assert abs(np.linalg.det(drawn).mean()) < error  # reflections as often as rotations
    assert np.abs((drawn[:, 0] * drawn[:, 1]).mean(axis=0)).max() < error / dim


def test_directions_depend_on_seed_and_layer_alone():
    first = signature_directions(3, 5, 24, 64)
    assert first.shape == (64, 24)
    assert first.dtype == np.float32
    assert np.array_equal(first, signature_directions(3, 5, 24, 64))
    assert np.array_equal(first[:32], signature_directions(3, 5, 24, 32))
    assert not np.array_equal(first, signature_directions(3, 6, 24, 64))
    assert not np.array_equal(first, signature_directions(4, 5, 24, 64))
    for start in (0, 24):  # whole rotations stand one below the other
        part = first[start : start + 24].astype(np.float64)
        assert np.abs(part @ part.T - np.eye(24)).max() < 1e-6


def test_a_budget_rises_at_once_and_falls_with_a_margin():
    budgets = np.full(5, 0.02, dtype=np.float32)
    moved = next_budgets(budgets, np.array([0.051, 0.037, 0.026, 0.024, 0.0]), 0.05)
    assert moved.dtype == np.float32
    assert moved.tolist() == pytest.approx([0.04, 0.02, 0.02, 0.02 * 0.5**0.5, 0.02 * 0.5**0.5])


def test_a_budget_settles_between_its_bounds():
    """A head whose error is c / budget ends below the target, and stays; one that cannot reach it ends at the bound."""
    low, high = BUDGET_RANGE
    scale = np.array([1e-5, 2e-4, 1e-3, 3e-3, 5e-2])
    budgets = np.full(5, 0.02, dtype=np.float32)
    for _ in range(40):
        budgets = next_budgets(budgets, scale / budgets, 0.05)
    assert np.array_equal(budgets, next_budgets(budgets, scale / budgets, 0.05))
    assert ((scale / budgets)[:4] <= 0.05).all()
    assert budgets[0] == np.float32(low)
    assert budgets[4] == np.float32(high)
