"""Recorded decode steps and copies beside them together: what a GPU run does, on both fakes."""

from __future__ import annotations

import pytest
import torch

from magicpig_cli.model import hook
from tests.engine.beside import DELAYS, as_if_alone, decode, make, read
from tests.fake_device import FakeDevice, OnDevice
from tests.model.recorded import in_segments


@pytest.fixture(autouse=True)
def replayed_on_the_device(monkeypatch):
    """What a replayed segment gives to attention lies on the fake device: tapes know nothing of it."""
    own = hook.Forward.attend

    def attend(self, layer, window, query, key, value, rule):
        q, k, v = (tensor.as_subclass(OnDevice) for tensor in (query, key, value))
        return own(self, layer, window, q, k, v, rule).as_subclass(torch.Tensor)

    monkeypatch.setattr(hook.Forward, "attend", attend)


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("mode", ["exact", "lsh", "rabitq"])
def test_recorded_steps_beside_slow_copies_change_no_bit(mode, halves):
    device = FakeDevice(DELAYS["some"])
    runner = make(device, mode)
    runner.halves = halves
    recorded = in_segments(runner)
    found = decode(runner, read(runner))
    assert torch.equal(found, as_if_alone(mode, halves))
    assert runner.segments.why_never is None
    assert runner.segments.replayed == len(found) * (1 + halves)
    assert len(recorded.executors) == 1 + halves  # one lane for each half
    assert device.problems == []
