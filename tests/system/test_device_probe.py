"""How a GPU is measured, on a device that is host memory: what is waited for, and what happens without room."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magicpig_cli import device_probe, speed_probe
from magicpig_cli.speed_probe import MIN_ROUNDS
from tests.system.test_predictions import SPEEDS

MIB = 1 << 20
CUDA = torch.device("cuda", 0)


class FakeDevice:
    """Pinned memory and a device that are host memory, or lack room."""

    def __init__(self, monkeypatch, problem: Exception | None = None) -> None:
        self.synchronised = 0
        self.pinned = 0
        makers = {"empty": torch.empty, "ones": torch.ones}

        def on_host(name):
            def make(*size, device=None, **more):
                if problem is not None and device is not None:
                    raise problem
                return makers[name](*size, **more)

            return make

        def pin(tensor):
            if problem is not None:
                raise problem
            self.pinned += 1
            return tensor

        def synchronize(_device) -> None:
            self.synchronised += 1

        for name in makers:
            monkeypatch.setattr(torch, name, on_host(name))
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(device_probe, "COPY_BYTES", 1 * MIB)
        monkeypatch.setattr(device_probe, "DEVICE_WEIGHTS", 3)
        monkeypatch.setattr(device_probe, "WIDTH", 64)
        monkeypatch.setattr(speed_probe, "ROUNDS_S", 0.0)


def test_copies_go_through_pinned_memory_and_are_waited_for(monkeypatch):
    fake = FakeDevice(monkeypatch)
    there, back = device_probe.copy_speeds(CUDA)
    assert there > 0
    assert back > 0
    assert fake.pinned == 1
    assert fake.synchronised == 2 * 2 * (1 + MIN_ROUNDS)  # before and after each copy


def test_products_read_every_weight_and_are_waited_for(monkeypatch):
    fake, read, linear = FakeDevice(monkeypatch), [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, w: read.append(w.data_ptr()) or linear(x, w))
    monkeypatch.setattr(device_probe, "seconds", lambda call: call() or 1e-3)
    assert device_probe.product_speed(CUDA) == pytest.approx(3 * 64 * 64 * 2 / 1e-3)
    assert len(set(read)) == 3
    assert len(read) == 3 * (1 + MIN_ROUNDS)
    assert fake.synchronised == 2 * (1 + MIN_ROUNDS)


def test_a_device_without_room_is_not_measured(monkeypatch):
    FakeDevice(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    assert device_probe.added(SPEEDS, 0) == SPEEDS
