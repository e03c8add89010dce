"""Figures of single answers and steps, and means of them with 95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli.bench.intervals import NORMAL, student


def share_found(answer: str, references: Sequence[str]) -> float:
    """Share of the references that stand in the answer, in capitals or not (RULER's string match of all)."""
    folded = answer.casefold()
    return sum(reference.casefold() in folded for reference in references) / len(references)


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Of each token, float64 [.., V]."""
    return logits.double().log_softmax(dim=-1)


def divergence(exact: torch.Tensor, other: torch.Tensor) -> float:
    """KL(exact ‖ other) of two distributions given as log-probabilities [V], in nats."""
    return float((exact.exp() * (exact - other)).sum())


@dataclass(frozen=True, slots=True)
class Mean:
    """A figure and where it lies with 95% confidence; without an interval where one observation tells nothing."""

    value: float
    ci95: tuple[float, float] | None
    n: int

    def map(self, function: Callable[[float], float]) -> Mean:
        """The same through an increasing function."""
        ends = None if self.ci95 is None else (function(self.ci95[0]), function(self.ci95[1]))
        return Mean(function(self.value), ends, self.n)


def share(scores: Sequence[float]) -> Mean:
    """Mean of scores in [0, 1] with Wilson's interval, in which a score varies as much as right or wrong can."""
    n, p = len(scores), float(np.mean(scores))
    z2 = NORMAL**2 / n
    centre = (p + z2 / 2) / (1 + z2)
    half = NORMAL / (1 + z2) * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    return Mean(p, (max(0.0, centre - half), min(1.0, centre + half)), n)


def mean(values: Sequence[float]) -> Mean:
    """Mean of independent values with Student's interval."""
    x = np.asarray(values, dtype=np.float64)
    return _around(float(x.mean()), x, len(x))


def mean_of_blocks(values: Sequence[float], block: int) -> Mean:
    """Mean of values that depend on their neighbours: Student's interval over means of `block` consecutive ones."""
    x = np.asarray(values, dtype=np.float64)
    blocks = np.array([x[start : start + block].mean() for start in range(0, len(x), block)])
    return _around(float(x.mean()), blocks, len(x))


def _around(value: float, observations: np.ndarray, n: int) -> Mean:
    count = len(observations)
    if count < 2:
        return Mean(value, None, n)
    half = student(count - 1) * float(observations.std(ddof=1)) / math.sqrt(count)
    return Mean(value, (value - half, value + half), n)


def jackknife(statistic: Callable[[np.ndarray], float], blocks: np.ndarray, n: int) -> Mean:
    """A statistic of [blocks, ..] with Student's interval, its deviation from leaving out each block in turn."""
    value, count = statistic(blocks), len(blocks)
    if count < 2:
        return Mean(value, None, n)
    others = np.array([statistic(np.delete(blocks, i, axis=0)) for i in range(count)])
    half = student(count - 1) * math.sqrt((count - 1) * float(others.var()))
    return Mean(value, (value - half, value + half), n)
