"""Prompts and decode steps beside a device that is a fake: the same bits however slow its copies are, nobody waits who
need not, every byte is planned, and nothing is half done after a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magicpig_cli import hardware
from magicpig_cli.cache import rings
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.gpus import Gpu
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import plan
from magicpig_cli.planner.copies import DEPTH, copy_buffers
from tests.engine.beside import DELAYS, LENGTHS, MODES, as_if_alone, decode, make, prompt, read
from tests.fake_device import FakeDevice
from tests.tiny import tiny_model
from tests.tolerances import close_logits


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("mode", MODES)
def test_slow_copies_change_no_bit(mode, delay):
    device = FakeDevice(DELAYS[delay])
    runner = make(device, mode)
    assert torch.equal(decode(runner, read(runner)), as_if_alone(mode))
    assert device.problems == []


@pytest.mark.parametrize("mode", MODES)
def test_a_run_on_the_cpu_says_the_same(mode):
    """But for rounding, and for the step in which the index takes in a row that has left the window."""
    runner = make(torch.device("cpu"), mode)
    found = decode(runner, read(runner), steps=1)
    assert torch.equal(found.argmax(-1), as_if_alone(mode)[:1].argmax(-1))
    if mode == "exact":
        assert all(map(close_logits, found[0], as_if_alone(mode)[0]))


def test_sampling_every_key_is_exact_attention():
    every = {"K": 1, "L": 300, "table_ratio": 1.0}
    for halves in (True, False):
        runner = make(FakeDevice(), "lsh", **every)
        runner.halves = halves
        assert all(map(close_logits, decode(runner, read(runner)).flatten(0, 1), as_if_alone("exact").flatten(0, 1)))


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_sliding_windows_soft_caps_and_other_heads_are_the_same_on_a_device(family):
    """Where every key is sampled, as with one bit and 300 tables, sampling is exact too."""
    other = tiny_model(family)
    shape = shape_from_config(other.config)
    found = []
    for device, options in (
        (torch.device("cpu"), {"mode": "exact"}),
        (FakeDevice(DELAYS["some"]), {"mode": "exact"}),
        (FakeDevice(DELAYS["some"]), {"mode": "lsh", "K": 1, "L": 300, "dense_layers": (0,)}),
    ):
        settings = Settings(attention=AttentionOptions(kv_dtype="float32", **options), threads=1)
        chosen = replace(plan(hardware.probe(), shape, settings), chunk=100, block_rows=96)
        runner = ModelRunner(other, shape, chosen, device, hash_seed=0)
        found.append(decode(runner, read(runner, 2), steps=3).flatten(0, 1))
    for on_device in found[1:]:
        assert all(map(close_logits, on_device, found[0]))
    assert FakeDevice.current.problems == []


@pytest.mark.parametrize("mode", MODES)
def test_nobody_waits_in_a_step_and_a_steady_state_allocates_nothing(mode):
    """Neither a copy at once, nor a value that the host asks for, nor an index that torch copies."""
    device = FakeDevice()
    runner = make(device, mode, flush=8)
    sequences = read(runner)
    decode(runner, sequences, steps=8)  # every sequence moves rows out of its window once
    allocated, held = device.allocations, dict(device.held)
    device.nobody_may_wait = True
    for step in range(9):
        runner.decode(sequences, [step + 3] * len(sequences))
    device.nobody_may_wait = False
    assert device.allocations == allocated
    assert device.held == {**held, "blocks": device.held["blocks"]}


@pytest.mark.parametrize("mode", ["exact", "lsh", "rabitq"])
def test_the_plan_knows_every_byte_on_the_device(mode):
    device = FakeDevice()
    card = Gpu(0, "Card", 1 << 30, 1 << 30)
    runner = make(device, mode, gpu=card, windows_on_host=False)
    sequences = [runner.new_sequence() for _ in range(3)]
    for number, sequence in enumerate(sequences):
        list(runner.prefill(sequence, 2 * prompt(number)))
    decode(runner, sequences)
    planned_bytes = copy_buffers(runner.plan, batch=3)
    assert device.held["windows"] == 3 * runner.plan.device_window_bytes()
    assert device.held["buffers"] == planned_bytes.device
    assert planned_bytes.host / 2 < device.held["pinned"] <= planned_bytes.host  # what is pinned needs no buffer
    assert device.held["blocks"] >= runner.kv_bytes
    assert DEPTH == rings.DEPTH
    assert copy_buffers(replace(runner.plan, gpu=None), batch=3).device == 0


# Failures


class EachInTurn:
    """Lets the first allocation fail that is asked for, then the next one, as what was granted is kept."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.refused = device, 0

    def __enter__(self) -> None:
        self.device.out_of_memory_at = self.device.allocations + (self.refused > 0)

    def __exit__(self, kind, *_) -> bool:
        self.device.out_of_memory_at = None
        self.refused += kind is torch.OutOfMemoryError
        return kind is torch.OutOfMemoryError


@pytest.mark.parametrize("mode", ["exact", "lsh", "rabitq"])
def test_no_memory_at_any_allocation_leaves_sequences_as_they_were(mode):
    untouched = make(FakeDevice(), mode)
    wanted = decode(untouched, read(untouched), steps=2)
    device = FakeDevice()
    runner = make(device, mode)
    sequences = [runner.new_sequence() for _ in LENGTHS]
    reading, stepping = EachInTurn(device), EachInTurn(device)
    for number, sequence in enumerate(sequences):
        for _ in range(30):
            with reading:
                list(runner.prefill(sequence, prompt(number)[sequence.length :]))
            assert sequence.length in (0, 240, LENGTHS[number])
            assert all(layer.length == sequence.length for layer in sequence.layers)
    for _ in range(30):
        with stepping:
            first = runner.decode(sequences, [5, 6, 7])
            break
        assert [sequence.length for sequence in sequences] == list(LENGTHS)
    assert reading.refused >= 4
    assert stepping.refused >= (0 if mode == "exact" else 6)
    second = runner.decode(sequences, [6, 7, 8])
    assert torch.equal(torch.stack([runner.staging.to_host(step.logits) for step in (first, second)]), wanted)
    assert device.problems == []


@pytest.mark.parametrize("mode", ["exact", "lsh"])
def test_where_pinning_is_refused_the_result_is_the_same(mode):
    device = FakeDevice(DELAYS["some"], pins=False)
    runner = make(device, mode)
    assert torch.equal(decode(runner, read(runner)), as_if_alone(mode))
    assert device.held["pinned"] == device.held["blocks"] == 0
    assert len(runner.staging.new_notices()) == 1
    assert runner.staging.new_notices() == []
    assert device.problems == []


def test_an_index_is_built_of_rows_that_have_come():
    """By a worker beside the forward whose rows are still on their way."""
    parts = []
    for delay in (DELAYS["back"], DELAYS["there"]):
        device = FakeDevice(delay)
        runner = make(device, "lsh")
        (sequence,) = read(runner, 1)
        index = sequence.layers[2].index
        assert index.length == sequence.layers[2].store.length
        parts.append((torch.from_numpy(index.mean), torch.from_numpy(index._tail.astype("int64"))))
        assert device.problems == []
    assert all(torch.equal(a, b) for a, b in zip(*parts, strict=True))
