"""Which candidates are worth having, which layers become dense, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.engine.recording import ExactStep
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.tuning.angles import TableCurve, measure_angles, total
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.grid import parse_grid
from magicpig_cli.tuning.search import Candidate, Goal, Search, fitting, pareto
from magicpig_cli.tuning.steps import sampling_plan
from magicpig_cli.tuning.verify import LayerQuality
from tests.conftest import STEADY_SPEEDS
from tests.tuning.conftest import CONTEXT

GRID = parse_grid("K=4..8:2,L=20..60:20")


def candidate(error: float, ms: float, index_bytes: int, K: int = 8, L: int = 50, ratio: float = 0.1) -> Candidate:
    return Candidate(K, L, (0,), (1, 2), ratio, error, ms, index_bytes, error)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_pareto_keeps_exactly_what_nothing_beats(figures):
    candidates = [candidate(*of) for of in figures]

    def beaten(mine: tuple[int, ...]) -> bool:
        return any(o != mine and all(a <= b for a, b in zip(o, mine, strict=True)) for o in figures)

    wanted = [of for of in figures if not beaten(of)]
    found = [(c.expected_error, c.ms, c.index_bytes) for c in pareto(candidates)]
    assert sorted(found) == sorted(wanted)


@pytest.fixture(scope="module")
def angles(captured):
    return {layer: measure_angles(captured, captured.layer(layer)) for layer in (1, 2)}


@pytest.fixture
def make_search(engine, captured, angles):
    """`make_search(error=… or ratio=…)`: predictions for GRID."""

    def make(error=None, ratio=None, memory=None, plan=engine.plan, exact_ms=6.0, layers=angles) -> Search:
        cost = CostModel.of(plan, STEADY_SPEEDS, captured.offloaded[-1], ExactStep(10.0, exact_ms))
        search = Search(plan, CONTEXT, Goal(error, ratio, memory), layers, cost)
        search.predict(fitting(plan, CONTEXT, search.goal, GRID))
        return search

    return make


def test_candidates_are_the_formulas_of_each_pair(make_search, engine, angles):
    search = make_search(ratio=0.5)
    assert [c.size for c in search.candidates()] == GRID.sizes
    for c in search.candidates():
        curve = TableCurve.of(c.K, c.L)
        per_layer = [total(depths) for depths in angles.values()]
        assert c.ratio == pytest.approx(curve.ratio(total(per_layer)))
        assert c.error == pytest.approx(np.mean([curve.error(layer) for layer in per_layer]))
        assert c.index_bytes == sampling_plan(engine.plan, c.K, c.L, (0,)).index_bytes(CONTEXT)
        assert (c.dense_layers, c.sampled_layers) == ((0,), (1, 2))


def test_times_are_what_was_measured_plus_the_work(make_search, captured, angles):
    """A pair that took 3 ms more than its work explains makes every pair 3 ms slower."""
    search = make_search(ratio=0.5)
    before = {c.size: c for c in search.candidates()}
    first = before[6, 40]
    last = {layer: depths[-1] for layer, depths in angles.items()}
    search.correct_cost(search.cost.with_overhead(first.ms + 3.0, 6, 40, last, dense=1))
    for c in search.candidates():
        assert c.ms == pytest.approx(before[c.size].ms + 3.0)
        assert c.ms > 10.0 - 6.0 + 6.0 / 3  # the model without attention, and layer 0


def test_more_tables_cost_more_and_err_less(make_search):
    by_size = {c.size: c for c in make_search(ratio=0.5).candidates()}
    for K in GRID.K:
        line = [by_size[K, L] for L in GRID.L]
        for fewer, more in pairwise(line):
            assert more.error < fewer.error
            assert more.ratio > fewer.ratio
            assert more.ms > fewer.ms
            assert more.index_bytes > fewer.index_bytes


def test_the_fastest_that_meets_a_target_error_is_best(make_search):
    search = make_search(error=0.3)
    fast, faster, accurate = candidate(0.2, 5, 9), candidate(0.31, 3, 9), candidate(0.1, 7, 9)
    assert search.ranked([accurate, faster, fast]) == [fast, accurate, faster]
    search.room = 1.6  # 0.2 · 1.6 is too much
    assert search.ranked([fast, faster, accurate]) == [accurate, fast, faster]


def test_of_those_as_fast_as_the_fastest_the_smallest_is_best(make_search):
    search = make_search(error=0.3)
    fastest, smaller = candidate(0.2, 100, 900), candidate(0.25, 101.9, 300)
    smallest, missing = candidate(0.2, 102.1, 200), candidate(0.4, 101, 100)
    assert search.ranked([smallest, missing, fastest, smaller]) == [smaller, fastest, smallest, missing]


def test_the_most_accurate_that_meets_a_target_ratio_is_best(make_search):
    search = make_search(ratio=0.05)
    many, few, fewer = (candidate(e, 5, 9, ratio=r) for e, r in ((0.1, 0.06), (0.2, 0.04), (0.3, 0.01)))
    assert search.ranked([fewer, many, few]) == [few, fewer, many]


def test_the_best_are_of_different_K_as_far_as_there_are(make_search):
    search = make_search(error=0.3)
    pairs = [candidate(0.1 + n / 100, 5 + n, 9 - n, K=K, L=n) for n, K in enumerate((8, 8, 9, 8, 10))]
    assert [c.K for c in search.best(pairs, 3)] == [8, 9, 10]
    assert [c.L for c in search.best(pairs[:2], 3)] == [0, 1]


def quality(error: float) -> LayerQuality:
    return LayerQuality(np.full((2, 3), error**2), np.full((2, 3), 5.0), np.full((2, 3), 50.0))


def test_what_was_measured_corrects_layer_by_layer(make_search):
    search = make_search(error=0.0001)
    search._predicted = {
        size: replace(p, error=np.array([0.2, 0.1])) for size, p in search._predicted.items()
    }  # fmt: skip
    search.measured[6, 40] = {1: quality(0.4), 2: quality(0.1)}
    search.measured[8, 60] = {1: quality(0.4 * 2.25)}
    assert search.factors() == pytest.approx([3.0, 1.0])  # 2 and 4.5 of layer 1: their geometric mean
    by_size = {c.size: c.expected_error for c in search.candidates()}
    assert by_size[4, 20] == pytest.approx((0.6 + 0.1) / 2)
    assert by_size[6, 40] == pytest.approx((0.4 + 0.1) / 2)  # as measured
    assert by_size[8, 60] == pytest.approx((0.9 + 0.1) / 2)


@pytest.mark.parametrize(
    ("target", "errors", "costs_ms", "dense"),
    [
        (0.5, [0.1] * 8, [1.0] * 8, []),
        (0.15, [0.1] * 7 + [0.8], [1.0] * 8, [7]),
        (0.15, [0.1] * 6 + [0.6, 0.7], [1.0] * 8, [6, 7]),
        (0.15, [0.1] * 6 + [0.4, 0.5], [1.0] * 6 + [1.0, 4.0], [6, 7]),
        (0.2, [0.1] * 6 + [0.6, 0.7], [1.0] * 6 + [1.0, 4.0], [6]),  # less error, but 4 times as dear to lose
        (0.1, [0.5] * 8, [1.0] * 8, [0, 1]),  # out of reach: a quarter of the layers, not all
    ],
)
def test_layers_become_dense_by_error_per_millisecond(make_search, target, errors, costs_ms, dense):
    search = make_search(error=target)
    search._layers = list(range(8))
    ms = search.cost.exact_layer_ms - np.array(costs_ms)
    assert sorted(search._more_dense(np.array(errors), ms)) == dense


def test_a_dense_layer_is_left_out_of_everything(make_search, angles):
    """Eight layers, one of them hopeless: it is attended exactly, and the error is that of the others."""
    layers = {number: angles[1 + number % 2] for number in range(1, 9)}
    free = make_search(error=1.0, layers=layers)
    size = (6, 40)
    free.measured[size] = {n: quality(0.1) for n in layers} | {3: quality(0.9)}
    tight = make_search(error=0.15, layers=layers)
    tight.measured = free.measured
    (before,) = (c for c in free.candidates() if c.size == size)
    (after,) = (c for c in tight.candidates() if c.size == size)
    assert (before.dense_layers, after.dense_layers) == ((0,), (0, 3))
    assert 3 not in after.sampled_layers
    assert before.expected_error == pytest.approx((7 * 0.1 + 0.9) / 8)
    assert after.expected_error == pytest.approx(0.1)


def test_memory_leaves_pairs_out(make_search, engine):
    sizes = {size: sampling_plan(engine.plan, *size, (0,)).index_bytes(CONTEXT) for size in GRID.sizes}
    limit = sorted(sizes.values())[4]
    search = make_search(error=0.3, memory=limit)
    assert {c.size for c in search.candidates()} == {size for size, need in sizes.items() if need <= limit}
    with pytest.raises(MemoryBudgetError, match=r"K=4 L=20 needs .* --memory allows") as caught:
        make_search(error=0.3, memory=min(sizes.values()) - 1)
    assert "--memory" in caught.value.hint
    scarce = replace(engine.plan, budget_bytes=engine.plan.kv_bytes(CONTEXT))
    with pytest.raises(MemoryBudgetError, match="are free for rows and tables"):
        make_search(error=0.3, plan=scarce)
