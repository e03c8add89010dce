"""The search for the budget of the signature sampler: the smallest that meets a target error, or the one asked for.

What is predicted at a few budgets (`signatures.py`) is a curve; measured / predicted error moves it. Layers are dense
where the plan says so and no others: a larger budget is the cheaper way to a smaller error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from magicpig_cli.attention.estimator import Floats
from magicpig_cli.attention.shares import Shares
from magicpig_cli.planner import Plan
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.search import Goal
from magicpig_cli.tuning.signatures import BUDGETS, SignatureQuality, error_and_ratio
from magicpig_cli.tuning.steps import signing_plan
from magicpig_cli.tuning.verify import LayerQuality, Quality

_DIGITS = 2  # of a budget that is chosen
_SAME_BUDGET = 0.05  # relative; the error that is measured differs by more from draw to draw


@dataclass(frozen=True, slots=True)
class BudgetCandidate:
    """One budget, in all layers that are not dense."""

    budget: float
    bits: int
    tail: float
    dense_layers: tuple[int, ...]
    sampled_layers: tuple[int, ...]
    ratio: float  # predicted
    error: float  # predicted, before any calibration
    ms: float  # predicted, of a step at the full context
    index_bytes: int
    expected_error: float  # measured where it was, else predicted and corrected by what was measured of other budgets
    head_shares: Shares = field(hash=False)  # of the budget

    @property
    def words(self) -> str:
        return f"budget {100 * self.budget:.3g}%"

    def sampling(self, plan: Plan) -> Plan:
        """The plan that samples like this."""
        return signing_plan(plan, self.budget, self.head_shares)


def signatures_alone(plan: Plan) -> Plan:
    """A plan of signatures, for what these take: that depends neither on the budget nor on how heads share it."""
    return signing_plan(plan, BUDGETS[0])


def fits(plan: Plan, context: int, goal: Goal) -> bool:
    """Whether rows and signatures of one sequence of the context have room."""
    signing, limit = signatures_alone(plan), goal.memory_bytes
    small = limit is None or signing.index_bytes(context) <= limit
    return small and signing.sequence_bytes(context) <= signing.budget_bytes


Layers = Mapping[int, Mapping[float, SignatureQuality]]  # that may be sampled → by budget


@dataclass
class BudgetSearch:
    """Predictions for any budget, corrected by what has been measured so far."""

    plan: Plan  # the engine's: exact
    context: int
    goal: Goal
    layers: Layers
    shares: Shares  # with which the layers were predicted
    cost: CostModel
    measured: dict[float, dict[int, LayerQuality]] = field(default_factory=dict)
    room: float = 1.0  # the target has to be met by this factor

    def candidate(self, budget: float) -> BudgetCandidate:
        """Error and ratio lie on straight lines between those of BUDGETS, on logarithmic scales."""
        error, ratio = self._predicted(budget)
        plan, sampled = signing_plan(self.plan, budget, self.shares), tuple(self.layers)
        exact_ms = self.cost.base_ms + (plan.shape.layers - len(sampled)) * self.cost.exact_layer_ms
        measured = self.measured.get(budget)
        return BudgetCandidate(
            budget, plan.bits, plan.tail_share, plan.dense_layers, sampled, ratio, error,
            ms=exact_ms + len(sampled) * self.cost.signature_layer_ms(plan.bits, ratio),
            index_bytes=plan.index_bytes(self.context),
            expected_error=error * self.factor if measured is None else Quality.of(measured.values()).error,
            head_shares=self.shares,
        )  # fmt: skip

    @property
    def factor(self) -> float:
        """Measured / predicted error, geometric mean over what was measured: hardly a matter of the budget."""
        logs = []
        for budget, layers in self.measured.items():
            measured = Quality.of(layers.values()).error
            predicted, _ = self._predicted(budget)
            if measured > 0 and predicted > 0:
                logs.append(math.log(measured / predicted))
        return math.exp(sum(logs) / len(logs)) if logs else 1.0

    def known(self) -> list[BudgetCandidate]:
        """All that were measured, best first."""
        return sorted((self.candidate(budget) for budget in self.measured), key=self._rank)

    def best(self) -> BudgetCandidate:
        """The budget that is expected to be the best; the largest where none is expected to meet the target."""
        if self.goal.ratio is not None:
            return self.candidate(_clipped(_rounded(self.goal.ratio / self.room, down=True)))
        wanted = math.log(self.goal.target / (self.factor * self.room))
        errors = _logs(self._curves[0])  # which fall while budgets grow
        budget = math.exp(np.interp(wanted, errors[::-1], _logs(BUDGETS)[::-1]))
        return self.candidate(_clipped(_rounded(budget)))

    def untried(self) -> BudgetCandidate | None:
        """The same if it is worth measuring: not where it was, nor where one so near that meets the target was."""
        best = self.best()
        for known in self.known():
            near = abs(known.budget / best.budget - 1) < _SAME_BUDGET
            if known.budget == best.budget or (near and self.meets(known)):
                return None
        return best

    def _predicted(self, budget: float) -> tuple[float, float]:
        """Error and ratio."""
        error, ratio = (np.interp(math.log(budget), _logs(BUDGETS), _logs(curve)) for curve in self._curves)
        return math.exp(error), math.exp(ratio)

    @cached_property
    def _curves(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Error and ratio at each of BUDGETS."""
        errors, ratios = zip(*(error_and_ratio(self.layers.values(), known) for known in BUDGETS), strict=True)
        return errors, ratios

    def meets(self, candidate: BudgetCandidate) -> bool:
        """Whether it is expected to, with room for other text."""
        return self.goal.value(candidate.expected_error, candidate.ratio) * self.room <= self.goal.target

    def _rank(self, candidate: BudgetCandidate) -> tuple[bool, float]:
        met = self.meets(candidate)
        if self.goal.ratio is not None or not met:
            return not met, candidate.expected_error
        return False, candidate.budget


def _logs(values: Iterable[float]) -> Floats:
    """Logarithms, of 0 as of something tiny."""
    return np.log(np.maximum(list(values), 1e-30))


def _rounded(budget: float, *, down: bool = False) -> float:
    """To two digits, up or down."""
    unit = 10.0 ** (math.floor(math.log10(budget)) - _DIGITS + 1)
    steps = budget / unit
    return round((math.floor(steps + 1e-3) if down else math.ceil(steps - 1e-3)) * unit, 10)


def _clipped(budget: float) -> float:
    return min(max(budget, BUDGETS[0]), BUDGETS[-1])
