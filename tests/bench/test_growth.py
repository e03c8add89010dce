"""The growth bench measures what it says: steps over a cache that grows, compared at the same length."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli.bench import appending
from magicpig_cli.bench.synthetic import SyntheticLayer, SyntheticShape


@pytest.fixture
def few_last_steps(monkeypatch):
    monkeypatch.setattr(appending, "LAST_STEPS", 8)


def test_growth_over_a_small_layer(few_last_steps):
    tensors = SyntheticLayer(SyntheticShape(1, 2, 16, 700, 2)).tensors(1.0)
    growth = appending.measure_growth(tensors, appended=200, start=400)
    assert growth.step_ratio > 0
    assert growth.worst_over_median >= 1
    assert growth.worst_over_run_median >= 1
    assert 0 <= growth.worst_step < 200


def test_local_medians_follow_a_trend_and_ignore_a_spike(monkeypatch):
    monkeypatch.setattr(appending, "NEIGHBOURHOOD", 11)
    steps = np.linspace(100, 200, 101)
    spiked = steps.copy()
    spiked[50] *= 3
    local = spiked / appending._local_medians(spiked)
    assert local.argmax() == 50
    assert local[50] > 2.9
    assert np.delete(local, 50).max() < 1.06
