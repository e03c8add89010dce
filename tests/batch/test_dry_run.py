"""Figures of a dry run: what is shared, what fits, how long it takes; and that prompts' times add up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from magicpig_cli.batch.check import check
from magicpig_cli.batch.dry_run import DryRun
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import Plan, plan, predict
from magicpig_cli.planner.prompts import PromptTimes
from tests.conftest import STEADY_SPEEDS
from tests.tiny import tiny_config

GIB = 1 << 30


@pytest.fixture(scope="module")
def measured() -> Plan:
    """A plan of the tiny model on a machine whose speeds are known."""
    machine = Hardware(
        cpu_model="test", isa="portable", tiers=("portable",), cores_physical=1, cores_usable=1, threads=1,
        numa_nodes=1, memory_total=8 * GIB, memory_free=8 * GIB, memory_limit=None, process_bytes=0,
        speeds=STEADY_SPEEDS,
    )  # fmt: skip
    exact = Settings(attention=AttentionOptions("exact"))
    return replace(plan(machine, shape_from_config(tiny_config("llama")), exact), context=4000, chunk=64)


@pytest.fixture
def dry(source, maker):
    def make(chosen: Plan, *lines, batch_size: int = 2, share: bool = True) -> DryRun:
        made = replace(maker(raw=True), plan=chosen, longest=chosen.context)
        return DryRun.of(check(source(*lines), made, lambda *_: None, share=share), chosen, batch_size)

    return make


LINES = [{"prompt": "d" * 640 + str(n), "max_tokens": 101} for n in range(4)] + [{"prompt": "alone", "max_tokens": 1}]


def test_duration_is_reading_plus_steps(dry, measured):
    found = dry(measured, *LINES)
    times = PromptTimes.of(measured)
    assert (found.prefixes, found.saved_tokens, found.together) == (1, 3 * 640, 2)
    read = times.seconds(0, 640) + 4 * times.seconds(640, 641) + times.seconds(0, 5)
    assert found.duration.prefill_s == pytest.approx(read)
    step = predict(measured, round((641 + 742) / 2), 2).ms_per_token / 1e3
    assert found.duration.decode_s == pytest.approx(4 * 100 / 2 * step)  # the last line has its token from its prompt
    assert found.duration.total_s == pytest.approx(found.duration.prefill_s + found.duration.decode_s)
    apart = dry(measured, *LINES, share=False)
    assert apart.duration.prefill_s > 3 * found.duration.prefill_s
    assert apart.duration.decode_s == found.duration.decode_s


def test_what_memory_has_room_for(dry, measured):
    typical, longest = measured.sequence_bytes(742), measured.sequence_bytes(3600)
    assert longest > typical
    lines = [*LINES, {"prompt": "x" * 3500, "max_tokens": 100}]
    found = dry(replace(measured, budget_bytes=3 * longest), *lines, batch_size=64)
    assert (found.longest.tokens, found.longest.sequences) == (3600, 3)
    assert (found.typical.tokens, found.typical.sequences) == (742, 3 * longest // typical)
    assert found.together == min(64, found.typical.sequences)


def test_a_machine_that_was_not_measured_says_so(dry, measured):
    unknown = dry(replace(measured, speeds=None), *LINES).report()["predicted"]
    assert unknown == {
        "prefill_s": None, "decode_s": None, "total_s": None, "decoded_together": 2,
        "missing": ["this machine was not measured"],
    }  # fmt: skip


def test_nothing_to_run(dry, measured):
    report = dry(measured, {"prompt": 1}).report()
    assert (report["predicted"]["total_s"], report["predicted"]["prefill_s"]) == (0, 0)
    assert report["fits"]["longest"]["tokens"] == 0
    assert json.loads(json.dumps(report)) == report


def test_reading_in_two_parts_takes_as_long_as_at_once(measured):
    """A shared prefix moves work, it adds none: parts meet at chunks."""
    for wanted in (measured, replace(measured, mode="lsh")):
        times = PromptTimes.of(wanted)
        for start, tokens in ((64, 65), (640, 2000), (1984, 3999)):
            assert times.seconds(0, start) + times.seconds(start, tokens) == pytest.approx(times.seconds(0, tokens))
        assert times.seconds(0, 4000) > 2 * times.seconds(0, 2000)
        assert times.seconds(640, 640) == 0


def test_prompt_times_follow_what_they_are_made_of(measured):
    def seconds(**changes) -> float:
        return PromptTimes.of(replace(measured, **changes)).seconds(0, 3000)

    usual = seconds()
    assert seconds(mode="lsh") > usual  # tables are built
    assert seconds(weight_type="bfloat16") > usual  # weights are cast for each chunk
    assert seconds(chunk=8) > usual  # weights are read more often
    faster = replace(STEADY_SPEEDS, prompt_multiply_adds_s=2 * STEADY_SPEEDS.prompt_multiply_adds_s)
    assert seconds(speeds=faster) < usual
    windowed = replace(measured.shape, layer_windows=(64,) * measured.shape.layers)
    assert seconds(shape=windowed) < usual
    assert PromptTimes.of(replace(measured, speeds=None)) is None
