"""Timed decode steps of the engine itself, sampled one way, over the text that was captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.recording import ExactStep
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.events import StepStats
from magicpig_cli.planner import Plan
from magicpig_cli.tuning.capture import Capture

TIMED_STEPS = 16
_WARMUP = 3  # threads, page faults of the tables


def sampling_plan(plan: Plan, K: int, L: int, dense_layers: tuple[int, ...]) -> Plan:
    """The same plan, but sampling with these tables."""
    return replace(plan, mode="lsh", K=K, L=L, dense_layers=dense_layers)


def signing_plan(plan: Plan, budget: float, head_shares: Mapping[int, tuple[float, ...]] | None = None) -> Plan:
    """The same plan, but sampling so many of the keys by their signatures; head_shares: None = every head as many."""
    return replace(plan, mode="rabitq", budget=budget, head_shares=head_shares or {}, target_error=None)


@dataclass(frozen=True, slots=True)
class Timed:
    """Medians of steps that took turns, so that whatever else the machine did meanwhile was done to both."""

    sampled_ms: float
    exact: ExactStep


def time_steps(engine: Engine, capture: Capture, plan: Plan, hash_seed: int) -> Timed:
    """Sampled and exact steps at the full context; an index is made and dropped, the capture is as before."""
    runner = ModelRunner(engine.runner.model, engine.shape, plan, engine.runner.model.device, hash_seed)
    sequence = capture.sequence
    length, tokens = sequence.length, sequence.ids[-1:]
    taken: dict[str, list[StepStats]] = {plan.mode: [], "exact": []}
    try:
        runner.build_index(sequence)
        for _ in range(_WARMUP + TIMED_STEPS):
            for mode, stats in taken.items():
                step = runner.decode([sequence], tokens, mode)
                tokens = step.logits.argmax(dim=-1).tolist()
                stats.append(step.stats)
    finally:
        for layer in sequence.layers:
            layer.index = None
        sequence.truncate(length)
    sampled, exact = (stats[_WARMUP:] for stats in taken.values())
    attention = median(stats.stages_ms["dense"] for stats in exact)
    return Timed(_wall(sampled), ExactStep(_wall(exact), attention))


def _wall(steps: list[StepStats]) -> float:
    return median(stats.wall_ms for stats in steps)
