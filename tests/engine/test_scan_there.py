"""Signatures scanned beside a fake device, by it or by the CPU: the same bits, however late copies come, whatever
becomes of the sequence, and where there is no room; copies and buffers are planned, and let go of."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from magicpig_cli import kernels
from magicpig_cli.attention import scan_there
from magicpig_cli.cache import signatures
from magicpig_cli.cache.ring_shape import DEPTH, PUT_BYTES
from magicpig_cli.cache.saved import SavedCache
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cache.snapshot import snapshot, write
from magicpig_cli.engine.identity import sampler_of
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.gpus import Gpu
from magicpig_cli.kernels import SIGNATURE_ROWS
from magicpig_cli.planner.copies import copy_buffers
from magicpig_cli.planner.memory import device as on_gpu
from tests.engine.beside import DELAYS, as_if_alone, decode, make, read
from tests.fake_device import FakeDevice

CARD = Gpu(0, "Card", 1 << 30, 1 << 30)
NO_ROOM = "the GPU has no room for signatures: the CPU scans its own from now on"
ROOM = 1 << 20
FULL = "the GPU's room for signatures is full: the CPU scans those of further sequences"
BLOCK_BYTES = 2 * SIGNATURE_ROWS * (128 // 8 + 2)  # of 256 rows of two KV heads


def there(device: FakeDevice, mode: str = "rabitq", **changes) -> ModelRunner:
    return make(device, mode, **{"gpu": CARD, "windows_on_host": False, "signature_room": ROOM, **changes})


def copied_bytes(runner: ModelRunner) -> int:
    return runner._attention()._sampler._there.copies.nbytes


def long_prompt(tokens: int) -> list[int]:
    return [3 + (5 * i + i * i) % 250 for i in range(tokens)]


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("mode", ["rabitq", "int8"])
def test_the_device_takes_the_rows_that_the_kernels_take(mode, delay):
    """Budgets move between steps, and between heads, by what was read: any other row would show."""
    device = FakeDevice(DELAYS[delay])
    runner = there(device, mode)
    sequences = read(runner)
    assert torch.equal(decode(runner, sequences), as_if_alone(mode))
    assert device.problems == []
    assert copied_bytes(runner) == 3 * 2 * BLOCK_BYTES  # three sequences, two layers: it was the device's doing
    assert runner.staging.new_notices() == []


def test_what_the_device_finds_is_what_is_attended_to(monkeypatch):
    """If it says that no row reaches its threshold, none is sampled."""
    scan = scan_there.scan
    ratios = []
    for found_there in (1, 0):
        monkeypatch.setattr(scan_there, "scan", lambda *args, f=found_there: (scan(*args)[0] * f, scan(*args)[1]))
        runner = there(FakeDevice(DELAYS["some"]))
        ratios.append(runner.decode(read(runner), [5, 6, 7]).stats.sampled_ratio)
    assert ratios[0] == pytest.approx(0.1, rel=0.2)
    assert ratios[1] == 0


@pytest.mark.parametrize("halves", [True, False])
def test_in_halves_and_whole_and_beside_a_sequence_that_is_too_short(halves):
    found = []
    for runner in (make(FakeDevice(), "rabitq"), there(FakeDevice(DELAYS["some"]))):
        runner.halves = halves
        sequences = read(runner)
        sequences[1].truncate(200)
        found.append(decode(runner, sequences))
        assert FakeDevice.current.problems == []
    assert torch.equal(*found)


def test_nobody_waits_for_more_than_queries_and_rows_and_a_steady_state_allocates_nothing():
    device = FakeDevice()
    runner = there(device, flush=8)
    sequences = read(runner)
    decode(runner, sequences, steps=8)
    allocated, held = device.allocations, dict(device.held)
    device.nobody_may_wait = True
    for step in range(9):
        stats = runner.decode(sequences, [step + 3] * len(sequences)).stats
    device.nobody_may_wait = False
    assert device.allocations == allocated
    assert device.held == {**held, "blocks": device.held["blocks"]}
    assert stats.waited_ms > 0
    assert stats.device_ms["retrieve"] > 0


def test_an_index_that_grows_is_joined_cut_and_forked_has_its_copies(monkeypatch):
    """Each time compared with the kernels, which have no copies. What is gone leaves nothing behind."""
    monkeypatch.setattr(signatures, "JOINED", 2)
    found, blocks = [], []
    for make_runner in (make, there):
        device, logits = FakeDevice(DELAYS["some"]), []
        runner = make_runner(device, "rabitq")
        sequence = runner.new_sequence()
        list(runner.prefill(sequence, long_prompt(600)))  # two blocks' rows at once
        list(runner.prefill(sequence, long_prompt(600), "exact"))  # that the index comes behind with, step by step
        logits.append(decode(runner, [sequence], steps=4))
        fork = runner.fork(sequence)
        fork.truncate(900)
        logits.append(decode(runner, [fork, sequence], steps=3))
        logits.append(decode(runner, [sequence], steps=3))
        found.append(torch.cat([part.flatten() for part in logits]))
        blocks.append([[part.n for part in one.layers[2].index.parts] for one in (sequence, fork)])
        assert device.problems == []
    assert torch.equal(*found)
    assert blocks[0] == blocks[1] == [[512, 512], [512, 256]]
    assert copied_bytes(runner) == 2 * BLOCK_BYTES * (2 + 2 + 1)  # what the fork has not cut is shared
    fork.release()
    assert copied_bytes(runner) == 2 * BLOCK_BYTES * 4
    sequence.release()
    assert copied_bytes(runner) == 0


def test_a_saved_sequence_has_copies_again(tmp_path):
    runner = there(FakeDevice(DELAYS["some"]))
    (sequence,) = read(runner, 1)
    path = tmp_path / "cache"
    write(snapshot(sequence, sequence.length), path, {}, sampler_of(runner.plan, hash_seed=0))
    restored = runner.restore(SavedCache(path), sequence.length, index=True)
    assert torch.equal(decode(runner, [restored]), decode(runner, [sequence]))
    assert copied_bytes(runner) == 2 * 2 * BLOCK_BYTES
    assert FakeDevice.current.problems == []


def test_a_copy_that_one_half_has_begun_is_waited_for_by_the_other():
    """Of what is left of a block by a cut, which the first step copies, by whoever comes first."""
    device = FakeDevice(lambda direction, number: 0.01 if direction == "there" else 0)
    runner = there(device)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, long_prompt(700)))
    sequence.truncate(500)
    fork = runner.fork(sequence)
    runner.decode([sequence, fork], [5, 6])
    assert copied_bytes(runner) == 2 * BLOCK_BYTES
    assert device.problems == []


def test_the_plan_knows_every_byte_of_copies_and_buffers():
    held, planned_bytes = [], []
    for make_runner in (make, there):
        runner = make_runner(FakeDevice(), "rabitq", gpu=CARD, windows_on_host=False, context=700)
        sequences = []
        for number in range(3):
            sequences.append(runner.new_sequence())
            list(runner.prefill(sequences[-1], [3 + (7 * i + 11 * number) % 250 for i in range(690)]))
        decode(runner, sequences, steps=3)
        held.append(dict(FakeDevice.current.held))
        planned_bytes.append(copy_buffers(runner.plan, batch=3))
    parts = {part.name: part.bytes for part in on_gpu(runner.plan, 3)}
    assert held[1]["buffers"] == planned_bytes[1].device + copied_bytes(runner)
    assert copied_bytes(runner) == 3 * 2 * 2 * BLOCK_BYTES
    each, _ = runner.plan.index.device_copy(runner.plan.indexed_keys(700))
    assert each == (2 + 1) * 2 * BLOCK_BYTES  # one layer more, for what is joined or cut
    assert copied_bytes(runner) <= parts["signatures"] == 3 * each
    never = 2 * DEPTH * PUT_BYTES  # by halves, none of which has had a block more
    assert held[1]["pinned"] - held[0]["pinned"] == planned_bytes[1].host - planned_bytes[0].host - never


class Refusing:
    """Of a staging that has room for so many blocks."""

    def __init__(self, runner: ModelRunner, room: int) -> None:
        self._put, self.room = runner.staging.put, room
        runner.staging.put = self

    def __call__(self, *args):
        self.room -= 1
        if self.room < 0:
            raise torch.OutOfMemoryError("no memory on the fake device")
        return self._put(*args)


def grown(runner: ModelRunner) -> tuple[torch.Tensor, Sequence]:
    """Logits of steps in which each of two layers has a block more."""
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, long_prompt(570)))
    return decode(runner, [sequence], steps=16), sequence


@cache
def grown_on_the_host() -> torch.Tensor:
    return grown(make(FakeDevice(), "rabitq"))[0]


@pytest.mark.parametrize("room", range(6))
def test_where_there_is_no_room_the_cpu_scans_and_it_is_said_once(room):
    """From a prompt on, or from a step that needs a block more; the device has its memory back."""
    runner = there(FakeDevice(DELAYS["some"]))
    refusing = Refusing(runner, room)
    logits, _sequence = grown(runner)
    assert torch.equal(logits, grown_on_the_host())
    assert FakeDevice.current.problems == []
    assert runner.staging.new_notices() == ([] if room == 5 else [NO_ROOM])
    assert refusing.room == (0 if room == 5 else -1)  # not asked again
    assert copied_bytes(runner) == (2 * 2 * BLOCK_BYTES if room == 5 else 0)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_scan_that_was_begun_goes_on_when_another_half_finds_no_memory(monkeypatch, call):
    """Copies are let go between those of a call being had and its scan: they live until it has ended."""
    runner = there(FakeDevice(DELAYS["some"]))
    look_up, calls = kernels.rabitq_lookup, iter(range(1, 100))

    def giving_up(*args, **options):
        if next(calls) == call:
            runner._attention()._sampler._there._give_up()
        return look_up(*args, **options)

    monkeypatch.setattr(kernels, "rabitq_lookup", giving_up)
    logits, _sequence = grown(runner)
    assert torch.equal(logits, grown_on_the_host())
    assert FakeDevice.current.problems == []
    assert runner.staging.new_notices() == [NO_ROOM]
    assert copied_bytes(runner) == 0


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_what_has_no_room_among_the_copies_is_scanned_by_the_cpu_in_the_same_step(blocks):
    """Three sequences with a block in each of two layers."""
    runner = there(FakeDevice(DELAYS["some"]), signature_room=blocks * BLOCK_BYTES)
    sequences = read(runner)
    assert torch.equal(decode(runner, sequences), as_if_alone("rabitq"))
    assert FakeDevice.current.problems == []
    assert copied_bytes(runner) == blocks * BLOCK_BYTES
    assert runner.staging.new_notices() == [FULL]


@pytest.mark.parametrize("scans", [0, 1, 5])
def test_a_scan_that_finds_no_room_is_the_kernels(monkeypatch, scans):
    scan, calls = scan_there.scan, iter(range(scans))

    def refusing(*args):
        if next(calls, None) is None:
            raise torch.OutOfMemoryError("no memory on the fake device")
        return scan(*args)

    monkeypatch.setattr(scan_there, "scan", refusing)
    runner = there(FakeDevice(DELAYS["some"]))
    logits, _sequence = grown(runner)
    assert torch.equal(logits, grown_on_the_host())
    assert FakeDevice.current.problems == []
    assert runner.staging.new_notices() == [NO_ROOM]
    assert copied_bytes(runner) == 0


def test_without_a_gpu_or_with_tables_nothing_is_copied():
    for runner in (make(torch.device("cpu"), "rabitq", signature_room=ROOM), make(FakeDevice(), "rabitq")):
        decode(runner, read(runner), steps=1)
        assert runner._attention()._sampler._there is None
    runner = make(FakeDevice(), "lsh", gpu=CARD, signature_room=ROOM, windows_on_host=False)
    assert not runner.plan.scans_there
    decode(runner, read(runner), steps=1)
    assert "signatures" not in {part.name for part in on_gpu(runner.plan, 1)}
