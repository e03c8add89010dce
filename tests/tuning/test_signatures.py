"""What is predicted of the signature sampler against real signatures over the same captured steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli.attention.rabitq import RabitqSampler
from magicpig_cli.tuning.signatures import error_and_ratio, measure_signatures
from magicpig_cli.tuning.verify import LayerQuality, Replay
from tests import tolerances

TAIL = 0.25


def replayed(engine, captured, budget: float, bits: int, seed: int, layer: int) -> LayerQuality:
    cpu = torch.device("cpu")
    samplers = [
        RabitqSampler(
            budget=budget, tail=TAIL, bits=bits, target_error=None, hash_seed=seed + depth, threads=1
        )
        for depth in range(len(captured.lengths))
    ]  # fmt: skip
    return dict(Replay(captured, engine.plan, cpu, 0).run_with([layer], samplers))[layer]


@pytest.mark.parametrize(("layer", "bits"), [(1, 32), (2, 32), (1, 128)])
def test_ratio_and_error_are_as_predicted(engine, captured, layer, bits):
    """Over 8 rotations. As with tables the error is off by a factor that is about the same at every budget."""
    factors = []
    for budget in (0.05, 0.1, 0.2):
        predicted = measure_signatures(captured, captured.layer(layer), bits, TAIL, [budget])
        error, ratio = error_and_ratio([predicted], budget)
        runs = [replayed(engine, captured, budget, bits, 100 * n, layer) for n in range(8)]
        assert ratio == pytest.approx(budget, rel=tolerances.SAMPLED_RATIO)
        assert np.mean([run.ratio for run in runs]) == pytest.approx(ratio, rel=2 * tolerances.SAMPLED_RATIO)
        factors.append(np.sqrt(np.mean([run.squares.mean() for run in runs])) / error)
    assert 0.7 < min(factors) <= max(factors) < 1.6


def test_everything_sampled_has_no_error(captured):
    quality = measure_signatures(captured, captured.layer(1), 128, 0.25, [1.0])[1.0]
    assert quality.ratio == 1.0
    assert quality.error == 0.0


def test_more_keys_err_less(captured):
    errors = [quality.error for quality in measure_signatures(captured, captured.layer(1), 128, TAIL).values()]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 2 * errors[-1]
