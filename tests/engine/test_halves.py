"""A batch beside a device in two halves: they say what the whole says, overlap, and leave nothing half done."""

from __future__ import annotations

import threading

import pytest
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine import lanes as lanes_module
from magicpig_cli.engine.lanes import Lanes, dealt
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.kernels import SIGNATURE_ROWS
from tests.engine.beside import DELAYS, LENGTHS, as_if_alone, decode, make, model, read
from tests.fake_device import FakeDevice
from tests.tolerances import close_logits


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
