"""A tiny model beside a fake device, and what it says where no copy takes time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from magicpig_cli import hardware
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import Plan, plan
from tests.fake_device import FakeDevice
from tests.tiny import tiny_model

MODES = {
    "exact": {}, "lsh": {"K": 4, "L": 30}, "rabitq": {"budget": 0.1, "target_error": 0.1},
    "int8": {"mode": "rabitq", "budget": 0.1, "kv_dtype": "int8"},
}  # fmt: skip
LENGTHS = (450, 350, 480)  # of prompts; the first one moves rows out of its window in the third step
STEPS = 5
SLOW_S = 0.001


def planned(mode: str, **changes) -> Plan:
    options = {"mode": mode, "kv_dtype": "float32", "dense_layers": (0,), **MODES[mode]}
    shape = shape_from_config(model().config)
    chosen = plan(hardware.probe(), shape, Settings(attention=AttentionOptions(**options), threads=1))
    return replace(chosen, **{"chunk": 240, "block_rows": 160, **changes})


@cache
def model():
    return tiny_model("llama")


def make(device: FakeDevice | torch.device, mode: str, **changes) -> ModelRunner:
    chosen = planned(mode, **changes)
    return ModelRunner(model(), chosen.shape, chosen, device, hash_seed=0)


def prompt(number: int) -> list[int]:
    return [3 + (7 * i + 11 * number) % 250 for i in range(LENGTHS[number])]


def read(runner: ModelRunner, count: int = len(LENGTHS)) -> list[Sequence]:
    sequences = [runner.new_sequence() for _ in range(count)]
    for number, sequence in enumerate(sequences):
        list(runner.prefill(sequence, prompt(number)))
    return sequences


def decode(runner: ModelRunner, sequences: list[Sequence], steps: int = STEPS) -> torch.Tensor:
    """Logits [steps, B, V] on the host, of tokens that depend on nothing."""
    found = [runner.decode(sequences, [5 + step + b for b in range(len(sequences))]).logits for step in range(steps)]
    return torch.stack([torch.Tensor(runner.staging.to_host(logits)) for logits in found])


@cache
def as_if_alone(mode: str, halves: bool | None = None) -> torch.Tensor:
    """What comes of copies that take no time."""
    runner = make(FakeDevice(), mode)
    runner.halves = halves
    return decode(runner, read(runner))


DELAYS = {
    "there": lambda direction, number: SLOW_S if direction == "there" else 0,
    "back": lambda direction, number: SLOW_S if direction == "back" else 0,
    "some": lambda direction, number: SLOW_S * (number * 7 % 5 > 2),
}
