"""Candidates of both samplers, measured: by a real index of every layer, and by steps taking turns with exact ones."""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np

from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.recording import ExactStep
from magicpig_cli.events import Working
from magicpig_cli.tuning.budgets import BudgetCandidate, BudgetSearch, fits
from magicpig_cli.tuning.capture import Capture
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.search import SAME_TIME, Candidate, Goal, Search
from magicpig_cli.tuning.steps import time_steps
from magicpig_cli.tuning.verify import LayerQuality, Quality, Replay

VERIFIED = 3  # pairs that are reported with measured figures
_ROUNDS = 3  # of choosing again after what was measured
_ROOM = 3.0  # standard errors that the tuning text must stay below the target by, for other text to meet it


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth telling while it goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate with a real index."""

    quality: Quality
    ms: float
    exact: ExactStep  # of the same model, taking turns with these steps

    @property
    def relative_ms(self) -> float:
        """Of a step, in exact ones: what else the machine did meanwhile was done to both."""
        return self.ms / self.exact.wall_ms


AnyCandidate = Candidate | BudgetCandidate
Key = tuple[str, tuple[int, ...]]  # what is sampled with, and dense layers
Work = Generator["Working | Notice", None, None]


def key_of(candidate: AnyCandidate) -> Key:
    """What was measured of which."""
    return candidate.words, candidate.dense_layers


def replayed(
    replay: Replay, engine: Engine, candidate: AnyCandidate, layers: SequenceOf[int], into: dict[int, LayerQuality],
    what: str,
) -> Work:  # fmt: skip
    """A real index for these layers."""
    for done, (layer, quality) in enumerate(replay.run(layers, candidate.sampling(engine.plan)), start=1):
        into[layer] = quality
        yield Working(f"{what} ({candidate.words})", done, len(layers))


@dataclass
class Trial:
    """Chooses by prediction, measures what it has chosen, and chooses again with what it has learnt."""

    engine: Engine
    capture: Capture
    search: Search
    budgets: BudgetSearch
    measured: dict[Key, Measured] = field(default_factory=dict)

    def choose_tables(self) -> Generator[Working | Notice, None, list[Candidate]]:
        """The best pairs, measured, the best of them first; none where no tables have room.

        One is measured in all layers first: it tells how far each layer is off its prediction. After at most _ROUNDS
        of measuring the best three, the last three stand, whatever was learnt from them.
        """
        search = self.search
        if not search.sizes:
            return []
        (first,) = search.best(search.candidates(), 1)
        yield from self._measure(first, tuple(search.angles))
        self._learn(first)
        for _ in range(_ROUNDS):
            best = search.best(search.candidates(), VERIFIED)
            missing = [candidate for candidate in best if key_of(candidate) not in self.measured]
            if not missing:
                break
            for candidate in missing:
                yield from self._measure(candidate, candidate.sampled_layers)
        known = [replace(c, expected_error=self.measured[key_of(c)].quality.error) for c in best]
        return search.ranked(known)

    def choose_budget(self) -> Generator[Working | Notice, None, list[BudgetCandidate]]:
        """The budgets that were measured, the best of them first; none where signatures have no room.

        After `choose_tables`, from which it knows what a sampled layer takes beside its work; else its own first
        measurement tells.
        """
        search = self.budgets
        if not fits(search.plan, search.context, search.goal):
            return []
        search.cost = self.search.cost
        for _ in range(_ROUNDS):
            candidate = search.untried()
            if candidate is None:
                break
            yield from self._measure(candidate, candidate.sampled_layers)
            measured = self.measured[key_of(candidate)]
            if not self.search.sizes:
                search.cost = self._cost_by_signatures(candidate, measured)
            search.room = _room(search.goal, measured.quality)
        return search.known()

    def _measure(self, candidate: AnyCandidate, layers: SequenceOf[int]) -> Work:
        """A real index for layers that have not had this one yet, and real steps."""
        done = self.layers_of(candidate)
        device, seed = self.engine.runner.model.device, self.engine.settings.attention.hash_seed
        replay = Replay(self.capture, self.engine.plan, device, seed)
        what = "real tables" if isinstance(candidate, Candidate) else "real signatures"
        yield from replayed(replay, self.engine, candidate, [n for n in layers if n not in done], done, what)
        yield Working(f"timing steps ({candidate.words})", 0, 0)
        timed = time_steps(self.engine, self.capture, candidate.sampling(self.engine.plan), seed)
        quality = Quality.of(done[layer] for layer in candidate.sampled_layers)
        self.measured[key_of(candidate)] = Measured(quality, timed.sampled_ms, timed.exact)

    def layers_of(self, candidate: AnyCandidate) -> dict[int, LayerQuality]:
        """What was measured of each layer so far, also of layers that became dense."""
        if isinstance(candidate, Candidate):
            return self.search.measured.setdefault(candidate.size, {})
        return self.budgets.measured.setdefault(candidate.budget, {})

    def _learn(self, first: Candidate) -> None:
        """What a sampled layer takes beside the work that is counted, and how far text may differ from text."""
        search, measured = self.search, self.measured[key_of(first)]
        angles = {layer: search.angles[layer][-1] for layer in first.sampled_layers}
        dense = self.engine.shape.layers - len(angles)
        cost = CostModel.of(self.engine.plan, search.cost.speeds, search.cost.offloaded, measured.exact)
        search.correct_cost(cost.with_overhead(measured.ms, first.K, first.L, angles, dense))
        search.room = _room(search.goal, measured.quality)

    def _cost_by_signatures(self, candidate: BudgetCandidate, measured: Measured) -> CostModel:
        """What a sampled layer takes beside the work that is counted, where no tables were measured."""
        cost, sampled = self.budgets.cost, len(candidate.sampled_layers)
        cost = CostModel.of(self.engine.plan, cost.speeds, cost.offloaded, measured.exact)
        dense = self.engine.shape.layers - sampled
        return cost.with_signature_overhead(measured.ms, candidate.bits, candidate.ratio, sampled, dense)

    def preferred(self, verified: SequenceOf[Candidate], budgets: SequenceOf[BudgetCandidate]) -> AnyCandidate:
        """The better of the best of each sampler, by what was measured of both. One of them may have no room.

        The faster one of two that meet a target error, the smaller index if they are as fast; the more accurate one of
        two that meet a target ratio; else the one that meets the target, or is closer to it.
        """
        if not verified:
            return budgets[0]
        if not budgets:
            return verified[0]
        goal, tables, budget = self.search.goal, verified[0], budgets[0]
        both: tuple[AnyCandidate, AnyCandidate] = (budget, tables)
        met = self.search.meets(tables), self.budgets.meets(budget)
        if met[0] != met[1]:
            return tables if met[0] else budget
        if goal.error is not None and all(met):
            ratio = self.measured[key_of(budget)].relative_ms / self.measured[key_of(tables)].relative_ms
            if abs(ratio - 1) > SAME_TIME:
                return budget if ratio < 1 else tables
            return min(both, key=lambda candidate: candidate.index_bytes)
        if all(met):
            return min(both, key=lambda candidate: candidate.expected_error)
        return min(both, key=lambda candidate: goal.value(candidate.expected_error, candidate.ratio))

    def meets(self, candidate: AnyCandidate) -> bool:
        """Whether it is expected to, with room for other text."""
        return self.search.meets(candidate) if isinstance(candidate, Candidate) else self.budgets.meets(candidate)

    def calibration(self, verified: SequenceOf[AnyCandidate]) -> float:
        """Measured / predicted error, the geometric mean; 1 where everything is sampled and both are 0."""
        pairs = [(self.measured[key_of(c)].quality.error, c.error) for c in verified]
        logs = [np.log(measured / predicted) for measured, predicted in pairs if measured > 0 and predicted > 0]
        return float(np.exp(np.mean(logs))) if logs else 1.0


def _room(goal: Goal, quality: Quality) -> float:
    return 1 + _ROOM * goal.value(quality.error_deviation, quality.ratio_deviation)
