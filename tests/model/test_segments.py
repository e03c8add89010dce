"""Decode steps replayed in segments: nobody can tell, and whatever cannot be recorded runs as before."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from magicpig_cli.config import RECORDED_BATCHES
from magicpig_cli.model import graphs, hook, segments
from magicpig_cli.model.frequencies import settle
from magicpig_cli.model.graphs import CaptureRefused
from magicpig_cli.model.segments import Segments
from magicpig_cli.model.trial import Trial
from tests.families import CASES
from tests.model.fake_graphs import FakeGraphs, Tape, storage
from tests.model.test_parity import greedy, make_runner, prompts
from tests.tiny import tiny_model

STEPS = (((0, 1, 2), 0), ((1,), 1), ((2, 0), 0), ((2,), 1), ((0, 1, 2), 0), ((1, 2), 0))  # who, in which lane


class Recorded:
    """Segments, and the executors of their lanes in the order in which they were made.

    fail_at: the capture of the first lane, from 1, at which memory runs out.
    """

    def __init__(self, model, fail_at: int | None = None):
        self.executors: list[FakeGraphs] = []
        self._fail_at = fail_at
        self.segments = Segments(model, self._make)

    def _make(self) -> FakeGraphs:
        self.executors.append(FakeGraphs(None if self.executors else self._fail_at))
        return self.executors[-1]

    @property
    def captures(self) -> int:
        return sum(executor.begun for executor in self.executors)


def in_segments(runner, **how) -> Recorded:
    """Have the runner's decode steps recorded."""
    recorded = Recorded(runner.model, **how)
    runner.segments = recorded.segments
    return recorded


def started(runner, lengths: tuple[int, ...]):
    """Sequences after prompts of these lengths."""
    sequences = []
    for prompt in prompts(runner.model.config.vocab_size, lengths):
        sequences.append(runner.new_sequence())
        list(runner.prefill(sequences[-1], prompt))
    return sequences


def step(runner, sequences, tokens: list[int], lane: int = 0) -> torch.Tensor:
    """Logits [B, V] of one token for each sequence, as the runner decodes, in a lane of a test's choice."""
    exact = [[False] * len(sequences)] * runner.model.config.num_hidden_layers
    forward = hook.Forward(runner._attention(), sequences, exact, lane=lane)
    ids = torch.tensor([[token] for token in tokens])
    positions = torch.tensor([[sequence.length] for sequence in sequences])
    with torch.inference_mode():
        logits = runner.segments.run(ids, positions, forward)
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.commit([token])
    return logits


def steps(runner, sequences) -> list[torch.Tensor]:
    """Logits of STEPS, each token the likeliest of the step before."""
    tokens, found = [5, 6, 7], []
    for who, lane in STEPS:
        found.append(step(runner, [sequences[b] for b in who], [tokens[b] for b in who], lane))
        for b, row in zip(who, found[-1], strict=True):
            tokens[b] = int(row.argmax())
    return found


def all_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


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


# What cannot be recorded


@pytest.mark.parametrize("fail_at", [1, 2, 4])
def test_a_batch_size_for_which_memory_runs_out_is_decoded_by_the_familys_own_code(fail_at):
    runner = make_runner(tiny_model("llama"))  # three layers: four segments
    wanted = steps(runner, started(runner, (75, 33, 5)))
    recorded = in_segments(runner, fail_at=fail_at)
    assert all_equal(steps(runner, started(runner, (75, 33, 5))), wanted)
    assert recorded.segments.new_notices() == [
        "decode steps of 3 run without CUDA graphs, which is slower: CUDA out of memory. Tried to allocate 2.00 MiB."
    ]
    assert recorded.segments.new_notices() == []
    assert recorded.segments.why_never is None
    assert recorded.segments.prepare(3) is None
    assert recorded.segments.prepare(1) is not None
    assert recorded.captures == fail_at + 3 * 4


