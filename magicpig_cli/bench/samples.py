"""What was measured of one mode at one context and batch size, repetition by repetition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from magicpig_cli.bench.conditions import Conditions, Counters
from magicpig_cli.bench.noise import Means, repetition_means
from magicpig_cli.events import StepStats


@dataclass
class Samples:
    """Steps of the repetitions that are complete, and what else is known of this mode."""

    repetitions: list[list[StepStats]] = field(default_factory=list)
    errors: list[np.ndarray] = field(default_factory=list)  # of each step that measured them: [sampled layers, B · H]
    memory: dict[str, int] = field(default_factory=dict)
    _readings: list[tuple[Counters, Counters]] = field(default_factory=list)

    @contextmanager
    def repetition(self) -> Iterator[list[StepStats]]:
        """A list to fill with the steps of one repetition. What went on meanwhile is noted beside it."""
        steps: list[StepStats] = []
        before = Counters.read()
        yield steps
        self._readings.append((before, Counters.read()))
        self.repetitions.append(steps)

    @property
    def steps(self) -> list[StepStats]:
        return [step for steps in self.repetitions for step in steps]

    @property
    def wall_ms(self) -> np.ndarray:
        """Of every step, in the order in which they ran: [repetitions · steps]."""
        return np.array([step.wall_ms for step in self.steps])

    def means(self) -> Means:
        """Mean milliseconds per step of each repetition."""
        return repetition_means([[step.wall_ms for step in steps] for steps in self.repetitions])

    def conditions(self) -> Conditions:
        """What went on during the repetitions; at least one must be complete."""
        return Conditions.between(self._readings)
