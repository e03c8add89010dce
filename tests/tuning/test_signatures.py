"""What is predicted of the signature sampler against real signatures over the same captured steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from magicpig_cli.attention.estimator import signature_probability
from magicpig_cli.attention.shares import head_shares
from magicpig_cli.tuning.signatures import error_and_ratio, measure_signatures, probability, squared_errors
from magicpig_cli.tuning.steps import signing_plan
from magicpig_cli.tuning.verify import LayerQuality, Replay
from tests import tolerances

TAIL = 0.0


def replayed(engine, captured, budget: float, bits: int, seed: int, layer: int, shares=None, tail=TAIL) -> LayerQuality:
    plan = replace(signing_plan(engine.plan, budget, shares), bits=bits, tail=tail)
    return dict(Replay(captured, engine.plan, torch.device("cpu"), seed).run([layer], plan))[layer]


def test_probabilities_are_those_of_the_estimator():
    above = np.array([-60.0, -12.0, -3.0, -0.5, 0.0, 0.7, 5.0, 30.0])
    for sigma in (1e-6, 0.3, 1.0, 4.0, 20.0):
        wanted = signature_probability(above, 0.0, sigma)
        got = probability(torch.from_numpy(above), torch.full((len(above),), sigma, dtype=torch.float64))
        assert got.numpy() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("layer", "bits", "tail"), [(1, 32, 0.0), (2, 32, 0.25), (1, 128, 0.0)])
def test_ratio_and_error_are_as_predicted(engine, captured, layer, bits, tail):
    """Over 8 rotations. As with tables the error is off by a factor that is about the same at every budget."""
    factors = []
    for budget in (0.05, 0.1, 0.2):
        predicted = measure_signatures(captured, captured.layer(layer), bits, tail, [budget])
        error, ratio = error_and_ratio([predicted], budget)
        runs = [replayed(engine, captured, budget, bits, 100 * n, layer, tail=tail) for n in range(8)]
        assert ratio == pytest.approx(budget, rel=tolerances.SAMPLED_RATIO)
        assert np.mean([run.ratio for run in runs]) == pytest.approx(ratio, rel=2 * tolerances.SAMPLED_RATIO)
        factors.append(np.sqrt(np.mean([run.squares.mean() for run in runs])) / error)
    assert 0.7 < min(factors) <= max(factors) < 1.6


def test_heads_are_predicted_at_their_shares(engine, captured):
    """A layer alone, so its shares have a mean of 1. Over 8 rotations, as above."""
    layer = captured.layer(1)
    squares = squared_errors(captured, layer, 128, TAIL, 0.1)
    assert squares.shape == (engine.shape.heads,)
    even = measure_signatures(captured, layer, 128, TAIL, [0.1])
    assert squares.mean() == pytest.approx(even[0.1].error ** 2)
    uneven = {1: tuple(np.linspace(0.4, 1.6, engine.shape.heads).tolist())}
    for shares in (head_shares({1: squares}), uneven):
        predicted = measure_signatures(captured, layer, 128, TAIL, [0.1], shares[1])
        error, ratio = error_and_ratio([predicted], 0.1)
        runs = [replayed(engine, captured, 0.1, 128, 100 * n, 1, shares) for n in range(8)]
        assert np.mean([run.ratio for run in runs]) == pytest.approx(ratio, rel=2 * tolerances.SAMPLED_RATIO)
        assert 0.7 < np.sqrt(np.mean([run.squares.mean() for run in runs])) / error < 1.6
    best, worse = (
        measure_signatures(captured, layer, 128, TAIL, [0.1], shares[1])[0.1].error
        for shares in (head_shares({1: squares}), uneven)
    )
    assert best <= even[0.1].error
    assert best < worse


def test_everything_sampled_has_no_error(captured):
    quality = measure_signatures(captured, captured.layer(1), 128, 0.25, [1.0])[1.0]
    assert quality.ratio == 1.0
    assert quality.error == 0.0


def test_more_keys_err_less(captured):
    errors = [quality.error for quality in measure_signatures(captured, captured.layer(1), 128, TAIL).values()]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 2 * errors[-1]
