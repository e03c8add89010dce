"""Decode steps replayed in segments: nobody can tell."""

from __future__ import annotations

import threading

import pytest
import torch

from magicpig_cli.config import RECORDED_BATCHES
from magicpig_cli.model import hook
from magicpig_cli.model.frequencies import settle
from magicpig_cli.model.trial import Trial
from tests.families import CASES
from tests.model.fake_graphs import FakeGraphs, storage
from tests.model.recorded import Recorded, all_equal, in_segments, started, step, steps
from tests.model.test_parity import greedy, make_runner, prompts
from tests.tiny import tiny_model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replayed_steps_are_the_familys_own_bit_by_bit(case):
    """Batches of one, two and three sequences in turns, in two lanes."""
    model = case.model()
    settle(model, case.context or 1024)
    runner = make_runner(model, chunk=128)
    sequences = started(runner, (75, 33, 5))
    wanted = steps(runner, [runner.fork(sequence) for sequence in sequences])
    recorded = in_segments(runner)
    assert all_equal(steps(runner, sequences), wanted)
    assert recorded.segments.why_never is None
    assert recorded.captures == 3 * (model.config.num_hidden_layers + 1)  # three batch sizes
    assert sum(tape.replays for executor in recorded.executors for tape in executor.tapes) > recorded.captures


@pytest.mark.parametrize("mode", ["exact", "lsh", "rabitq"])
def test_a_runner_generates_the_same_tokens(mode):
    model = tiny_model("llama")
    batch = prompts(model.config.vocab_size, (420, 380))
    how = {"K": 4, "L": 12} if mode == "lsh" else {}
    wanted = greedy(make_runner(model, mode, **how), batch)
    runner = make_runner(model, mode, **how)
    recorded = in_segments(runner)
    assert greedy(runner, batch) == wanted
    assert recorded.captures == model.config.num_hidden_layers + 1


def test_prompts_are_never_recorded():
    runner = make_runner(tiny_model("llama"), chunk=1)
    recorded = in_segments(runner)
    started(runner, (3, 1))
    assert recorded.captures == 0


def test_without_an_executor_nothing_is_recorded():
    runner = make_runner(tiny_model("llama"))
    assert runner.segments.prepare(1) is None
    assert runner.segments.new_notices() == []


def test_logits_outlive_the_next_step():
    runner = make_runner(tiny_model("llama"))
    in_segments(runner)
    (sequence,) = started(runner, (20,))
    first = step(runner, [sequence], [5])
    kept = first.clone()
    assert not torch.equal(step(runner, [sequence], [9]), kept)
    assert torch.equal(first, kept)


def test_a_step_that_fails_half_way_leaves_nothing_behind(monkeypatch):
    """Attention fails in the middle of a replay: the next replay is as if that had not been."""
    runner = make_runner(tiny_model("llama"))
    wanted = greedy(runner, [[5, 6, 7]])
    in_segments(runner)
    (sequence,) = started(runner, (40,))
    step(runner, [sequence], [5])
    own = hook.Forward.attend

    def fail(self, layer, *given):
        if layer == 1:
            raise KeyboardInterrupt
        return own(self, layer, *given)

    monkeypatch.setattr(hook.Forward, "attend", fail)
    with pytest.raises(KeyboardInterrupt):
        runner.decode([sequence], [9])
    monkeypatch.setattr(hook.Forward, "attend", own)
    assert sequence.length == 41
    assert greedy(runner, [[5, 6, 7]]) == wanted


# Lanes


def test_lanes_and_batch_sizes_have_memory_of_their_own():
    recorded = Recorded(tiny_model("llama"))
    seen: set[int] = set()
    for batch, lane in [(1, 0), (2, 0), (1, 1), (2, 1)]:
        found = recorded.segments.prepare(batch, lane)
        held = [found.ids, found.positions, found.logits]
        for call in found.calls:
            held += [call.given.q, call.given.k, call.given.v, call.out]
        own = {storage(tensor) for tensor in held}
        assert len(own) == len(held)
        assert not own & seen
        seen |= own
    assert len(recorded.executors) == 2


def test_a_lane_may_run_a_step_in_the_middle_of_the_others():
    runner = make_runner(tiny_model("llama"))
    a, b = started(runner, (40, 25))
    wanted = [step(runner, [a], [5]), step(runner, [b], [6]), step(runner, [a], [7])]
    in_segments(runner)
    a, b = started(runner, (40, 25))
    found = [step(runner, [a], [5])]
    between = runner._attention()
    own = between.step

    def interrupted(layer, *given):
        if layer == 1:
            between.step = own
            found.append(step(runner, [b], [6], lane=1))
        return own(layer, *given)

    between.step = interrupted
    found.append(step(runner, [a], [7]))
    assert all_equal(found, wanted)


def test_lanes_decode_at_the_same_time_in_threads():
    runner = make_runner(tiny_model("llama"))
    tokens = range(5, 25)
    wanted = [[step(runner, [sequence], [token]) for token in tokens] for sequence in started(runner, (40, 25))]
    recorded = in_segments(runner)
    both = started(runner, (40, 25))
    found: list[list[torch.Tensor]] = [[], []]

    def decode(lane: int) -> None:
        for token in tokens:
            found[lane].append(step(runner, [both[lane]], [token], lane))

    threads = [threading.Thread(target=decode, args=(lane,)) for lane in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all_equal(*pair) for pair in zip(found, wanted, strict=True))
    assert recorded.segments.why_never is None
    assert len(recorded.executors) == 2


def test_steps_are_not_replayed_while_paused():
    runner = make_runner(tiny_model("llama"))
    recorded = in_segments(runner)
    (sequence,) = started(runner, (20,))
    with runner.segments.paused():
        step(runner, [sequence], [5])
    assert recorded.captures == 0
    step(runner, [sequence], [6])
    assert recorded.captures == 4


def test_the_batch_sizes_used_last_are_kept():
    recorded = Recorded(tiny_model("llama"))
    each = 4  # captures
    for batch in range(1, RECORDED_BATCHES + 1):
        recorded.segments.prepare(batch)
    first = recorded.segments.prepare(1)
    assert recorded.captures == each * RECORDED_BATCHES
    recorded.segments.prepare(RECORDED_BATCHES + 1)  # 2 goes
    assert recorded.segments.prepare(1) is first
    assert recorded.captures == each * (RECORDED_BATCHES + 1)
    recorded.segments.prepare(2)
    assert recorded.captures == each * (RECORDED_BATCHES + 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_recorded(dtype):
    model = tiny_model("qwen3").to(dtype)
    recorded = Recorded(model)
    ids, positions = torch.tensor([[5], [9]]), torch.tensor([[700], [3]])
    with torch.inference_mode():
        wanted = hook.run(model, ids, positions, Trial())
        assert torch.equal(recorded.segments.prepare(2).replay(ids, positions, Trial()), wanted)


def test_what_nobody_holds_is_not_kept_for_the_next_segment():
    """Of the fake: as memory of CUDA that was free when a segment was captured."""
    executor, x = FakeGraphs(), torch.ones(3)
    executor.begin()
    held, dropped = x * 2, x * 3
    pieces = [executor.end()]
    where = storage(dropped)
    del dropped
    executor.begin()
    out = held + 1
    pieces.append(executor.end())
    assert storage(out) != where
    for piece in pieces:
        piece.replay()
    assert out.tolist() == [3, 3, 3]
    assert executor.pool.fresh[where].isnan().all()
    assert not executor.pool.fresh[storage(held)].isnan().any()
