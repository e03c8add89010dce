"""Tuning from end to end on a tiny random model: the choice, what it was held to, and what is used again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from magicpig_cli import profiles
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.errors import MagicpigError
from magicpig_cli.events import Working
from magicpig_cli.hardware import probe
from magicpig_cli.tuning import report
from magicpig_cli.tuning import tune as tuning
from magicpig_cli.tuning.grid import parse_grid
from magicpig_cli.tuning.search import Goal
from magicpig_cli.tuning.signatures import BUDGETS
from magicpig_cli.tuning.text import split_text
from magicpig_cli.tuning.tune import Notice, Tuned, key_of, tune
from tests import tolerances
from tests.conftest import STEADY_SPEEDS
from tests.tuning.conftest import CONTEXT

GRID = parse_grid("K=4..7,L=20..120:20")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def run(engine, goal: Goal, grid=GRID) -> tuple[Tuned, list]:
    from magicpig_cli.corpus import natural_text

    texts = split_text(engine.codec, natural_text(), "topics", CONTEXT)
    events = []
    work = tune(engine, texts, CONTEXT, goal, grid, STEADY_SPEEDS)
    while True:
        try:
            events.append(next(work))
        except StopIteration as end:
            return end.value, events


@pytest.mark.parametrize("goal", [Goal(error=0.2, ratio=None), Goal(error=None, ratio=0.1)])
def test_the_choice_is_measured_and_held_to_other_text(engine, goal):
    tuned, events = run(engine, goal)
    assert {candidate.size for candidate in tuned.candidates} == set(GRID.sizes)
    assert len(tuned.verified) == 3
    assert tuned.chosen == tuned.verified[0]
    assert len({candidate.K for candidate in tuned.verified}) == 3
    for candidate in tuned.verified:
        measured = tuned.measurement(candidate)
        assert measured.quality.ratio == pytest.approx(candidate.ratio, rel=tolerances.SAMPLED_RATIO)
        calibrated = candidate.error * tuned.calibration
        assert measured.quality.error == pytest.approx(calibrated, rel=tolerances.PREDICTED_ERROR)
        assert measured.ms > 0
    assert tuned.met == (goal.value(tuned.held_out.error, tuned.held_out.ratio) <= goal.target)
    assert set(tuned.held_out_layers) == set(tuned.chosen.sampled_layers)
    assert any(isinstance(event, Working) and "other text" in event.what for event in events)


def test_a_target_out_of_reach_is_said_to_be_missed(engine):
    tuned, _ = run(engine, Goal(error=1e-4, ratio=None))
    assert not tuned.met
    assert not tuned.expected_to_meet
    assert "misses the target (error 0.0001): no pair of the grid" in "\n".join(report.verdict(engine, tuned, None))
    assert tuned.chosen.expected_error == min(c.expected_error for c in tuned.verified)


def test_a_second_run_reads_nothing_and_chooses_the_same(engine, monkeypatch):
    first, events = run(engine, Goal(error=0.2, ratio=None))
    assert sum("kept in" in event.text for event in events if isinstance(event, Notice)) == 2
    monkeypatch.setattr(ModelRunner, "prefill", lambda *_: pytest.fail("the text was read again"))
    again, events = run(engine, Goal(error=0.2, ratio=None))
    assert sum("not again" in event.text for event in events if isinstance(event, Notice)) == 2
    assert {c.size: c.error for c in again.candidates} == {c.size: c.error for c in first.candidates}
    for key in again.measured.keys() & first.measured.keys():
        assert again.measured[key].quality == first.measured[key].quality


def test_measuring_is_bounded(engine, monkeypatch):
    """Even if every measurement says something new about the layers, it ends, with three that were measured."""
    sizes = []
    original = tuning.Trial._measure

    def measure(self, candidate, layers):
        sizes.append(candidate.size)
        yield from original(self, candidate, layers)
        for layer, quality in self.search.measured[candidate.size].items():
            worse = replace(quality, squares=quality.squares * 4 ** len(sizes))
            self.search.measured[candidate.size][layer] = worse

    monkeypatch.setattr(tuning.Trial, "_measure", measure)
    tuned, _ = run(engine, Goal(error=0.2, ratio=None))
    assert len(sizes) <= 10
    assert all(key_of(candidate) in tuned.measured for candidate in tuned.verified)


def test_one_pair_alone(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=6,L=40"))
    assert [c.size for c in tuned.verified] == [(6, 40)]


def test_tables_that_sample_every_key_leave_nothing_to_calibrate(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=1,L=1000"))
    assert (tuned.chosen.error, tuned.held_out.ratio) == (0.0, 1.0)
    assert tuned.calibration == 1.0
    assert tuned.met


@pytest.mark.parametrize(
    ("attention", "goal", "says"),
    [
        ({"dense_layers": (0, 1, 2)}, Goal(error=0.2, ratio=None), "no layer is left to sample: of 3, 0 have"),
        ({}, Goal(error=0.2, ratio=None, memory_bytes=1000), "no pair of the grid fits"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_is_read(make_engine, monkeypatch, attention, goal, says):
    monkeypatch.setattr(ModelRunner, "prefill", lambda *_: pytest.fail("the text was read"))
    with pytest.raises(MagicpigError, match=says) as caught:
        run(make_engine(**attention), goal)
    assert caught.value.hint


def test_documents(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None))
    document = json.loads(json.dumps(report.as_json(engine, tuned, "mine")))
    assert {"model", "context", "target", "met", "calibration", "chosen", "candidates", "held_out"} <= set(document)
    assert {"sampler", "K", "L", "dense_layers", "sink", "local", "predicted", "measured"} <= set(document["chosen"])
    assert set(document["held_out"]) == {"error", "ratio"}
    tables = [c for c in document["candidates"] if c["sampler"] == "lsh"]
    assert len(tables) == len(GRID.sizes)
    signatures = document["candidates"][len(tables) :]
    assert [c["budget"] for c in signatures] == list(BUDGETS)
    assert [c["predicted"]["error"] for c in signatures] == sorted(
        (c["predicted"]["error"] for c in signatures), reverse=True
    )
    assert {c["measured"] for c in signatures} == {None}
    line = report.signature_line(tuned)
    assert "--attention rabitq --budget" in line
    assert line in report.verdict(engine, tuned, None)
    assert sum(c["verified"] for c in document["candidates"]) == 3
    for c in document["candidates"]:
        assert c["sampler"] in ("lsh", "rabitq")
        assert set(c["predicted"]) == {"ratio", "error", "ms", "index_bytes"}
        assert c["measured"] is None or set(c["measured"]) == {"ratio", "error", "ms"}
        assert not c["verified"] or c["measured"] is not None
    assert [layer["layer"] for layer in document["layers"]] == [1, 2]
    rows = report.table_rows(tuned)
    assert len(rows) <= report.ROWS
    assert all(len(row) == len(report.COLUMNS) for row in rows)
    assert [row[1:3] for row in rows if row[0]] == [[str(tuned.chosen.K), str(tuned.chosen.L)]]


def test_the_profile_plans_what_was_chosen(engine):
    from magicpig_cli.planner import plan

    tuned, _ = run(engine, Goal(error=0.2, ratio=None))
    machine = probe()
    made = report.as_profile(engine, tuned, profiles.find("cpu"), machine, "mine")
    path = profiles.save(made, "mine")
    found = profiles.load(path)
    assert (found.match.model, found.match.cpu_model) == (engine.model_name, machine.cpu_model)
    assert "tune-kl" in found.sources["attention.tables"]
    planned = plan(machine, engine.shape, engine.settings, found)
    assert (planned.K, planned.L, planned.dense_layers) == (*tuned.chosen.size, tuned.chosen.dense_layers)
    chosen, why = profiles.choose(machine, False, model_name=engine.model_name)
    assert chosen.name == "mine", why
