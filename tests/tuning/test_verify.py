"""Real tables over captured steps: what they sample, what they err by, and what the engine itself does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli.tuning.angles import TableCurve, measure_angles, total
from magicpig_cli.tuning.steps import sampling_plan, time_steps
from magicpig_cli.tuning.verify import LayerQuality, Quality, Replay
from tests import tolerances
from tests.tuning.conftest import outcome

LAYERS = (1, 2)


def replayed(engine, captured, K, L, seed=0, layers=LAYERS):
    replay = Replay(captured, engine.plan, torch.device("cpu"), seed)
    return dict(replay.run(layers, sampling_plan(engine.plan, K, L, (0,))))


def test_where_every_key_is_sampled_nothing_is_off(engine, captured):
    for quality in replayed(engine, captured, 1, 200).values():
        assert quality.ratio > 0.999
        assert quality.error < 0.05
        assert np.median(quality.squares) ** 0.5 < tolerances.SUM * tolerances.U


@pytest.mark.parametrize("layer", LAYERS)
def test_ratio_and_error_are_as_predicted(engine, captured, layer):
    """Over 8 seeds of tables. The same byte at several places gives keys that collide together, so the error is off by
    a factor; what one pair says about it holds for the others."""
    angles = total(measure_angles(captured, captured.layer(layer)))
    factors = []
    for K, L in ((6, 40), (5, 20), (8, 100)):
        curve = TableCurve.of(K, L)
        runs = [replayed(engine, captured, K, L, seed=100 * n, layers=(layer,))[layer] for n in range(8)]
        ratio = np.mean([run.ratio for run in runs])
        error = np.sqrt(np.mean([run.squares.mean() for run in runs]))
        assert ratio == pytest.approx(curve.ratio(angles), rel=tolerances.SAMPLED_RATIO)
        factors.append(error / curve.error(angles))
        assert factors[-1] == pytest.approx(factors[0], rel=tolerances.PREDICTED_ERROR)
    assert 0.8 < factors[0] < 2


def test_counts_are_those_of_the_engine(engine, captured):
    """Sampled and offloaded keys at the last depth equal those of decode steps fed with the same tokens."""
    seed, depth = 7, len(captured.lengths) - 1
    (quality,) = replayed(engine, captured, 5, 20, seed - depth, layers=(1,)).values()
    plan = sampling_plan(engine.plan, 5, 20, (0, 2))
    from magicpig_cli.engine.runner import ModelRunner

    runner = ModelRunner(engine.runner.model, engine.shape, plan, torch.device("cpu"), seed)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, captured.sequence.ids[: captured.lengths[-1]]))
    step = runner.decode([sequence], [captured.sequence.ids[captured.lengths[-1]]])
    assert step.stats.offloaded == {1: quality.offloaded[depth, 0]}
    assert step.stats.sampled[1] == pytest.approx(quality.sampled[depth, 0], abs=2)  # a sign within rounding of zero


def test_the_same_seed_gives_the_same_bits(engine, captured):
    one, again, other = (replayed(engine, captured, 6, 40, seed, (1,))[1] for seed in (3, 3, 4))
    assert (one.squares == again.squares).all()
    assert (one.sampled == again.sampled).all()
    assert (one.sampled != other.sampled).any()


def test_timed_steps_leave_the_capture_as_it_was(engine, captured):
    before = [captured.layer(n).rows.clone() for n in captured.queries]
    ids = list(captured.sequence.ids)
    timed = time_steps(engine, captured, sampling_plan(engine.plan, 6, 40, (0,)), 0)
    assert timed.sampled_ms > 0
    assert timed.exact.wall_ms > timed.exact.attention_ms > 0
    assert captured.sequence.ids == ids
    assert all(layer.index is None for layer in captured.sequence.layers)
    for number, rows in zip(captured.queries, before, strict=True):
        assert torch.equal(captured.layer(number).rows, rows)


def test_quality_of_several_layers():
    """RMS in a layer, mean over layers; keys are summed."""
    one = LayerQuality(np.array([[0.01, 0.03]]), np.array([[1.0, 3.0]]), np.array([[10.0, 10.0]]))
    two = LayerQuality(np.array([[0.04, 0.04]]), np.array([[8.0, 8.0]]), np.array([[40.0, 40.0]]))
    quality = Quality.of([one, two])
    assert quality.error == pytest.approx((0.02**0.5 + 0.2) / 2)
    assert quality.ratio == pytest.approx(20 / 100)
    left_out = np.array([(0.03**0.5 + 0.2) / 2, (0.01**0.5 + 0.2) / 2])
    deviation = np.sqrt(np.sum((left_out - left_out.mean()) ** 2) / 2)  # jackknife of two: (n − 1)/n · Σ
    assert quality.error_deviation == pytest.approx(deviation / quality.error)
    assert Quality.of([two]).error_deviation == 0


def test_int8_rows_are_verified_as_they_are_held(make_engine):
    """Rows and queries of such a cache are rotated; predictions from them still agree with real tables."""
    from magicpig_cli.corpus import natural_text
    from magicpig_cli.tuning.capture import capture

    engine = make_engine(kv_dtype="int8")
    made = outcome(capture(engine, engine.codec.encode_raw(natural_text()[:1024]), steps=4))
    angles = total(measure_angles(made, made.layer(1)))
    runs = [replayed(engine, made, 6, 40, 100 * n, (1,))[1] for n in range(8)]
    wanted = TableCurve.of(6, 40).ratio(angles)
    assert np.mean([run.ratio for run in runs]) == pytest.approx(wanted, rel=tolerances.SAMPLED_RATIO)
