"""What the live view knows: the engine's events, kept small. Nothing here draws (`live_panel`) or reads a clock.

Memory is bounded: the last TIMED_STEPS durations, the last RECENT_STEPS steps, one entry per running sequence. An event
costs the same however long the run is; most sums are made when somebody looks, a few times a second.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

from magicpig_cli.events import (
    STAGES,
    Event,
    Failed,
    Finished,
    PrefillProgress,
    Requeued,
    StepStats,
    TokenEvent,
    mean_of_roots,
)

TIMED_STEPS = 512  # percentiles and sparkline
RECENT_STEPS = 32  # speed, stage shares and sampled ratios

LayerKind = Literal["sampled", "dense", "window"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What does not change while a view is open. `title` comes from a model and is not to be trusted as markup."""

    title: str
    layers: tuple[LayerKind, ...]
    slots: int = 1  # sequences decoded together at most
    context: int = 0  # tokens that a sequence may have; 0 = not shown


@dataclass(frozen=True, slots=True)
class Work:
    """How far a run is that consists of many parts: lines of a batch, steps of a bench.

    `untimed`: parts of `done` that took no time (lines that were bad from the start), left out of the estimate.
    """

    what: str
    done: int
    total: int
    unit: str = ""
    detail: str = ""
    failed: int = 0
    elapsed_s: float = 0.0
    untimed: int = 0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at the pace so far; None while there is none."""
        timed = self.done - self.untimed
        if timed <= 0 or self.elapsed_s <= 0 or self.done >= self.total:
            return None
        return self.elapsed_s / timed * (self.total - self.done)


@dataclass(slots=True)
class Slot:
    """One running sequence, in tokens. It reads until the first token of its answer."""

    read: int = 0
    to_read: int = 0
    reused: int = 0
    read_s: float = 0.0
    generated: int = 0

    @property
    def reading(self) -> bool:
        return self.generated == 0

    @property
    def tokens(self) -> int:
        return self.read + self.generated

    @property
    def read_tok_s(self) -> float | None:
        """Tokens per second, reused ones left out; None before any was read."""
        fresh = self.read - self.reused
        return fresh / self.read_s if fresh > 0 and self.read_s > 0 else None


@dataclass(slots=True)
class LiveState:
    """Everything that a frame shows. `kv_bytes` and the like are set by whoever draws: reading them costs something."""

    setup: Setup
    work: Work | None = None
    slots: dict[str, Slot] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)  # as Engine.memory
    wall_ms: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_STEPS))
    steps: deque[StepStats] = field(default_factory=deque)  # the recent ones
    _sampled: Counter[int] = field(default_factory=Counter)  # layer → keys, over `steps`
    _offloaded: Counter[int] = field(default_factory=Counter)

    def update(self, event: Event) -> None:
        """Take in what the engine has just said."""
        if isinstance(event, StepStats):
            self._step(event)
        elif isinstance(event, TokenEvent):
            self._slot(event.key).generated += 1
        elif isinstance(event, PrefillProgress):
            self._read(event)
        elif isinstance(event, Finished | Failed | Requeued):
            self.slots.pop(event.key, None)

    def forget_steps(self) -> None:
        """What follows is not to be mixed with what was measured so far (another mode of a bench)."""
        self.wall_ms.clear()
        self.steps.clear()
        self._sampled.clear()
        self._offloaded.clear()

    def _step(self, step: StepStats) -> None:
        self.wall_ms.append(step.wall_ms)
        self.steps.append(step)
        self._sampled.update(step.sampled)
        self._offloaded.update(step.offloaded)
        if len(self.steps) > RECENT_STEPS:
            oldest = self.steps.popleft()
            self._sampled.subtract(oldest.sampled)
            self._offloaded.subtract(oldest.offloaded)

    def _slot(self, key: str) -> Slot:
        slot = self.slots.get(key)
        if slot is None:
            slot = self.slots[key] = Slot()
        return slot

    def _read(self, event: PrefillProgress) -> None:
        known = event.key in self.slots
        slot = self._slot(event.key)
        if not known:
            slot.reused = event.done
        slot.read, slot.to_read, slot.read_s = event.done, event.total, event.elapsed_s

    # What a frame asks for

    @property
    def reading(self) -> Slot | None:
        """The sequence whose prompt is being read, if any."""
        return next((slot for slot in self.slots.values() if slot.reading), None)

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of all sequences together over the recent steps."""
        total_ms = sum(step.wall_ms for step in self.steps)
        return 1000 * sum(step.batch for step in self.steps) / total_ms if total_ms else None

    def percentiles(self, *wanted: float) -> list[float]:
        """Milliseconds of the timed steps at these percentages, interpolated; empty before the first step."""
        ordered = sorted(self.wall_ms)
        return [_percentile(ordered, percent) for percent in wanted] if ordered else []

    def stage_shares(self) -> dict[str, float]:
        """Stage → share of the recent steps' time, in the order of STAGES; empty before the first step."""
        sums = {stage: sum(step.stages_ms.get(stage, 0.0) for step in self.steps) for stage in STAGES}
        total = sum(sums.values())
        return {stage: ms / total for stage, ms in sums.items()} if total else {}

    def layer_ratios(self) -> list[float | None]:
        """Σ sampled / Σ offloaded keys of each layer over the recent steps; None where it did not sample."""
        layers = range(len(self.setup.layers))
        return [self._sampled[layer] / self._offloaded[layer] if self._offloaded[layer] else None for layer in layers]

    @property
    def error_estimate(self) -> float | None:
        """Relative error of attention over the recent steps: RMS over steps and heads, mean over sampled layers."""
        by_layer: dict[int, list[float]] = {}
        for step in self.steps:
            for layer, square in step.squares.items():
                by_layer.setdefault(layer, []).append(square)
        return mean_of_roots(sum(squares) / len(squares) for squares in by_layer.values())

    @property
    def sampled_ratio(self) -> float | None:
        """The same over all layers; None with exact attention."""
        offloaded = sum(self._offloaded.values())
        return sum(self._sampled.values()) / offloaded if offloaded else None


def _percentile(ordered: list[float], percent: float) -> float:
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
