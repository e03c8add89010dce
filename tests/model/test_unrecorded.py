"""Steps that cannot be recorded run by the family's own code, and that is said once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from magicpig_cli.model import graphs, segments
from magicpig_cli.model.frequencies import settle
from magicpig_cli.model.graphs import CaptureRefused
from tests.model.fake_graphs import FakeGraphs, Tape
from tests.model.recorded import Recorded, all_equal, in_segments, started, steps
from tests.model.test_parity import greedy, make_runner
from tests.tiny import tiny_model


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


def test_asking_first_leaves_what_may_be_recorded_alone():
    with graphs.NoHostReads():
        x = torch.ones(3).to(torch.bfloat16) * torch.tensor(2.0)
        with pytest.raises(CaptureRefused, match="reads a result on the host"):
            bool(x.any())
