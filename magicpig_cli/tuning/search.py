"""The search for (K, L) and dense layers: what each pair would be like, which are worth having, and which is best.

Dense layers come with each pair. Beyond those that are dense anyway, layers become dense only while the pair misses
the target error: always the one with the most error above the target per millisecond that exact attention of it costs
more. At most MAX_DENSE_SHARE of the layers go that way; a pair that needs more misses the target, for a model that is
mostly exact is not what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from magicpig_cli.attention.estimator import Floats
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.planner import Plan
from magicpig_cli.tuning.angles import Angles, TableCurve, total
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.grid import Grid
from magicpig_cli.tuning.steps import sampling_plan
from magicpig_cli.tuning.verify import LayerQuality, Quality
from magicpig_cli.units import format_bytes

MAX_DENSE_SHARE = 0.25  # of the layers that could be sampled
SAME_TIME = 0.02  # relative; less is no more than steps differ from run to run, and tables may be half as large
LEAST_MS = 1e-3  # what an exact layer is taken to cost more at least: on short contexts it may cost less
Size = tuple[int, int]  # K, L


@dataclass(frozen=True, slots=True)
class Goal:
    """What to reach: an error or a ratio, and how much memory tables may take."""

    error: float | None
    ratio: float | None
    memory_bytes: int | None = None  # of the index of one sequence of the context; None = what is free

    def value(self, error: float, ratio: float) -> float:
        """The figure that the target is about."""
        return error if self.error is not None else ratio

    @property
    def target(self) -> float:
        value = self.error if self.error is not None else self.ratio
        assert value is not None
        return value


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pair with its dense layers."""

    K: int
    L: int
    dense_layers: tuple[int, ...]
    sampled_layers: tuple[int, ...]
    ratio: float  # predicted
    error: float  # predicted, before any calibration
    ms: float  # predicted, of a step at the full context
    index_bytes: int
    expected_error: float  # measured where the layer was, else predicted and corrected by what was measured of it

    @property
    def size(self) -> Size:
        return self.K, self.L

    @property
    def words(self) -> str:
        return f"K={self.K} L={self.L}"

    def sampling(self, plan: Plan) -> Plan:
        """The plan that samples like this."""
        return sampling_plan(plan, self.K, self.L, self.dense_layers)


@dataclass(frozen=True, slots=True)
class _Predictions:
    """Of one pair, by layer: float64 [layers]."""

    index_bytes: int  # without further dense layers
    error: Floats
    sampled: Floats  # Σ u
    ms: Floats


def fitting(plan: Plan, context: int, goal: Goal, grid: Grid) -> dict[Size, int]:
    """Bytes of the index of one sequence for each pair whose index fits; raises MemoryBudgetError if none does.

    The plan's dense layers are the only ones: none that the search adds.
    """
    needs: dict[Size, int] = {}
    fit: dict[Size, int] = {}
    limit = goal.memory_bytes
    for size in grid.sizes:
        sampling = sampling_plan(plan, *size, plan.dense_layers)
        needs[size] = sampling.index_bytes(context)
        if (limit is None or needs[size] <= limit) and sampling.sequence_bytes(context) <= plan.budget_bytes:
            fit[size] = needs[size]
    if not fit:
        (K, L), least = min(needs.items(), key=lambda item: item[1])
        raise MemoryBudgetError(
            f"no pair of the grid fits: K={K} L={L} needs {format_bytes(least)} of tables for {context:,} tokens, "
            + (f"--memory allows {format_bytes(limit)}" if limit is not None and limit < least else
               f"and {format_bytes(plan.budget_bytes)} are free for rows and tables"),
            hint="a smaller L in --grid, a shorter -c" + ("" if limit is None else ", or a larger --memory"),
        )  # fmt: skip
    return fit


