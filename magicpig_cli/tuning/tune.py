"""The whole of tuning, from text to a choice that was held to other text. Yields progress, returns a `Tuned`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from magicpig_cli.attention.estimator import Floats
from magicpig_cli.attention.shares import Shares, head_shares
from magicpig_cli.config import DEFAULT_BUDGET
from magicpig_cli.engine.engine import Engine
from magicpig_cli.errors import MemoryBudgetError, UsageError
from magicpig_cli.events import Working
from magicpig_cli.hardware import Speeds
from magicpig_cli.planner import Plan
from magicpig_cli.tuning import kept
from magicpig_cli.tuning.angles import Angles, measure_angles
from magicpig_cli.tuning.budgets import BudgetCandidate, BudgetSearch, fits, signatures_alone
from magicpig_cli.tuning.capture import STEPS, Capture, baseline, capture
from magicpig_cli.tuning.cost import CostModel
from magicpig_cli.tuning.grid import Grid
from magicpig_cli.tuning.search import Candidate, Goal, Search, Size, fitting, pareto
from magicpig_cli.tuning.signatures import (
    BUDGETS,
    SignatureQuality,
    error_and_ratio,
    measure_signatures,
    squared_errors,
)
from magicpig_cli.tuning.steps import TIMED_STEPS
from magicpig_cli.tuning.text import Texts
from magicpig_cli.tuning.trial import AnyCandidate, Key, Measured, Notice, Trial, key_of, replayed
from magicpig_cli.tuning.verify import LayerQuality, Quality, Replay
from magicpig_cli.units import format_bytes


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome. Candidates are all pairs of the grid that fit, best first."""

    goal: Goal
    context: int
    chosen: AnyCandidate  # one of the firsts of `verified` and `budgets`
    verified: tuple[Candidate, ...]  # the best pairs, all measured, best first
    budgets: tuple[BudgetCandidate, ...]  # those that were measured, best first; none where signatures have no room
    candidates: tuple[Candidate, ...]
    front: tuple[Candidate, ...]  # no other is better in error, time and memory
    measured: Mapping[Key, Measured]
    calibration: float  # measured / predicted error, geometric mean over what was measured of the chosen sampler
    layers: Mapping[int, LayerQuality]  # of the chosen one; also of layers that became dense, where measured
    held_out: Quality
    held_out_layers: Mapping[int, LayerQuality]
    expected_to_meet: bool  # whether the chosen one met the target on the tuning text, with room for other text
    texts: Texts
    lengths: tuple[int, ...]  # tokens at which queries were taken
    predicted_budgets: tuple[BudgetCandidate, ...]  # at BUDGETS
    no_tables: str | None  # why no pair was tried; then `verified`, `candidates` and `front` are empty
    even_error: float | None  # predicted, where all heads read as much, over that with shares of heads; None: the same

    @property
    def exact_ms(self) -> float:
        """Of a step that samples nothing, measured beside the chosen ones."""
        return self.measured[key_of(self.chosen)].exact.wall_ms

    @property
    def met(self) -> bool:
        """Whether the target was reached on the text that was not tuned on."""
        return self.goal.value(self.held_out.error, self.held_out.ratio) <= self.goal.target

    @property
    def other(self) -> AnyCandidate | None:
        """The best of the sampler that was not chosen."""
        others = self.budgets if isinstance(self.chosen, Candidate) else self.verified
        return others[0] if others else None

    def measurement(self, candidate: AnyCandidate) -> Measured | None:
        """None where the candidate was only predicted."""
        return self.measured.get(key_of(candidate))