def test_a_segment_that_does_not_write_what_it_should_is_noticed(monkeypatch):
    """Whichever it is, and though its memory happens to hold what it should write: nothing is replayed then."""
    monkeypatch.setattr(segments, "_POSITIONS", (3, 3))
    monkeypatch.setattr(Tape, "forget_results", lambda _: None)
    model = tiny_model("llama")
    runner = make_runner(model)
    wanted = greedy(runner, [[5, 6, 7]])
    for lame in range(model.config.num_hidden_layers + 1):
        recorded = in_segments(runner)
        own = FakeGraphs.end

        def end(self, lame=lame, own=own):
            tape = own(self)
            if len(self.tapes) == lame + 1:
                tape.replay = lambda: None
            return tape

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeGraphs, "end", end)
            assert greedy(runner, [[5, 6, 7]]) == wanted
        assert recorded.segments.why_never == "a replayed step differs from the model's own"
        assert recorded.captures == model.config.num_hidden_layers + 1
        assert len(recorded.segments.new_notices()) == 1


def read(x: torch.Tensor) -> None:
    x.sum().item()


def branch(x: torch.Tensor) -> None:
    if x[0, 0, 0] > 1e9:
        raise AssertionError


def select(x: torch.Tensor) -> None:
    x[x > 0]


def count(x: torch.Tensor) -> None:
    (x > 0).nonzero()


def move(x: torch.Tensor) -> None:
    x.to("meta")


@pytest.mark.parametrize("do", [read, branch, select, count, move])
def test_a_model_that_reads_its_results_keeps_its_own_code(do):
    """It is not even tried: a capture that fails would leave torch unable to capture anything."""
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    mlp.register_forward_pre_hook(lambda _, given: do(given[0]))
    runner = make_runner(model)
    wanted = greedy(runner, [[5, 6, 7], [8, 9]])
    recorded = in_segments(runner)
    assert greedy(runner, [[5, 6, 7], [8, 9]]) == wanted
    assert greedy(runner, [[8, 9]])
    assert recorded.captures == 0
    (notice,) = recorded.segments.new_notices()
    assert notice == f"decode steps run without CUDA graphs, which is slower: {recorded.segments.why_never}"
    assert "aten" in notice


def test_families_that_read_their_results_are_found_out():
    """A loop over those experts that were chosen, and frequencies that follow the longest sequence."""
    loop = tiny_model("mixtral")
    loop.set_experts_implementation("eager")
    switching = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4})
    for model, reads in ((loop, "nonzero"), (switching, "is_nonzero")):
        recorded = Recorded(model)
        assert recorded.segments.prepare(2) is None
        assert recorded.segments.why_never == f"aten.{reads}.default reads a result on the host"
    settle(switching, 4096)
    assert Recorded(switching).segments.prepare(2) is not None


def test_indices_that_are_numbers_are_recorded():
    model = tiny_model("llama")
    order = torch.tensor([1, 0])
    own = model.model.norm.forward
    model.model.norm.forward = lambda x: own(x)[order][:, :, torch.nn.functional.one_hot(order, 64).argmax(0)]
    recorded = Recorded(model)
    assert recorded.segments.prepare(2) is not None


def test_what_only_the_capture_refuses_is_not_replayed_either(monkeypatch):
    model = tiny_model("llama")
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, given: read(given[0]))
    monkeypatch.setattr(segments, "NoHostReads", torch.inference_mode)
    runner = make_runner(model)
    wanted = greedy(runner, [[5, 6, 7]])
    recorded = in_segments(runner)
    assert greedy(runner, [[5, 6, 7]]) == wanted
    assert "not permitted when stream is capturing" in recorded.segments.new_notices()[0]


def test_a_model_that_computes_something_else_at_each_call_is_not_replayed():
    """What Python does between operators is recorded as it was once."""
    model = tiny_model("llama")
    calls = SimpleNamespace(count=0)
    own = model.model.layers[1].mlp.forward

    def grown(x: torch.Tensor) -> torch.Tensor:
        calls.count += 1
        return own(x) * calls.count

    model.model.layers[1].mlp.forward = grown
    recorded = Recorded(model)
    assert recorded.segments.prepare(1) is None
    assert recorded.segments.why_never == "a replayed step differs from the model's own"


