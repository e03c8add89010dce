"""Joining and leaving: how long running answers wait, what fits into memory, what happens when it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine import admission, scheduler
from magicpig_cli.engine.admission import Admission
from magicpig_cli.engine.engine import Engine, Request
from magicpig_cli.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    Requeued,
    StepStats,
    TokenEvent,
    WaitingForMemory,
)
from tests.engine.test_generate import answers, prompt

LENGTHS = (700, 90, 300, 5, 1100, 64, 200)


@pytest.fixture
def engine(tiny_engine) -> Engine:
    return tiny_engine(context=2048)


def requests(engine: Engine, lengths: tuple[int, ...] = LENGTHS, tokens: int = 12) -> list[Request]:
    options = GenerationOptions(max_tokens=tokens, temperature=1.0, seed=5)
    return [engine.request(str(i), prompt(n, seed=i), options) for i, n in enumerate(lengths)]


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    for module in (scheduler.time, admission.time):
        monkeypatch.setattr(module, "perf_counter", clock)
        monkeypatch.setattr(module, "monotonic", clock)
        monkeypatch.setattr(module, "sleep", clock.sleep)
    return clock


def chunks_before_steps(events: Iterator[Event], key: str) -> list[int]:
    """How many chunks of that prompt were read right before each decode step."""
    counts, read = [], 0
    for event in events:
        if isinstance(event, PrefillProgress) and event.key == key and event.done:
            read += 1
        elif isinstance(event, StepStats):
            counts.append(read)
            read = 0
    return counts


@pytest.mark.parametrize(
    ("max_delay_s", "expected"), [(0.0, [0, 1, 1, 1, 1]), (1.0, [2, 2]), (1.3, [3, 1]), (100.0, [4])]
)
def test_running_answers_wait_for_a_bounded_time(engine, clock, monkeypatch, max_delay_s, expected):
    prefill = engine.runner.prefill

    def slowly(*args):
        for item in prefill(*args):
            clock.now += 0.4
            yield item

    monkeypatch.setattr(engine.runner, "prefill", slowly)
    short, long = requests(engine, (9, 1800), tokens=30)  # the long prompt has four chunks
    counts = chunks_before_steps(engine.generate([short, long], 2, max_delay_s), "1")
    assert counts[: len(expected)] == expected
    assert not any(counts[len(expected) :])


def test_delays_do_not_change_answers(engine):
    expected = {r.key: answers(engine, [r], 1)[r.key] for r in requests(engine)}
    for delay in (0.0, 0.01, 100.0):
        events = engine.generate(requests(engine), 3, delay)
        found = {event.key: event for event in events if isinstance(event, Finished)}
        assert {key: f.token_ids for key, f in found.items()} == {key: f.token_ids for key, f in expected.items()}


# Memory that runs out


def breaking(monkeypatch, engine: Engine, method: str, breaks: Callable[[int], bool], error: Exception) -> None:
    """Have the n-th call of a method of the runner fail in a layer in the middle."""
    from magicpig_cli.model import hook

    original, calls = getattr(engine.runner, method), [0]
    run = hook.run

    def counted(*args, **kwargs):
        calls[0] += 1
        if not breaks(calls[0]):
            return original(*args, **kwargs)

        def half_a_forward(model, ids, positions, forward):
            name = "chunk" if forward.prefill else "step_here"
            attend, seen = getattr(forward.attention, name), [0]

            def failing(*inner, **options):
                seen[0] += 1
                if seen[0] == 2:
                    raise error
                return attend(*inner, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(forward.attention, name, failing)
                return run(model, ids, positions, forward)

        def patched():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(hook, "run", half_a_forward)
                yield from original(*args, **kwargs)

        if method == "prefill":
            return patched()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hook, "run", half_a_forward)
            return original(*args, **kwargs)

    monkeypatch.setattr(engine.runner, method, counted)


ERRORS = [MemoryError(), RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("mode", ["exact", "lsh"])
def test_out_of_memory_in_a_step_takes_the_youngest_back(tiny_engine, monkeypatch, error, mode):
    engine = tiny_engine(mode, context=2048, K=4, L=20)
    expected = answers(engine, requests(engine), 1)
    breaking(monkeypatch, engine, "decode", lambda call: call in (3, 4), error)
    events = list(engine.generate(requests(engine), 3))
    back = [event for event in events if isinstance(event, Requeued)]
    assert [event.batch_size for event in back] == [2, 1]
    assert [event.key for event in back] == ["2", "1"]  # the youngest of 0, 1, 2; then of 0, 1
    found = {event.key: event for event in events if isinstance(event, Finished)}
    assert not [event for event in events if isinstance(event, Failed)]
    for key, finished in expected.items():
        assert found[key].token_ids == finished.token_ids
        assert found[key].text == finished.text


def test_slots_come_back_when_nothing_happens(engine, monkeypatch):
    breaking(monkeypatch, engine, "decode", lambda call: call == 2, MemoryError())
    steps = [e.batch for e in engine.generate(requests(engine, (9,) * 12), 3) if isinstance(e, StepStats)]
    assert steps[:2] == [3, 2]
    assert max(steps[2:]) == 3


def test_out_of_memory_while_reading_takes_the_reader_back(engine, monkeypatch):
    expected = answers(engine, requests(engine), 1)
    breaking(monkeypatch, engine, "prefill", lambda call: call == 2, MemoryError())
    events = list(engine.generate(requests(engine), 3))
    assert [e.key for e in events if isinstance(e, Requeued)] == ["1"]
    found = {event.key: event.token_ids for event in events if isinstance(event, Finished)}
    assert found == {key: finished.token_ids for key, finished in expected.items()}


@pytest.mark.parametrize("method", ["decode", "prefill"])
def test_an_answer_that_is_alone_fails_and_the_others_run(engine, monkeypatch, method):
    failing_call = 1
    breaking(monkeypatch, engine, method, lambda call: call == failing_call, MemoryError())
    events = list(engine.generate(requests(engine), 1))
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.key, failed.code) == ("0", "MemoryBudgetError")
    assert "712 tokens" in failed.message
    assert {event.key for event in events if isinstance(event, Finished)} == {str(i) for i in range(1, len(LENGTHS))}


def test_other_errors_are_not_taken_for_it(engine, monkeypatch):
    breaking(monkeypatch, engine, "decode", lambda call: call == 2, RuntimeError("mat1 and mat2 shapes"))
    with pytest.raises(RuntimeError, match="mat1"):
        list(engine.generate(requests(engine), 3))


# Memory that is promised


def with_budget(engine: Engine, budget: Callable[[], int]) -> None:
    engine.admission = Admission(engine.plan, free=budget, own=lambda: 0)
    engine.admission._whole = engine.plan.budget_bytes  # what `free` says is the budget


def most_together(events: Iterator[Event]) -> int:
    return max(event.batch for event in events if isinstance(event, StepStats))


def test_as_many_as_fit_at_their_own_lengths(engine, clock, monkeypatch):
    monkeypatch.setattr(admission, "LOOK_EVERY_S", 0.0)
    short, long = engine.plan.sequence_bytes(9 + 12), engine.plan.sequence_bytes(1800 + 12)
    assert long > 2 * short
    with_budget(engine, lambda: long + 2 * short)
    lengths = (1800, 9, 9, 9, 9)
    assert most_together(engine.generate(requests(engine, lengths), 8)) == 3
    assert most_together(engine.generate(requests(engine, lengths[1:]), 8)) == 4


def test_fewer_run_while_others_have_the_memory(engine, clock, monkeypatch):
    monkeypatch.setattr(admission, "LOOK_EVERY_S", 0.0)
    one = engine.plan.sequence_bytes(9 + 12)
    with_budget(engine, lambda: one if clock.now < 140 else 3 * one)
    steps = []
    for event in engine.generate(requests(engine, (9,) * 12), 3):
        if isinstance(event, StepStats):
            clock.now += 1
            steps.append(event.batch)
    assert set(steps[:40]) == {1}
    assert max(steps[44:]) == 3  # the one that ran alone had up to 11 steps to go


def test_waits_for_memory_that_comes_back(engine, clock, monkeypatch):
    monkeypatch.setattr(admission, "LOOK_EVERY_S", 0.0)
    one, since = engine.plan.sequence_bytes(9 + 12), clock.now
    with_budget(engine, lambda: 0 if clock.now < since + 20 else one)
    events = list(engine.generate(requests(engine, (9, 9)), 2))
    waiting = [event for event in events if isinstance(event, WaitingForMemory)]
    assert {(event.key, event.need_bytes, event.free_bytes) for event in waiting} == {("0", one, 0)}
    assert clock.now - since >= 20
    assert [event.key for event in events if isinstance(event, Finished)] == ["0", "1"]


def test_does_not_wait_for_ever(engine, clock, monkeypatch):
    monkeypatch.setattr(admission, "LOOK_EVERY_S", 0.0)
    one, long = engine.plan.sequence_bytes(9 + 12), engine.plan.sequence_bytes(1800 + 12)
    with_budget(engine, lambda: one)
    events = list(engine.generate(requests(engine, (9, 1800, 9)), 2))
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert (failed.key, failed.code) == ("1", "MemoryBudgetError")
    assert "1,812 tokens take" in failed.message
    assert "keys and values" in failed.message  # the sum is written out
    assert [event.key for event in events if isinstance(event, Finished)] == ["0", "2"]
    assert clock.now - 100 >= scheduler.MEMORY_WAIT_S
    assert long > one


def test_what_can_never_fit_does_not_wait(engine, clock):
    engine.plan = replace(engine.plan, budget_bytes=engine.plan.sequence_bytes(500))
    with_budget(engine, lambda: engine.plan.budget_bytes)
    events = list(engine.generate(requests(engine, (1800, 9)), 2))
    assert [event.key for event in events if isinstance(event, Failed)] == ["0"]
    assert not [event for event in events if isinstance(event, WaitingForMemory)]
    assert clock.now == 100


def test_a_conversation_s_own_sequence_is_not_asked_again(engine):
    with_budget(engine, lambda: 0)
    sequence = engine.new_sequence()
    (request,) = requests(engine, (80,))
    done = answers(engine, [replace(request, sequence=sequence)], 1)["0"]
    assert len(done.token_ids) == 12


def test_the_budget_follows_what_others_take_not_what_we_take(engine):
    free, own = [1000 << 20], [100 << 20]
    gate = Admission(engine.plan, lambda: free[0], lambda: own[0])
    admission_budget = engine.plan.budget_bytes

    def later(free_mib: int, own_mib: int) -> int:
        free[0], own[0], gate._looked = free_mib << 20, own_mib << 20, -10.0
        return gate.budget() - admission_budget

    assert later(700, 400) == 0  # we have taken 300
    assert later(500, 400) == -200 << 20  # and somebody else 200
    assert later(1200, 100) == 200 << 20  # given back, and 200 more than there was


def test_a_closed_run_frees_what_it_holds(engine):
    events = engine.generate(requests(engine), 3)
    tokens = 0
    for event in events:
        tokens += isinstance(event, TokenEvent)
        if tokens > 9:
            break
    assert engine.memory()["kv_bytes"] > 0
    events.close()
    assert engine.memory()["kv_bytes"] == 0
