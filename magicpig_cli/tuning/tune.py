"""The whole of tuning, from text to a choice that was held to other text. Yields progress, returns a `Tuned`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import numpy as np

from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.recording import ExactStep
from magicpig_cli.errors import UsageError
from magicpig_cli.events import Working
from magicpig_cli.hardware import Speeds
from magicpig_cli.planner import Plan
from magicpig_cli.tuning import kept
from magicpig_cli.tuning.angles import Angles, measure_angles
from magicpig_cli.tuning.capture import STEPS, Capture, baseline, capture
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.grid import Grid
from magicpig_cli.tuning.search import Candidate, Goal, Search, fitting, pareto
from magicpig_cli.tuning.signatures import (
    BUDGETS,
    SignatureCandidate,
    SignatureQuality,
    error_and_ratio,
    measure_signatures,
)
from magicpig_cli.tuning.steps import TIMED_STEPS, sampling_plan, time_steps
from magicpig_cli.tuning.text import Texts
from magicpig_cli.tuning.verify import LayerQuality, Quality, Replay
from magicpig_cli.units import format_bytes

VERIFIED = 3  # candidates that are reported with measured figures
_ROUNDS = 3  # of choosing again after what was measured
_ROOM = 3.0  # standard errors that the tuning text must stay below the target by, for other text to meet it


@dataclass(frozen=True, slots=True)
class Notice:
    """Something worth telling while it goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate with real tables."""

    quality: Quality
    ms: float
    exact: ExactStep  # of the same model, taking turns with these steps


Key = tuple[int, int, tuple[int, ...]]  # K, L, dense layers
Work = Generator["Working | Notice", None, None]


def key_of(candidate: Candidate) -> Key:
    """What was measured of which."""
    return candidate.K, candidate.L, candidate.dense_layers


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome. Candidates are all pairs of the grid that fit, best first."""

    goal: Goal
    context: int
    chosen: Candidate
    verified: tuple[Candidate, ...]  # the best, all measured
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]  # no other is better in error, time and memory
    measured: Mapping[Key, Measured]
    calibration: float  # measured / predicted error, geometric mean over `verified`
    layers: Mapping[int, LayerQuality]  # of the chosen pair; also of layers that became dense, where measured
    held_out: Quality
    held_out_layers: Mapping[int, LayerQuality]
    expected_to_meet: bool  # whether the chosen pair met the target on the tuning text, with room for other text
    texts: Texts
    lengths: tuple[int, ...]  # tokens at which queries were taken
    signatures: tuple[SignatureCandidate, ...]  # the other sampler, predicted for the same layers; never chosen

    @property
    def exact_ms(self) -> float:
        """Of a step that samples nothing, measured beside the chosen pair's."""
        return self.measured[key_of(self.chosen)].exact.wall_ms

    @property
    def met(self) -> bool:
        """Whether the chosen pair reached the target on the text that it was not tuned on."""
        return self.goal.value(self.held_out.error, self.held_out.ratio) <= self.goal.target

    def measurement(self, candidate: Candidate) -> Measured | None:
        """None where the candidate was only predicted."""
        return self.measured.get(key_of(candidate))


def tune(
    engine: Engine, texts: Texts, context: int, goal: Goal, grid: Grid, speeds: Speeds
) -> Generator[Working | Notice, None, Tuned]:
    """Choose a pair of the grid for this model, machine and goal. The engine's plan must be exact.

    Raises UsageError (no layer to sample), ContextError (never sampled) or MemoryBudgetError (no pair fits), all of
    them before anything is read.
    """
    layers = _layers_to_sample(engine)
    sizes = fitting(engine.plan, context, goal, grid)
    material = yield from _material(engine, texts.tuning, "reading the text")
    angles, signatures = yield from _predicted(engine.plan, material, layers)
    yield Working("timing exact steps", 0, 0)
    exact = baseline(engine, material, TIMED_STEPS)
    cost = CostModel.of(engine.plan, speeds, material.offloaded[-1], exact)
    search = Search(engine.plan, context, goal, angles, cost)
    search.predict(sizes)
    trial = Trial(engine, material, search)
    verified = yield from trial.choose()
    lengths = material.lengths
    del material, trial.capture  # before the rows of the other text come
    other = yield from _material(engine, texts.held_out, "reading the other text")
    chosen = verified[0]
    replay = Replay(other, engine.plan, engine.runner.model.device, engine.settings.attention.hash_seed)
    held_out: dict[int, LayerQuality] = {}
    yield from _replayed(replay, chosen, chosen.sampled_layers, held_out, "checking on the other text")
    candidates = tuple(trial.search.ranked(trial.search.candidates()))
    return Tuned(
        goal, context, chosen, tuple(verified), candidates, tuple(pareto(candidates)), trial.measured,
        trial.calibration(verified), trial.search.measured[chosen.size], Quality.of(held_out.values()), held_out,
        trial.search.meets(chosen), texts, lengths,
        _signature_candidates(engine.plan, context, signatures, chosen, trial.search.cost),
    )  # fmt: skip


def _material(engine: Engine, ids: list[int], what: str) -> Generator[Working | Notice, None, Capture]:
    """A capture of this text: the one that an earlier run kept, or a new one, which is kept."""
    key = kept.capture_key(engine, ids, STEPS)
    for found in kept.load(engine, key):
        if isinstance(found, Capture):
            yield Notice(f"{what}: not again, an earlier run kept queries, keys and values in {kept.folder() / key}")
            return found
        yield Working("taking kept rows", *found)
    reading = capture(engine, ids)
    while True:
        try:
            progress = next(reading)
        except StopIteration as end:
            made: Capture = end.value
            break
        yield Working(what, progress.done, progress.total)
    size = kept.save(key, made)
    told = (
        "not kept: too large, or the disk did not take them"
        if size is None
        else f"{format_bytes(size)} kept in {kept.folder() / key}"
    )
    yield Notice(f"queries, keys and values for the next run: {told}")
    return made


