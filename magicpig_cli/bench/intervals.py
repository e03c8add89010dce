"""Ratios of two runs with confidence intervals, from step times that are correlated within a repetition.

The unit that is drawn is a whole repetition, so whatever its steps have in common stays together. With five
repetitions a percentile interval is too narrow (it takes the normal quantile where Student's belongs, and n where n − 1
belongs); deviations are widened by both, as in Hesterberg's expanded percentile interval (2015, The American
Statistician 69, section 5.3). Where repetitions are not told, circular blocks of steps stand in for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
_LEVEL = (2.5, 97.5)
_NORMAL = 1.959964
# Student's t at 97.5% for 1, 2, … degrees of freedom; beyond, two terms of its expansion in 1/ν are as good.
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)

Statistic = Callable[[np.ndarray], np.ndarray]  # [draws, steps] → [draws]


@dataclass(frozen=True, slots=True)
class Timings:
    """Step times of one row of one run: [units, steps], units being repetitions or blocks of steps."""

    units_ms: np.ndarray
    by_repetition: bool

    @classmethod
    def of(cls, samples_ms: list[float], reps: int | None) -> Timings | None:
        """None where there is too little to tell how far it scatters: one repetition, or few steps of unknown ones."""
        if reps is not None:
            if reps < 2 or len(samples_ms) % reps:
                return None
            return cls(np.array(samples_ms).reshape(reps, -1), True)
        length = round(math.sqrt(len(samples_ms)))
        if length < 3:
            return None
        starts = np.arange(0, length * (len(samples_ms) // length), length)[:, None]
        return cls(np.array(samples_ms)[starts + np.arange(length)], False)

    @property
    def units(self) -> int:
        return len(self.units_ms)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio, and where it lies with 95% confidence as far as the repetitions tell."""

    ratio: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        return self.low <= 1 <= self.high

    def as_json(self) -> dict[str, object]:
        return {"ratio": self.ratio, "ci95": [self.low, self.high]}


def median(steps_ms: np.ndarray) -> np.ndarray:
    """[draws, steps] → [draws]."""
    return np.asarray(np.median(steps_ms, axis=-1))


def mean(steps_ms: np.ndarray) -> np.ndarray:
    """[draws, steps] → [draws]."""
    return np.asarray(steps_ms.mean(axis=-1))


def ratio(old: list[Timings], new: list[Timings], statistic: Statistic, seed: int = 0) -> Estimate:
    """Statistic of the old run over that of the new one, each taken over a second list entry if there is one.

    A second entry is a mode that took turns with the first: the same repetitions are drawn of both.
    """
    rng = np.random.default_rng(seed)
    points, deviations, units = [], [], []
    for timings in (old, new):
        at, drawn = _drawn(timings, statistic, rng)
        points.append(at)
        units.append(timings[0].units)
        deviations.append((drawn - at) * math.sqrt(units[-1] / (units[-1] - 1)))
    spread = (deviations[0] - deviations[1]) * _student(*(d.var() for d in deviations), *units) / _NORMAL
    low, high = np.percentile(spread, _LEVEL)
    point = points[0] - points[1]
    # Reflected: a draw above the estimate says how far the estimate may lie above the truth.
    return Estimate(math.exp(point), math.exp(point - high), math.exp(point - low))


def _drawn(timings: list[Timings], statistic: Statistic, rng: np.random.Generator) -> tuple[float, np.ndarray]:
    """ln of the statistic of all units, and of DRAWS draws of as many: [draws]."""
    units = timings[0].units
    picked = rng.integers(units, size=(DRAWS, units))
    every = np.arange(units)[None]

    def logs(which: np.ndarray) -> np.ndarray:
        first, *others = (np.log(statistic(one.units_ms[which].reshape(len(which), -1))) for one in timings)
        return np.asarray(first - others[0] if others else first)

    return float(logs(every)[0]), logs(picked)


def _student(var_old: float, var_new: float, units_old: int, units_new: int) -> float:
    """Student's quantile with Welch's degrees of freedom."""
    if var_old + var_new == 0:
        return _NORMAL
    freedom = (var_old + var_new) ** 2 / (var_old**2 / (units_old - 1) + var_new**2 / (units_new - 1))
    if freedom < len(_STUDENT):
        below = max(1, int(freedom))  # the wider one: degrees are cut, not rounded
        return _STUDENT[below - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
