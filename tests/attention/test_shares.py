"""How heads share a budget: which shares errors call for, and that together they read no more and no less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.attention.shares import LEAST, MOST, head_budgets, head_shares


def total(squares: np.ndarray, budgets: np.ndarray) -> float:
    """Σ of squared errors that go with 1 / budget²."""
    return float((squares / budgets**2).sum())


def test_no_other_shares_of_the_same_budget_err_less():
    rng = np.random.default_rng(0)
    squares = {layer: np.exp(2 * rng.standard_normal(6)) for layer in (1, 2, 5)}
    shares = head_shares(squares)
    chosen, all_squares = np.array(list(shares.values())), np.array(list(squares.values()))
    assert list(shares) == [1, 2, 5]
    assert chosen.mean() == pytest.approx(1, abs=0.01)
    least = total(all_squares, chosen)
    assert least < 0.5 * total(all_squares, np.ones((3, 6)))
    for _ in range(50):
        other = np.maximum(chosen * np.exp(0.3 * rng.standard_normal((3, 6))), 0.05)
        assert total(all_squares, other / other.mean() * chosen.mean()) > least


def test_a_head_that_hardly_errs_still_reads_something():
    shares = head_shares({1: np.array([0.0, 1.0, 1.0]), 2: np.array([1e-12, 1.0, 1e6])})
    found = np.array(list(shares.values()))
    assert found.min() > 0
    assert found.max() / found.min() <= MOST / LEAST
    assert head_shares({1: np.zeros(4)}) == head_shares({}) == {}


def test_budgets_are_in_proportion_and_layers_without_shares_have_even_ones():
    budgets = head_budgets(0.02, {1: (0.5, 1.5), 3: (2.0, 1.0)}, [1, 2, 3])
    assert list(budgets) == [1, 2, 3]
    assert all(of_layer.dtype == np.float32 for of_layer in budgets.values())
    together = np.array(list(budgets.values()))
    assert together.mean() == pytest.approx(0.02)
    assert together / together[1, 0] == pytest.approx(np.array([[0.5, 1.5], [1, 1], [2, 1]]))
    alone = head_budgets(0.02, {1: (0.5, 1.5), 3: (2.0, 1.0)}, [3])  # the others are dense
    assert alone[3].tolist() == pytest.approx([0.08 / 3, 0.04 / 3])
    assert head_budgets(0.02, {}, [1, 2]) == head_budgets(0.02, {1: (1.0,)}, []) == {}


@given(st.lists(st.lists(st.floats(0.1, 50), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(1e-3, 1))
def test_the_mean_is_the_budget_and_no_head_reads_more_than_there_is(shares, budget):
    found = head_budgets(budget, dict(enumerate(map(tuple, shares))), range(len(shares)))
    budgets = np.array(list(found.values()), dtype=np.float64)
    assert 0 < budgets.min() <= budgets.max() <= 1
    assert budgets.mean() == pytest.approx(budget, rel=1e-5)
