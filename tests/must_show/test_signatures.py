"""The signature sampler on real tensors of the demo model: its probabilities, its own error, and a target for that."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli.bench.capture import capture
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.corpus import SHIPPED
from magicpig_cli.engine.engine import Engine
from magicpig_cli.evals.calibration import Sampling, SignedLayer, calibrate, own_error

TOKENS = 4352
FEW_LAYERS, MANY_LAYERS = (5, 15, 25), range(1, 30, 4)
ROTATIONS, FEW_ROTATIONS = 200, 8
TARGET, STEPS = 0.03, 64

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(demo_available) -> Engine:
    return Engine.load(Settings(ModelOptions("demo"), AttentionOptions(mode="rabitq", target_error=TARGET)))


def signed_layers(engine: Engine, name: str, layers, steps: int) -> list[SignedLayer]:
    return [SignedLayer(part) for part in capture(engine, TOKENS, layers, steps, text=SHIPPED[name]())]


@pytest.mark.parametrize("name", SHIPPED)
def test_keys_are_taken_as_often_as_they_should(engine, name):
    """Deciles of u over 200 rotations; the unnormalised estimate is the exact sum on average."""
    found = calibrate(signed_layers(engine, name, FEW_LAYERS, 2), Sampling(), ROTATIONS)
    for decile in found.deciles:
        print(f"{name}: u {decile.probability:.3f}, taken {decile.frequency:.3f} of {decile.keys:,}")
    print(f"{name}: mean of the unnormalised estimate {found.mean_sum:.4f} ± {found.standard_error:.4f} of exact")
    assert len(found.deciles) == 10
    assert all(abs(decile.frequency - decile.probability) <= 0.03 for decile in found.deciles)
    assert abs(found.mean_sum - 1) <= 0.02


@pytest.mark.parametrize("name", SHIPPED)
def test_the_estimated_error_follows_the_true_one(engine, name):
    found = own_error(signed_layers(engine, name, MANY_LAYERS, 8), Sampling(), FEW_ROTATIONS, threads=2)
    print(
        f"{name}: log-correlation {found.log_correlation:.3f}, true / estimated {found.factor:.2f} at the median, "
        f"{found.within_two:.1%} within a factor 2 of {len(found.true)} after calibration"
    )
    assert found.log_correlation >= 0.95
    assert found.within_two >= 0.9


@pytest.mark.parametrize("name", SHIPPED)
def test_a_target_error_is_kept(engine, name):
    """Teacher-forced steps; the first ones are those in which budgets find their way."""
    ids = engine.codec.encode_raw(SHIPPED[name]()[:60000])[: TOKENS + STEPS]
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, ids[:TOKENS]))
    errors, budgets = [], []
    for token in ids[TOKENS:]:
        step = engine.runner.decode([sequence], [token], measure_error=True)
        errors.append(step.errors.numpy())
        budgets.append(step.budgets[0])
    sequence.release()
    settled = np.concatenate(errors[8:])
    print(
        f"{name}: target {TARGET}, measured {np.median(settled):.4f} at the median (9 of 10 below "
        f"{np.quantile(settled, 0.9):.4f}), mean budget {np.mean(budgets[8:]):.2%}"
    )
    assert np.median(settled) <= 0.04
