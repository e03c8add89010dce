"""What the live view knows after the engine's events: figures equal those of NumPy, and memory stays bounded."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli.events import STAGES, Failed, Finished, PrefillProgress, StepStats, Timing, TokenEvent
from magicpig_cli.ui.live_state import RECENT_STEPS, TIMED_STEPS, LiveState, Setup, Work

LAYERS = ("dense", "sampled", "window", "sampled")


def step(wall_ms: float, batch: int = 1, sampled: dict[int, int] | None = None) -> StepStats:
    """Half of the time in `dense`, a quarter in `attend`; 100 offloaded keys in each layer that samples."""
    stages = dict.fromkeys(STAGES, 0.0) | {"dense": wall_ms / 2, "attend": wall_ms / 4, "other": wall_ms / 4}
    return StepStats(batch, wall_ms, stages, sampled or {}, dict.fromkeys(sampled or {}, 100))


@pytest.fixture
def state() -> LiveState:
    return LiveState(Setup("model", LAYERS, slots=3))


def test_nothing_is_known_before_the_first_event(state):
    assert state.tok_s is None
    assert state.percentiles(50, 99) == []
    assert state.stage_shares() == {}
    assert state.sampled_ratio is None
    assert state.layer_ratios() == [None] * 4
    assert state.reading is None


@pytest.mark.parametrize("count", [1, 2, 7, TIMED_STEPS, TIMED_STEPS + 100])
def test_percentiles_are_those_of_the_last_steps(state, count):
    times = np.random.default_rng(count).exponential(20.0, count)
    for ms in times:
        state.update(step(float(ms)))
    wanted = np.percentile(times[-TIMED_STEPS:], [50, 99])
    assert state.percentiles(50, 99) == pytest.approx(wanted.tolist(), rel=1e-12)
    assert len(state.wall_ms) <= TIMED_STEPS


def test_speed_counts_all_sequences_over_the_recent_steps(state):
    for _ in range(RECENT_STEPS):
        state.update(step(1000.0))
    for _ in range(RECENT_STEPS):
        state.update(step(20.0, batch=3))
    assert state.tok_s == pytest.approx(150.0)
    assert len(state.steps) == RECENT_STEPS


def test_ratios_are_sums_over_the_recent_steps_alone(state):
    for _ in range(RECENT_STEPS):
        state.update(step(20.0, sampled={1: 90, 3: 90}))
    for number in range(RECENT_STEPS):
        state.update(step(20.0, sampled={1: 2 if number % 2 else 4, 3: 10}))
    assert state.layer_ratios() == [None, pytest.approx(0.03), None, pytest.approx(0.10)]
    assert state.sampled_ratio == pytest.approx(0.065)
    for _ in range(RECENT_STEPS):
        state.update(step(20.0))
    assert state.sampled_ratio is None
    assert state.layer_ratios() == [None] * 4


def test_forgetting_leaves_no_trace_in_later_figures(state):
    for _ in range(RECENT_STEPS + 3):
        state.update(step(500.0, sampled={1: 90, 3: 90}))
    state.forget_steps()
    assert state.sampled_ratio is None
    state.update(step(10.0, sampled={1: 5, 3: 5}))
    assert state.sampled_ratio == pytest.approx(0.05)
    assert state.percentiles(99) == [10.0]
    assert state.tok_s == pytest.approx(100.0)


def test_stage_shares_add_up(state):
    state.update(step(10.0))
    state.update(step(30.0))
    shares = state.stage_shares()
    assert list(shares) == list(STAGES)
    assert (shares["dense"], shares["attend"], shares["other"]) == pytest.approx((0.5, 0.25, 0.25))
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_slot_reads_then_answers_then_is_free(state):
    state.update(PrefillProgress("a", 100, 900, 0.0))  # 100 of them are in the cache
    assert state.reading is not None
    assert state.reading.read_tok_s is None
    state.update(PrefillProgress("a", 500, 900, 2.0))
    assert state.reading.read_tok_s == pytest.approx(200.0)
    state.update(PrefillProgress("a", 900, 900, 4.0))
    state.update(TokenEvent("a", 7, "x"))
    assert state.reading is None
    state.update(PrefillProgress("b", 0, 50, 0.0))
    state.update(TokenEvent("a", 8, "y"))
    assert (state.slots["a"].tokens, state.slots["a"].generated) == (902, 2)
    assert state.reading is state.slots["b"]
    state.update(Failed("b", "ModelError", "it would not"))
    state.update(Finished("a", "stop", (7, 8), "xy", "", 900, 100, Timing(4.0, 4.0, (20.0,)), 0, 0, None))
    assert state.slots == {}


def test_time_to_go_counts_only_what_took_time():
    assert Work("answering", 0, 40, elapsed_s=9.0).eta_s is None
    assert Work("answering", 3, 40, elapsed_s=9.0, untimed=3).eta_s is None
    assert Work("answering", 7, 40, elapsed_s=8.0, untimed=3).eta_s == pytest.approx(66.0)
    assert Work("answering", 40, 40, elapsed_s=8.0).eta_s is None
