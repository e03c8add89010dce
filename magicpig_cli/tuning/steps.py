"""Timed decode steps of the engine itself with one (K, L), over the text that was captured."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.planner import Plan
from magicpig_cli.tuning.capture import Capture

TIMED_STEPS = 16
_WARMUP = 3  # threads, page faults of the tables


def sampling_plan(plan: Plan, K: int, L: int, dense_layers: tuple[int, ...]) -> Plan:
    """The same plan, but sampling with these tables."""
    return replace(plan, mode="lsh", K=K, L=L, dense_layers=dense_layers)


def time_steps(engine: Engine, capture: Capture, plan: Plan, hash_seed: int) -> float:
    """Median milliseconds of a step at the full context; tables are made and dropped, the capture is as before."""
    runner = ModelRunner(engine.runner.model, engine.shape, plan, engine.runner.model.device, hash_seed)
    sequence = capture.sequence
    length, tokens = sequence.length, sequence.ids[-1:]
    try:
        runner.build_index(sequence)
        taken = []
        for _ in range(_WARMUP + TIMED_STEPS):
            step = runner.decode([sequence], tokens)
            tokens = step.logits.argmax(dim=-1).tolist()
            taken.append(step.stats.wall_ms)
    finally:
        for layer in sequence.layers:
            layer.index = None
        sequence.truncate(length)
    return median(taken[_WARMUP:])
