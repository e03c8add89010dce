"""Which budget is tried next, and which of those that were measured is the best."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli.tuning.budgets import BudgetSearch, fits, signatures_alone
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.search import Goal
from magicpig_cli.tuning.signatures import BUDGETS, SignatureQuality
from magicpig_cli.tuning.verify import LayerQuality
from tests.conftest import STEADY_SPEEDS
from tests.tuning.conftest import CONTEXT

LAYERS = {
    layer: {b: SignatureQuality(1e4 * b, 1e4, (0.001 / b) ** 2, 1) for b in BUDGETS} for layer in (1, 2)
}  # error 0.001 / budget


def make_search(engine, goal: Goal) -> BudgetSearch:
    cost = CostModel(STEADY_SPEEDS, 2, 2, 64, 256, 1000, 1.0, 0.1)
    return BudgetSearch(engine.plan, CONTEXT, goal, LAYERS, {}, cost)


def measured(error: float) -> dict[int, LayerQuality]:
    sums = np.full((1, 4), 10.0)
    return {layer: LayerQuality(np.full((1, 4), error**2), sums, 50 * sums) for layer in LAYERS}


@pytest.mark.parametrize(("target", "wanted"), [(0.05, 0.02), (0.03, 0.034), (0.001, BUDGETS[-1]), (0.9, BUDGETS[0])])
def test_the_smallest_budget_that_is_expected_to_meet_the_target_is_tried(engine, target, wanted):
    found = make_search(engine, Goal(error=target, ratio=None)).best()
    assert found.budget == pytest.approx(wanted)
    assert found.error == pytest.approx(0.001 / found.budget, rel=1e-6)
    assert found.ratio == pytest.approx(found.budget)


def test_what_was_measured_moves_the_next_try(engine):
    search = make_search(engine, Goal(error=0.05, ratio=None))
    search.measured[0.02] = measured(0.1)  # twice what was predicted
    assert search.factor == pytest.approx(2)
    assert search.best().budget == pytest.approx(0.04)
    search.room = 1.5
    assert search.best().budget == pytest.approx(0.06)


def test_a_budget_that_misses_its_target_by_little_is_not_the_last_that_is_tried(engine):
    search = make_search(engine, Goal(error=0.05, ratio=None))
    assert search.untried() == search.best()
    search.measured[0.02] = measured(0.0498)
    assert search.untried() is None  # 0.02 again
    search.room = 1.03
    assert search.untried() == search.candidate(0.021)  # near, but 0.02 does not meet the target with that room
    search.measured[0.021] = measured(0.048)
    assert search.untried() is None
    assert search.known()[0].budget == 0.021


def test_the_best_of_those_measured(engine):
    search = make_search(engine, Goal(error=0.05, ratio=None))
    search.measured |= {0.02: measured(0.06), 0.04: measured(0.03), 0.03: measured(0.04)}
    assert [c.budget for c in search.known()] == [0.03, 0.04, 0.02]
    search.goal = Goal(error=0.01, ratio=None)
    assert search.known()[0].budget == 0.04


def test_a_ratio_is_the_budget_rounded_down(engine):
    search = make_search(engine, Goal(error=None, ratio=0.0239))
    assert search.best().budget == pytest.approx(0.023)
    assert search.meets(search.best())


def test_a_limit_of_memory_that_signatures_exceed(engine):
    need = signatures_alone(engine.plan).index_bytes(CONTEXT)
    assert fits(engine.plan, CONTEXT, Goal(error=0.1, ratio=None, memory_bytes=need))
    assert not fits(engine.plan, CONTEXT, Goal(error=0.1, ratio=None, memory_bytes=need - 1))
