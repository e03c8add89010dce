"""What the layers of a loaded model attend with and to, at several depths of a text: what predictions are made of."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from statistics import median

import torch

from magicpig_cli.attention.base import LogitRule
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.config import INDEX_FROM
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.recording import ExactStep, Queries, teacher_force
from magicpig_cli.errors import ContextError
from magicpig_cli.events import PrefillProgress
from magicpig_cli.planner import Plan

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the context: where queries are taken
STEPS = 16  # decode steps at each of them; fewer than a window flush, so that what is offloaded stays the same


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer at all depths."""

    number: int
    q: torch.Tensor  # float32 [depths, S, H, D], as compared with the rows
    rows: torch.Tensor  # [Hkv, tokens, 2, D] of the window's type, in order of position
    rule: LogitRule


@dataclass(frozen=True)
class Capture:
    """A sequence that has read all of the text exactly, and the queries of S teacher-forced steps at each depth.

    Step s at depth d sees the first lengths[d] + s + 1 tokens; offloaded[d] of them, after the sink, are in the store
    at every step of that depth.
    """

    sequence: Sequence
    lengths: tuple[int, ...]  # tokens before the first step, ascending
    offloaded: tuple[int, ...]
    sink: int
    queries: dict[int, torch.Tensor]  # layer → float32 [depths, S, H, D]
    rules: dict[int, LogitRule]

    @property
    def steps(self) -> int:
        return next(iter(self.queries.values())).shape[1]

    @property
    def tokens(self) -> int:
        return self.lengths[-1] + self.steps

    def layer(self, number: int) -> Layer:
        """A copy of the layer's rows, with its queries."""
        rows = self.sequence.layers[number].copy_rows()
        return Layer(number, self.queries[number], rows, self.rules[number])


def depths(plan: Plan, context: int, steps: int = STEPS) -> tuple[int, ...]:
    """Tokens before the first step at each share of the context that is long enough to be sampled.

    Each ends where the window has just been flushed, so that the steps move nothing. Raises ContextError if even the
    whole context is too short.
    """
    fixed = plan.sink + plan.local
    lengths = []
    for share in SHARES:
        flushes = (int(share * context) - steps - fixed) // plan.flush
        if flushes * plan.flush >= INDEX_FROM:
            lengths.append(fixed + flushes * plan.flush)
    if not lengths:
        least = fixed + -(-INDEX_FROM // plan.flush) * plan.flush + steps
        raise ContextError(
            f"a context of {context:,} tokens is never sampled: that begins with {INDEX_FROM} keys outside of sink "
            f"and window",
            hint=f"-c {least} is the shortest that can be tuned",
        )
    return tuple(dict.fromkeys(lengths))


def capture(engine: Engine, ids: list[int], steps: int = STEPS) -> Generator[PrefillProgress, None, Capture]:
    """Read the text exactly, with teacher-forced decode steps at every depth. The engine's plan must not sample."""
    assert engine.plan.mode == "exact", "a prefill that also builds tables would waste them"
    lengths = depths(engine.plan, len(ids), steps)
    sequence = engine.new_sequence()
    queries = Queries()
    total = lengths[-1] + steps
    for length in lengths:
        begin = sequence.length
        for done, _ in engine.runner.prefill(sequence, ids[begin:length]):
            yield PrefillProgress("", begin + done, total, 0.0)
        for _ in teacher_force(engine.runner, sequence, ids[length : length + steps], queries):
            yield PrefillProgress("", sequence.length, total, 0.0)
    shape = (len(lengths), steps, engine.shape.heads, engine.shape.head_dim)
    by_layer = {layer: queries.stacked(layer).reshape(shape) for layer in queries.by_layer}
    offloaded = tuple(map(engine.plan.offloaded, lengths))
    return Capture(sequence, lengths, offloaded, engine.plan.sink, by_layer, queries.rules)


def baseline(engine: Engine, capture: Capture, count: int) -> ExactStep:
    """Median times of `count` exact steps after the whole text; the capture is as before."""
    sequence, tokens = capture.sequence, capture.sequence.ids[-count:]
    length = sequence.length
    try:
        steps = list(teacher_force(engine.runner, sequence, tokens, Queries()))
    finally:
        sequence.truncate(length)
    return ExactStep(median(step.wall_ms for step in steps), median(step.attention_ms for step in steps))