def test_an_interrupted_recording_is_begun_anew():
    model = tiny_model("llama")
    recorded = Recorded(model)
    mlp, own = model.model.layers[1].mlp, model.model.layers[1].mlp.forward
    calls = SimpleNamespace(count=0)

    def interrupt(x: torch.Tensor) -> torch.Tensor:
        calls.count += 1
        if calls.count == 3:  # after warming up and the model's own step: while it is recorded
            raise KeyboardInterrupt
        return own(x)

    mlp.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        recorded.segments.prepare(1)
    assert recorded.captures == 3
    assert recorded.segments.prepare(1) is not None
    assert recorded.segments.new_notices() == []


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


# CUDA


class Driver:
    """Stands for torch.cuda: notes what is asked of it."""

    def __init__(self, monkeypatch):
        self.done: list[object] = []
        self.pools = 0
        driver = self

        class Graph:
            refuses = False

            def capture_begin(self, pool, capture_error_mode):
                driver.done.append(("begin", pool, capture_error_mode))

            def capture_end(self):
                driver.done.append("end")
                if Graph.refuses:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        class Stream:
            def __init__(self, device):
                self.device = device

            def wait_stream(self, other):
                driver.done.append(("waits", self is driver.current, other is driver.current))

        self.graph, self.current = Graph, Stream("cuda")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        monkeypatch.setattr(graphs, "_broken", [])

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    @contextmanager
    def on(self, stream):
        self.done.append("enter")
        yield
        self.done.append("leave")


@pytest.fixture
def driver(monkeypatch):
    return Driver(monkeypatch)


def test_cuda_captures_on_a_stream_that_both_sides_wait_for(driver):
    executor = graphs.executor_of(torch.device("cuda"))()
    with executor.recording():
        executor.begin()
        executor.end()
        executor.begin()
        executor.end()
    piece = [("begin", 1, "thread_local"), "end"]
    own_waits, current_waits = ("waits", False, True), ("waits", True, False)
    assert driver.done == [own_waits, "enter", *piece, *piece, "leave", current_waits]


def test_a_pool_of_which_no_graph_is_left_is_not_used_again(driver):
    executor = graphs.CudaGraphs(torch.device("cuda"))

    def interrupted() -> None:
        with executor.recording():
            executor.begin()
            assert executor.abandon()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with executor.recording():
        executor.begin()
    assert [pool for name, pool, *_ in (e for e in driver.done if e[0] == "begin")] == [1, 2]
    assert driver.done[-1][0] == "waits"


def test_nothing_is_captured_after_a_capture_that_cuda_has_refused(driver):
    model = tiny_model("llama")
    driver.graph.refuses = True
    first = Segments(model, graphs.executor_of(torch.device("cuda")))
    assert first.prepare(1) is None
    assert "previous error during capture" in first.why_never
    begun = driver.done.count(("begin", 1, "thread_local"))
    second = Segments(model, graphs.executor_of(torch.device("cuda")))
    assert second.prepare(1) is None
    assert second.why_never == "an earlier capture has failed"
    assert driver.done.count(("begin", 1, "thread_local")) == begun == 1
    assert len(graphs._broken) == 1  # torch's allocator still knows it


def test_an_error_of_cuda_in_the_middle_of_a_capture_is_told_by_its_own_words(driver):
    model = tiny_model("llama")
    calls = SimpleNamespace(count=0)

    def fail(*_) -> None:
        calls.count += 1
        if calls.count == 3:  # after warming up and the model's own step
            driver.graph.refuses = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    model.model.layers[0].mlp.register_forward_pre_hook(fail)
    found = Segments(model, graphs.executor_of(torch.device("cuda")))
    assert found.prepare(1) is None
    assert found.why_never == "CUDA error: operation not permitted when stream is capturing"


def test_a_cpu_has_nothing_to_record():
    assert graphs.executor_of(torch.device("cpu")) is None


def test_asking_first_leaves_what_may_be_recorded_alone():
    with graphs.NoHostReads():
        x = torch.ones(3).to(torch.bfloat16) * torch.tensor(2.0)
        with pytest.raises(CaptureRefused, match="reads a result on the host"):
            bool(x.any())