@dataclass
class Search:
    """Predictions for a grid, corrected by what has been measured so far."""

    plan: Plan  # the engine's: exact
    context: int
    goal: Goal
    angles: Mapping[int, list[Angles]]  # layer that may be sampled → by depth
    cost: CostModel
    sizes: list[Size] = field(default_factory=list)
    measured: dict[Size, dict[int, LayerQuality]] = field(default_factory=dict)
    room: float = 1.0  # the target has to be met by this factor
    _predicted: dict[Size, _Predictions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._layers = list(self.angles)
        self._keys = np.array([total(depths).keys.sum() for depths in self.angles.values()])

    def predict(self, index_bytes: Mapping[Size, int]) -> None:
        """Take in these pairs, those of `fitting`."""
        for (K, L), needed in index_bytes.items():
            self._predicted[K, L] = self._predict(K, L, needed)
        self.sizes = list(self._predicted)

    def _predict(self, K: int, L: int, index_bytes: int) -> _Predictions:
        curve = TableCurve.of(K, L)
        all_depths = [total(depths) for depths in self.angles.values()]
        return _Predictions(
            index_bytes,
            np.array([curve.error(angles) for angles in all_depths]),
            np.array([angles.keys @ curve.u for angles in all_depths]),
            np.array([self.cost.layer_ms(K, L, curve, depths[-1]) for depths in self.angles.values()]),
        )

    def correct_cost(self, cost: CostModel) -> None:
        """Predict times anew."""
        self.cost = cost
        for (K, L), before in self._predicted.items():
            curve = TableCurve.of(K, L)
            ms = np.array([cost.layer_ms(K, L, curve, depths[-1]) for depths in self.angles.values()])
            self._predicted[K, L] = _Predictions(before.index_bytes, before.error, before.sampled, ms)

    def factors(self) -> Floats:
        """Measured / predicted error of each layer, geometric mean over the pairs that were measured; else the mean.

        They differ by layer more than by pair: keys that lie close together, which the prediction takes as independent,
        are a matter of the layer (1.05 to 3.3 on the demo model, within 10% from (8, 75) to (11, 300)).
        """
        logs: dict[int, list[float]] = {}
        for size, qualities in self.measured.items():
            for layer, quality in qualities.items():
                predicted = self._predicted[size].error[self._layers.index(layer)]
                if quality.error > 0 and predicted > 0:
                    logs.setdefault(layer, []).append(float(np.log(quality.error / predicted)))
        known = [value for values in logs.values() for value in values]
        rest = float(np.mean(known)) if known else 0.0
        return np.exp([np.mean(logs.get(layer, [rest])) for layer in self._layers])

    def candidates(self) -> list[Candidate]:
        """One for each pair, with the dense layers that it needs."""
        factors = self.factors()
        return [self._candidate(size, factors) for size in self.sizes]

    def _candidate(self, size: Size, factors: Floats) -> Candidate:
        predicted = self._predicted[size]
        expected = predicted.error * factors
        for layer, quality in self.measured.get(size, {}).items():
            expected[self._layers.index(layer)] = quality.error
        chosen = self._more_dense(expected, predicted.ms)
        kept = [i for i in range(len(self._layers)) if i not in chosen]
        dense = tuple(sorted((*self.plan.dense_layers, *(self._layers[i] for i in chosen))))
        exact = self.plan.shape.layers - len(kept)
        index_bytes = sampling_plan(self.plan, *size, dense).index_bytes(self.context)
        return Candidate(
            *size, dense, tuple(self._layers[i] for i in kept),
            ratio=float(predicted.sampled[kept].sum() / self._keys[kept].sum()),
            error=float(predicted.error[kept].mean()),
            ms=self.cost.base_ms + exact * self.cost.exact_layer_ms + float(predicted.ms[kept].sum()),
            index_bytes=index_bytes,
            expected_error=float(expected[kept].mean()),
        )  # fmt: skip

    def _more_dense(self, expected: Floats, ms: Floats) -> set[int]:
        """Positions of the layers that become dense; as many as may be where the target is out of reach."""
        if self.goal.error is None:
            return set()
        target = self.goal.error / self.room
        costs = np.maximum(self.cost.exact_layer_ms - ms, LEAST_MS)
        left = list(range(len(self._layers)))
        for _ in range(int(MAX_DENSE_SHARE * len(left))):
            if float(expected[left].mean()) <= target:
                break
            left.remove(max(left, key=lambda i: float((expected[i] - target) / costs[i])))
        return set(range(len(self._layers))) - set(left)

    def meets(self, candidate: Candidate) -> bool:
        """Whether it is expected to, with room for other text."""
        return self.goal.value(candidate.expected_error, candidate.ratio) * self.room <= self.goal.target

    def ranked(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Best first: the fastest that meets a target error, the most accurate that meets a target ratio; else the
        closest to the target. Of those that are as fast as the fastest, up to SAME_TIME, the smallest comes first."""
        ordered = sorted(candidates, key=self._rank)
        if self.goal.error is None or not ordered or not self.meets(ordered[0]):
            return ordered
        limit = ordered[0].ms * (1 + SAME_TIME)
        as_fast = [candidate for candidate in ordered if self.meets(candidate) and candidate.ms <= limit]
        slower = [candidate for candidate in ordered if candidate not in as_fast]
        return sorted(as_fast, key=lambda candidate: (candidate.index_bytes, candidate.ms)) + slower

    def _rank(self, candidate: Candidate) -> tuple[float, ...]:
        met = self.meets(candidate)
        value = self.goal.value(candidate.expected_error, candidate.ratio)
        if self.goal.error is not None:
            return (not met, candidate.ms if met else value, candidate.index_bytes)
        return (not met, candidate.expected_error if met else value, candidate.ms)

    def best(self, candidates: Iterable[Candidate], count: int) -> list[Candidate]:
        """The best of the Pareto front, of different K as far as there are: neighbours in L tell little more."""
        ranked = self.ranked(candidates)
        front = {candidate.size for candidate in pareto(ranked)}
        ranked.sort(key=lambda candidate: candidate.size not in front)
        firsts: dict[int, Candidate] = {}
        for candidate in ranked:
            firsts.setdefault(candidate.K, candidate)
        chosen = self.ranked(firsts.values())[:count]
        others = [candidate for candidate in ranked if candidate not in chosen]
        return self.ranked(chosen + others[: count - len(chosen)])

    def quality(self, candidate: Candidate) -> Quality | None:
        """As measured; None unless all of its sampled layers were."""
        layers = self.measured.get(candidate.size, {})
        if not set(candidate.sampled_layers) <= layers.keys():
            return None
        return Quality.of(layers[layer] for layer in candidate.sampled_layers)


def pareto(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Those that no other beats in error, time and memory at once (as good in all and better in one)."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=_figures):  # whoever beats it comes before it
        if not any(_beats(other, candidate) for other in front):
            front.append(candidate)
    return front


def _figures(candidate: Candidate) -> tuple[float, float, float]:
    return candidate.expected_error, candidate.ms, candidate.index_bytes


def _beats(one: Candidate, other: Candidate) -> bool:
    mine, theirs = _figures(one), _figures(other)
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))
