"""What launching a step takes: both ways are measured, and nothing of it is left behind."""

from __future__ import annotations

from magicpig_cli.bench.launch import STEPS, launch_ms, measure
from tests.model.recorded import in_segments
from tests.model.test_parity import greedy, make_runner
from tests.tiny import tiny_model


def test_on_a_cpu_there_is_no_figure():
    assert launch_ms(make_runner(tiny_model("llama")), 1) is None


def test_both_ways_are_measured_and_finished():
    model = tiny_model("llama")
    runner = make_runner(model)
    wanted = greedy(runner, [[5, 6, 7]])
    recorded = in_segments(runner)
    waits: list[int] = []
    found = measure(runner, 2, lambda: waits.append(sum(tape.replays for tape in recorded.executors[0].tapes)))
    assert found["eager"] > 0
    assert found["graphs"] > 0
    segments = model.config.num_hidden_layers + 1
    assert (waits[0], waits[-1]) == (segments, segments * (2 + STEPS))  # the first checks what was recorded
    assert greedy(runner, [[5, 6, 7]]) == wanted


def test_what_is_not_recorded_has_no_figure_by_graphs():
    runner = make_runner(tiny_model("llama"))
    assert measure(runner, 1, lambda: None)["graphs"] is None