def _layers_to_sample(engine: Engine) -> list[int]:
    """Layers that may be sampled. Raises UsageError if there are none."""
    full, dense = engine.shape.full_layers, engine.plan.dense_layers
    layers = [layer for layer in full if layer not in dense]
    if not layers:
        raise UsageError(
            f"no layer is left to sample: of {engine.shape.layers}, {engine.shape.layers - len(full)} have a sliding "
            f"window and the others are dense",
            hint="--dense-layers 0" if len(full) > 1 else "this model gains nothing from sampling",
        )
    return layers


_Signatures = dict[int, dict[float, SignatureQuality]]


def _predicted(
    plan: Plan, material: Capture, layers: SequenceOf[int]
) -> Generator[Working | Notice, None, tuple[dict[int, list[Angles]], _Signatures]]:
    """What all predictions are made of: angles by layer and depth, and signatures by layer and budget."""
    angles: dict[int, list[Angles]] = {}
    signatures: _Signatures = {}
    for done, number in enumerate(layers):
        yield Working("predicting", done, len(layers))
        layer = material.layer(number)
        angles[number] = measure_angles(material, layer)
        signatures[number] = measure_signatures(material, layer, plan.bits, plan.tail_of("rabitq"))
    return angles, signatures


def _signature_candidates(
    plan: Plan, context: int, signatures: _Signatures, chosen: Candidate, cost: CostModel
) -> tuple[SignatureCandidate, ...]:
    """Each budget with the dense layers of the chosen tables."""
    sampled = [signatures[number] for number in chosen.sampled_layers]
    signing = replace(plan, mode="rabitq", dense_layers=chosen.dense_layers)
    exact_ms = cost.base_ms + (plan.shape.layers - len(sampled)) * cost.exact_layer_ms
    found = []
    for budget in BUDGETS:
        error, ratio = error_and_ratio(sampled, budget)
        ms = exact_ms + len(sampled) * cost.signature_layer_ms(plan.bits, ratio)
        found.append(
            SignatureCandidate(
                budget, plan.bits, plan.tail_of("rabitq"), ratio, error, ms, signing.index_bytes(context)
            )
        )  # fmt: skip
    return tuple(found)


def _replayed(
    replay: Replay, candidate: Candidate, layers: SequenceOf[int], into: dict[int, LayerQuality], what: str
) -> Work:
    """Real tables for these layers."""
    for done, (layer, quality) in enumerate(replay.run(layers, candidate.K, candidate.L), start=1):
        into[layer] = quality
        yield Working(f"{what} (K={candidate.K} L={candidate.L})", done, len(layers))


@dataclass
class Trial:
    """Chooses by prediction, measures what it has chosen, and chooses again with what it has learnt."""

    engine: Engine
    capture: Capture
    search: Search
    measured: dict[Key, Measured] = field(default_factory=dict)

    def choose(self) -> Generator[Working | Notice, None, list[Candidate]]:
        """The best candidates, measured, the best of them first.

        One is measured in all layers first: it tells how far each layer is off its prediction. After at most _ROUNDS
        of measuring the best three, the last three stand, whatever was learnt from them.
        """
        search = self.search
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

    def _measure(self, candidate: Candidate, layers: SequenceOf[int]) -> Work:
        """Real tables for layers that have not had these yet, and real steps."""
        done = self.search.measured.setdefault(candidate.size, {})
        device, seed = self.engine.runner.model.device, self.engine.settings.attention.hash_seed
        replay = Replay(self.capture, self.engine.plan, device, seed)
        yield from _replayed(replay, candidate, [n for n in layers if n not in done], done, "real tables")
        plan = sampling_plan(self.engine.plan, candidate.K, candidate.L, candidate.dense_layers)
        yield Working(f"timing steps (K={candidate.K} L={candidate.L})", 0, 0)
        timed = time_steps(self.engine, self.capture, plan, seed)
        quality = Quality.of(done[layer] for layer in candidate.sampled_layers)
        self.measured[key_of(candidate)] = Measured(quality, timed.sampled_ms, timed.exact)

    def _learn(self, first: Candidate) -> None:
        """What a sampled layer takes beside the work that is counted, and how far text may differ from text."""
        search, measured = self.search, self.measured[key_of(first)]
        angles = {layer: search.angles[layer][-1] for layer in first.sampled_layers}
        dense = self.engine.shape.layers - len(angles)
        cost = CostModel.of(self.engine.plan, search.cost.speeds, search.cost.offloaded, measured.exact)
        search.correct_cost(cost.with_overhead(measured.ms, first.K, first.L, angles, dense))
        quality = measured.quality
        search.room = 1 + _ROOM * search.goal.value(quality.error_deviation, quality.ratio_deviation)

    def calibration(self, verified: SequenceOf[Candidate]) -> float:
        """Measured / predicted error, the geometric mean; 1 where tables sample everything and both are 0."""
        pairs = [(self.measured[key_of(c)].quality.error, c.error) for c in verified]
        logs = [np.log(measured / predicted) for measured, predicted in pairs if measured > 0 and predicted > 0]
        return float(np.exp(np.mean(logs))) if logs else 1.0