def tune(
    engine: Engine, texts: Texts, context: int, goal: Goal, grid: Grid, speeds: Speeds
) -> Generator[Working | Notice, None, Tuned]:
    """Choose a pair of the grid, or a budget, for this model, machine and goal. The engine's plan must be exact.

    Where no tables fit but signatures do, budgets alone are tried. Raises UsageError (no layer to sample), ContextError
    (never sampled) or MemoryBudgetError (neither fits), all of them before anything is read.
    """
    layers = _layers_to_sample(engine)
    sizes, no_tables = _fitting(engine.plan, context, goal, grid)
    if no_tables is not None:
        yield Notice(f"{no_tables}: going on with signatures alone")
    material = yield from _material(engine, texts.tuning, "reading the text")
    angles, squares = yield from _measured(engine.plan, material, layers, tables=bool(sizes))
    shares = head_shares(squares)
    signatures = yield from _predicted(engine.plan, material, layers, shares)
    yield Working("timing exact steps", 0, 0)
    exact = baseline(engine, material, TIMED_STEPS)
    cost = CostModel.of(engine.plan, speeds, material.offloaded[-1], exact)
    search = Search(engine.plan, context, goal, angles, cost)
    search.predict(sizes)
    trial = Trial(engine, material, search, BudgetSearch(engine.plan, context, goal, signatures, shares, cost))
    verified = yield from trial.choose_tables()
    budgets = yield from trial.choose_budget()
    chosen = trial.preferred(verified, budgets)
    lengths = material.lengths
    del material, trial.capture  # before the rows of the other text come
    other = yield from _material(engine, texts.held_out, "reading the other text")
    replay = Replay(other, engine.plan, engine.runner.model.device, engine.settings.attention.hash_seed)
    held_out: dict[int, LayerQuality] = {}
    yield from replayed(replay, engine, chosen, chosen.sampled_layers, held_out, "checking on the other text")
    candidates = tuple(search.ranked(search.candidates()))
    return Tuned(
        goal, context, chosen, tuple(verified), tuple(budgets), candidates, tuple(pareto(candidates)), trial.measured,
        trial.calibration(verified if isinstance(chosen, Candidate) else budgets), trial.layers_of(chosen),
        Quality.of(held_out.values()), held_out, trial.meets(chosen), texts, lengths,
        tuple(map(trial.budgets.candidate, BUDGETS)), no_tables, _even_error(squares, signatures, shares),
    )  # fmt: skip


def _fitting(plan: Plan, context: int, goal: Goal, grid: Grid) -> tuple[dict[Size, int], str | None]:
    """Pairs whose tables fit; if none does, why, and signatures do. Raises MemoryBudgetError if neither fits."""
    try:
        return fitting(plan, context, goal, grid), None
    except MemoryBudgetError as problem:
        if not fits(plan, context, goal):
            need = format_bytes(signatures_alone(plan).index_bytes(context))
            raise MemoryBudgetError(f"{problem.message}; signatures need {need}", problem.hint) from None
        return {}, problem.message


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


def _measured(
    plan: Plan, material: Capture, layers: SequenceOf[int], *, tables: bool
) -> Generator[Working | Notice, None, tuple[dict[int, list[Angles]], dict[int, Floats]]]:
    """Angles (for tables) by layer and depth, and by layer the squared error of each head where all read the same
    share."""
    angles: dict[int, list[Angles]] = {}
    squares: dict[int, Floats] = {}
    for done, number in enumerate(layers):
        yield Working("looking at the heads", done, len(layers))
        layer = material.layer(number)
        if tables:
            angles[number] = measure_angles(material, layer)
        squares[number] = squared_errors(material, layer, plan.bits, plan.tail_share, DEFAULT_BUDGET)
    return angles, squares


def _even_error(squares: Mapping[int, Floats], signatures: _Signatures, shares: Shares) -> float | None:
    """How many times as large the error is without shares of heads, at the budget for which both are known."""
    shared, _ = error_and_ratio(signatures.values(), DEFAULT_BUDGET)
    even = sum(float(of_heads.mean() ** 0.5) for of_heads in squares.values()) / len(squares)
    return even / shared if shares and shared else None


def _predicted(
    plan: Plan, material: Capture, layers: SequenceOf[int], shares: Shares
) -> Generator[Working | Notice, None, _Signatures]:
    """Signatures by layer and budget."""
    signatures: _Signatures = {}
    for done, number in enumerate(layers):
        yield Working("predicting", done, len(layers))
        signatures[number] = measure_signatures(
            material, material.layer(number), plan.bits, plan.tail_share, shares=shares.get(number)
        )
    return signatures
