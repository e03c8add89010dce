"""Prompts and decode steps beside a device: the same bits however slow its copies are, in halves or whole, and nothing
half done after a failure. The device is a fake (`tests.fake_device`), which also sees who did not wait for whom."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import pytest
import torch

from magicpig_cli import hardware, kernels
from magicpig_cli.cache import rings
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine import lanes as lanes_module
from magicpig_cli.engine.lanes import Lanes, dealt
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.gpus import Gpu
from magicpig_cli.kernels import SIGNATURE_ROWS
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import Plan, plan
from magicpig_cli.planner.copies import DEPTH, copy_buffers
from tests.fake_device import FakeDevice
from tests.tiny import tiny_model
from tests.tolerances import close_logits

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


# Halves


@pytest.mark.parametrize("mode", ["lsh", "rabitq"])
def test_halves_say_what_the_whole_batch_says(mode):
    halves, whole = as_if_alone(mode, True), as_if_alone(mode, False)
    assert torch.equal(halves.argmax(-1), whole.argmax(-1))
    if mode == "lsh":
        assert all(map(close_logits, halves.flatten(0, 1), whole.flatten(0, 1)))
    else:  # the threshold is a score, in whole units: the rounding of a query may move it by one
        assert (halves - whole).abs().max() <= 1e-3 * whole.abs().max()
    assert torch.equal(as_if_alone(mode), halves)  # which is what is done unless somebody says otherwise


def test_what_was_sampled_is_told_in_the_order_of_the_batch():
    told = []
    for halves in (True, False):
        runner = make(FakeDevice(), "rabitq")
        runner.halves = halves
        sequences = read(runner)
        sequences[1].truncate(200)  # too short to be sampled
        step = runner.decode(sequences, [5, 6, 7])
        told.append((step.sampled, step.offloaded, step.stats.sampled, step.stats.offloaded, step.budgets))
        assert [sorted(squares) for squares in step.squares] == [[1, 2], [], [1, 2]]
        assert set(step.stats.device_ms) >= {"dense", "hash", "window", "merge"}
        assert sum(step.stats.stages_ms.values()) == pytest.approx(step.stats.wall_ms)
        assert step.stats.waited_ms > 0
    assert told[0] == told[1]
    assert told[0][1] == [2 * 4 * SIGNATURE_ROWS, 0, 2 * 4 * SIGNATURE_ROWS]


def test_while_one_half_reads_keys_the_other_one_is_computed(monkeypatch):
    """The kernels' first call does not return before the other half has asked for the same layer's queries. Their calls
    never overlap: they use all threads."""
    runner = make(FakeDevice(), "rabitq")
    sequences = read(runner, 2)
    attend, bring = kernels.rabitq_attend, runner.staging.bring
    asked, busy, threads = {}, threading.Lock(), []

    def asking(purpose, *tensors, **then):
        if purpose == "queries":
            asked.setdefault(threading.current_thread().name, threading.Event()).set()
        return bring(purpose, *tensors, **then)

    def reading(*args, **named):
        assert busy.acquire(blocking=False)
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            never = threading.Event()
            while len(asked) < 2:
                never.wait(0.001)
            never.wait(0.03)  # so that the other half has its queries, and would begin
        try:
            return attend(*args, **named)
        finally:
            busy.release()

    monkeypatch.setattr(runner.staging, "bring", asking)
    monkeypatch.setattr(kernels, "rabitq_attend", reading)
    decode(runner, sequences, steps=1)
    assert len(set(threads)) == 2
    assert len(threads) == 4


def test_one_sequence_exact_attention_and_measured_errors_are_not_halved():
    runner = make(FakeDevice(), "lsh")
    sequences = read(runner, 2)
    never, always = [False] * 2, [True] * 2
    assert runner._halves(sequences[:1], [True], False) == [[0]]
    assert runner._halves(sequences, never, False) == [[0, 1]]
    assert runner._halves(sequences, always, True) == [[0, 1]]
    assert runner._halves(sequences, always, False) == [[0], [1]]
    runner.halves = True
    assert runner._halves(sequences, never, False) == [[0], [1]]
    assert make(torch.device("cpu"), "lsh")._halves(sequences, always, False) == [[0, 1]]
    errors = runner.decode(sequences, [5, 6], measure_error=True).errors
    assert errors.shape == (2 * 2 * 4,)


def test_halves_have_about_the_same_to_do():
    assert dealt([9, 1, 8, 2]) == ([0, 1], [2, 3])
    assert dealt([1, 2, 3]) == ([0, 1], [2])
    for weights in ([5], [4, 4], list(range(9)), [100, 1, 1, 1, 1]):
        one, other = dealt(weights)
        assert sorted(one + other) == list(range(len(weights)))
        assert len(one) - len(other) in (0, 1)


# Failures


def assert_goes_on(runner: ModelRunner, sequences: list[Sequence], mode: str) -> None:
    """After a failure everything is as if nothing had been."""
    device = FakeDevice.current
    assert [sequence.length for sequence in sequences] == list(LENGTHS[: len(sequences)])
    assert all(layer.length == s.length for s in sequences for layer in s.layers)
    assert torch.equal(decode(runner, sequences), as_if_alone(mode))
    assert device.problems == []


@pytest.mark.parametrize("half", ["MainThread", "magicpig-half_0"])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
def test_a_failure_of_either_half_leaves_all_sequences_as_they_were(monkeypatch, half, problem):
    runner = make(FakeDevice(DELAYS["back"]), "lsh")
    sequences = read(runner)
    last = model().model.layers[-1].mlp
    compute = last.forward

    def fail(x):
        if threading.current_thread().name == half:
            raise problem
        return compute(x)

    monkeypatch.setattr(last, "forward", fail)
    for _ in range(2):
        with pytest.raises(problem):
            runner.decode(sequences, [5, 6, 7])
    monkeypatch.setattr(last, "forward", compute)
    assert_goes_on(runner, sequences, "lsh")


def test_a_second_interrupt_does_not_leave_a_half_at_work(monkeypatch):
    """Ctrl-C in the first half, and again while it waits for the other one."""
    lanes, pressed, ended = Lanes(FakeDevice()), threading.Event(), []
    wait = lanes_module.wait

    def waiting(works):
        if not pressed.is_set():
            pressed.set()
            raise KeyboardInterrupt
        return wait(works)

    def first():
        raise KeyboardInterrupt

    def second():
        assert pressed.wait(10)
        ended.append(True)

    monkeypatch.setattr(lanes_module, "wait", waiting)
    with pytest.raises(KeyboardInterrupt):
        lanes.run([first, second])
    assert ended == [True]
    assert lanes.run([lambda: 1, lambda: 2]) == [1, 2]


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
