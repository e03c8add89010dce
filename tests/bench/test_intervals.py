"""Intervals hold the truth as often as they say, whatever steps of a repetition have in common."""

from __future__ import annotations

import math

import numpy as np
import pytest

from magicpig_cli.bench.intervals import Timings, mean, median, ratio, relative_ratio

CASES = 400


def steps(rng: np.random.Generator, reps: int, count: int = 32) -> np.ndarray:
    """[R, n] ms: repetitions that differ by 5%, steps in which half of the one before lives on, a few spikes."""
    log = np.zeros((reps, count))
    log[:, 0] = rng.normal(0, 0.05, reps)
    for step in range(1, count):
        log[:, step] = 0.5 * log[:, step - 1] + rng.normal(0, 0.05 * math.sqrt(0.75), reps)
    spikes = (rng.random((reps, count)) < 0.02) * rng.exponential(20, (reps, count))
    return 30 * np.exp(log + rng.normal(0, 0.05, (reps, 1))) + spikes


@pytest.mark.parametrize("reps", [3, 5, 10])
@pytest.mark.parametrize("statistic", [median, mean])
def test_coverage(reps, statistic):
    """Of 400 intervals of 95% at least 360 hold 1: five standard errors below what they should."""
    rng = np.random.default_rng(reps)
    pairs = ((Timings(steps(rng, reps), True), Timings(steps(rng, reps), True)) for _ in range(CASES))
    assert sum(ratio(old, new, statistic).is_noise for old, new in pairs) >= 360


def test_a_difference_beyond_the_scatter_is_found():
    rng = np.random.default_rng(1)
    found = [ratio(Timings(1.3 * steps(rng, 5), True), Timings(steps(rng, 5), True), median) for _ in range(100)]
    assert sum(one.low > 1 for one in found) >= 90
    assert np.mean([one.ratio for one in found]) == pytest.approx(1.3, rel=0.02)


def test_steps_of_a_repetition_do_not_pass_for_independent_ones():
    """With steps that are all alike, 1000 of them say no more than one."""
    old, new = ([[ms] * count for ms in (10.0, 11.0, 12.0)] for count in (1000, 1000))
    few = ratio(
        Timings(np.array([[10.0], [11.0], [12.0]]), True), Timings(np.array([[10.0], [11.0], [12.0]]), True), mean
    )
    many = ratio(Timings(np.array(old), True), Timings(np.array(new), True), mean)
    assert (many.low, many.high) == pytest.approx((few.low, few.high))
    assert many.low < 0.85 < 1.15 < many.high


def test_what_slows_both_modes_of_a_repetition_cancels():
    rng = np.random.default_rng(2)
    control = [steps(rng, 5) for _ in range(2)]
    slow = np.array([[1.0], [1.5], [1.0], [2.0], [1.0]])
    timings = [
        Timings(0.5 * control[0] * slow, True), Timings(control[0] * slow, True),
        Timings(0.4 * control[1], True), Timings(control[1], True),
    ]  # fmt: skip
    found = relative_ratio(*timings, median)
    assert found.ratio == pytest.approx(0.5 / 0.4)
    assert found.high - found.low < 1e-6
    assert relative_ratio(timings[0], timings[1], timings[2], Timings(control[1][:4], True), median) is None


@pytest.mark.parametrize(
    ("count", "reps", "units"),
    [
        (12, 3, (3, 4)), (12, 1, None), (12, 5, None), (0, 2, None),
        (100, None, (10, 10)), (11, None, (3, 3)), (8, None, None),
    ],
)  # fmt: skip
def test_units(count, reps, units):
    found = Timings.of([float(i) for i in range(1, count + 1)], reps)
    assert (found.units_ms.shape if found else None) == units
    if found:
        assert found.by_repetition == (reps is not None)
        assert list(found.units_ms.ravel()) == list(range(1, found.units_ms.size + 1))


@pytest.mark.parametrize(("reps", "quantile"), [(2, 4.3027), (6, 2.2281), (16, 2.0423), (61, 1.9799)])
def test_width_is_students(reps, quantile):
    """Equal variances: 2·(R − 1) degrees of freedom; quantiles as tables print them."""
    logs = np.resize([0.0, 0.1], (reps, 1))
    found = ratio(Timings(np.exp(logs), True), Timings(np.exp(logs), True), mean)
    wanted = quantile * math.sqrt(2 * logs.var(ddof=1) / reps)
    assert math.log(found.high) == pytest.approx(wanted, rel=2e-4)
    assert math.log(found.low) == pytest.approx(-wanted, rel=2e-4)
