"""Tuning from end to end on a tiny random model: the choice, what it was held to, and what is used again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from magicpig_cli import profiles
from magicpig_cli.config import DEFAULT_BUDGET
from magicpig_cli.engine.recording import ExactStep
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.errors import MagicpigError
from magicpig_cli.events import Working
from magicpig_cli.hardware import probe
from magicpig_cli.profiles import Match
from magicpig_cli.tuning import report
from magicpig_cli.tuning.budgets import BudgetSearch, signatures_alone
from magicpig_cli.tuning.grid import parse_grid
from magicpig_cli.tuning.search import Goal, Search
from magicpig_cli.tuning.signatures import BUDGETS, SignatureQuality
from magicpig_cli.tuning.text import split_text
from magicpig_cli.tuning.trial import Measured, Notice, Trial, key_of
from magicpig_cli.tuning.tune import Tuned, tune
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
    assert 1 <= len(tuned.budgets) <= 3
    assert tuned.chosen in (tuned.verified[0], tuned.budgets[0])
    assert {tuned.chosen, tuned.other} == {tuned.verified[0], tuned.budgets[0]}
    assert len({candidate.K for candidate in tuned.verified}) == 3
    for candidate in (*tuned.verified, *tuned.budgets):
        measured = tuned.measurement(candidate)
        assert measured.quality.ratio == pytest.approx(candidate.ratio, rel=2 * tolerances.SAMPLED_RATIO)
        assert measured.ms > 0
    for candidate in tuned.verified if tuned.chosen in tuned.verified else tuned.budgets:
        measured = tuned.measurement(candidate)
        calibrated = candidate.error * tuned.calibration
        assert measured.quality.error == pytest.approx(calibrated, rel=tolerances.PREDICTED_ERROR)
    assert tuned.met == (goal.value(tuned.held_out.error, tuned.held_out.ratio) <= goal.target)
    assert set(tuned.held_out_layers) == set(tuned.chosen.sampled_layers)
    assert any(isinstance(event, Working) and "other text" in event.what for event in events)


def test_a_target_out_of_reach_is_said_to_be_missed(engine):
    tuned, _ = run(engine, Goal(error=1e-4, ratio=None))
    assert not tuned.met
    assert not tuned.expected_to_meet
    assert "misses the target (error 0.0001): no pair of the grid and no budget" in "\n".join(
        report.verdict(engine, tuned, None)
    )
    assert tuned.chosen.expected_error == min(c.expected_error for c in (*tuned.verified, *tuned.budgets))


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
    made = []
    original = Trial._measure

    def measure(self, candidate, layers):
        made.append(candidate.words)
        yield from original(self, candidate, layers)
        for layer, quality in self.layers_of(candidate).items():
            self.layers_of(candidate)[layer] = replace(quality, squares=quality.squares * 4 ** len(made))

    monkeypatch.setattr(Trial, "_measure", measure)
    tuned, _ = run(engine, Goal(error=0.2, ratio=None))
    assert len(made) <= 13
    assert all(key_of(candidate) in tuned.measured for candidate in (*tuned.verified, *tuned.budgets))


def test_one_pair_alone(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=6,L=40"))
    assert [c.size for c in tuned.verified] == [(6, 40)]


def test_where_no_tables_fit_signatures_alone_are_tried(engine):
    need = signatures_alone(engine.plan).index_bytes(CONTEXT)
    tuned, events = run(engine, Goal(error=0.2, ratio=None, memory_bytes=need))
    (why,) = (event.text for event in events if isinstance(event, Notice) and "signatures alone" in event.text)
    assert "no pair of the grid fits: K=4 L=20 needs" in why
    assert (tuned.verified, tuned.candidates, tuned.front, tuned.other) == ((), (), (), None)
    assert tuned.chosen == tuned.budgets[0]
    assert tuned.chosen.index_bytes == need
    # The last one that was measured has told what a sampled layer takes beside its work.
    assert any(c.ms == pytest.approx(tuned.measurement(c).ms) for c in tuned.budgets)
    told = "\n".join(report.verdict(engine, tuned, None))
    assert f"tables have no room: {tuned.no_tables}" in told
    assert len(report.table_rows(tuned)) == len(tuned.budgets)
    document = json.loads(json.dumps(report.as_json(engine, tuned, None)))
    assert document["meta"]["no_tables"] == tuned.no_tables
    assert {c["sampler"] for c in document["candidates"]} == {"rabitq"}
    base = profiles.find("cpu")
    made = report.as_profile(engine, tuned, base, probe(), "mine")
    assert (made.sampler, made.tables, made.budget) == ("rabitq", base.tables, tuned.chosen.budget)
    assert made.sources.get("attention.tables") == base.sources.get("attention.tables")


def test_tables_that_sample_every_key_leave_nothing_to_calibrate(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=1,L=1000"))
    assert tuned.verified[0].error == 0.0
    assert tuned.measurement(tuned.verified[0]).quality.error == 0.0
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
    assert set(BUDGETS) <= {c["budget"] for c in signatures}
    by_budget = sorted(signatures, key=lambda c: c["budget"])
    errors = [c["predicted"]["error"] for c in by_budget]
    assert errors == sorted(errors, reverse=True)
    assert [c["measured"] is not None for c in signatures] == [c["verified"] for c in signatures]
    told = "\n".join(report.verdict(engine, tuned, None))
    assert "--attention rabitq --budget" in told
    assert f"-K {tuned.verified[0].K} -L {tuned.verified[0].L} --dense-layers" in told
    assert sum(c["verified"] for c in tables) == 3
    assert document["chosen"]["sampler"] in ("lsh", "rabitq")
    for c in document["candidates"]:
        assert c["sampler"] in ("lsh", "rabitq")
        assert set(c["predicted"]) == {"ratio", "error", "ms", "index_bytes"}
        assert c["measured"] is None or set(c["measured"]) == {"ratio", "error", "ms"}
        assert not c["verified"] or c["measured"] is not None
    assert [layer["layer"] for layer in document["layers"]] == [1, 2]
    rows = report.table_rows(tuned)
    assert len(rows) <= report.ROWS
    assert all(len(row) == len(report.COLUMNS) for row in rows)
    assert [row[1] for row in rows if row[0]] == [tuned.chosen.words]
    assert {c.words for c in (*tuned.verified, *tuned.budgets)} <= {row[1] for row in rows}


def test_what_options_cannot_say_is_told(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None))
    tuned = replace(tuned, chosen=tuned.budgets[0])
    shares = json.loads(json.dumps(report.as_json(engine, tuned, None)))["chosen"]["head_shares"]
    assert shares == {str(layer): list(heads) for layer, heads in tuned.budgets[0].head_shares.items()} != {}
    assert tuned.even_error > 1
    tuned = replace(tuned, even_error=1.43)
    *_, told, command = report.verdict(engine, tuned, None)
    assert "errs about 1.4 times as much (at 2%)" in told
    assert "--save-profile NAME" in told
    assert f"--attention rabitq --budget {tuned.chosen.budget:g} " in command
    saved = "\n".join(report.verdict(engine, tuned, "mine"))
    assert "--save-profile" not in saved
    assert saved.endswith(" --profile mine")
    tables = replace(tuned, chosen=tuned.verified[0])
    assert "to have it: --attention rabitq --profile mine --dense-layers 0" in "\n".join(
        report.verdict(engine, tables, "mine")
    )
    assert json.loads(json.dumps(report.as_json(engine, tables, None)))["chosen"]["head_shares"] is None
    for without in ({"even_error": None}, {"even_error": 1.04}, {"budgets": (), "chosen": tables.chosen}):
        assert "--save-profile" not in "\n".join(report.verdict(engine, replace(tuned, **without), None))


def test_an_even_share_errs_as_much_more_as_is_told(engine, monkeypatch):
    """Of a budget that all heads share evenly, predicted as the other one is."""
    uneven, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=6,L=40"))
    monkeypatch.setattr("magicpig_cli.tuning.tune.head_shares", lambda _: {})
    even, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=6,L=40"))
    assert even.even_error is None
    one, other = (
        next(c.error for c in tuned.predicted_budgets if c.budget == DEFAULT_BUDGET) for tuned in (even, uneven)
    )
    assert uneven.even_error == pytest.approx(one / other)


def test_the_profile_plans_what_was_chosen(engine):
    from magicpig_cli.planner import plan

    tuned, _ = run(engine, Goal(error=0.2, ratio=None))
    machine = probe()
    made = report.as_profile(engine, tuned, profiles.find("cpu"), machine, "mine")
    path = profiles.save(made, "mine")
    found = profiles.load(path)
    assert (found.match.model, found.match.cpu_model) == (engine.model_name, machine.cpu_model)
    assert "tune-kl" in found.sources["attention.tables"]
    planned = plan(machine, engine.shape, engine.settings, found, "", engine.model_name)
    assert planned.auto_sampler == ("lsh" if tuned.chosen in tuned.verified else "rabitq")
    assert planned.dense_layers == tuned.chosen.dense_layers
    assert planned.head_shares == tuned.budgets[0].head_shares
    assert list(planned.head_shares) == [1, 2]
    assert "tune-kl" in found.sources["attention.head_shares"]
    assert (planned.K, planned.L, planned.budget) == (*tuned.verified[0].size, tuned.budgets[0].budget)
    chosen, why = profiles.choose(machine, False, model_name=engine.model_name)
    assert chosen.name == "mine", why


def test_a_profile_keeps_no_shares_of_heads_of_another_model(engine):
    tuned, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=6,L=40"))
    other = replace(
        profiles.find("cpu"), match=Match(model="org/other"), head_shares={1: (1.0,) * engine.shape.heads},
        sources={"attention.head_shares": "measured: elsewhere"},
    )  # fmt: skip
    made = report.as_profile(engine, replace(tuned, budgets=()), other, probe(), "mine")  # no room for signatures
    assert made.match.model == engine.model_name
    assert made.head_shares == {}
    assert "attention.head_shares" not in made.sources


def candidates(engine, goal: Goal, *, tables_error: float, budget_error: float):
    """A trial, and one candidate of each sampler with these measured errors."""
    tuned, _ = run(engine, Goal(error=0.2, ratio=None), parse_grid("K=6,L=40"))
    layers = {1: {0.01: SignatureQuality(1, 100, 0.01, 1)}}
    search = Search(engine.plan, CONTEXT, goal, {}, None)
    trial = Trial(engine, None, search, BudgetSearch(engine.plan, CONTEXT, goal, layers, {}, None))
    tables = replace(tuned.verified[0], expected_error=tables_error, ratio=0.05)
    budget = replace(tuned.budgets[0], expected_error=budget_error, ratio=0.02)
    return trial, tables, budget


@pytest.mark.parametrize(
    ("goal", "errors", "ms", "wanted"),
    [
        (Goal(error=0.1, ratio=None), (0.05, 0.05), (10, 9), "rabitq"),  # faster
        (Goal(error=0.1, ratio=None), (0.05, 0.05), (9, 10), "lsh"),
        (Goal(error=0.1, ratio=None), (0.05, 0.05), (10, 10.1), "rabitq"),  # as fast: the smaller index
        (Goal(error=0.1, ratio=None), (0.05, 0.2), (10, 5), "lsh"),  # only one meets the target
        (Goal(error=0.1, ratio=None), (0.2, 0.05), (5, 10), "rabitq"),
        (Goal(error=0.01, ratio=None), (0.04, 0.05), (10, 5), "lsh"),  # neither: the closer one
        (Goal(error=None, ratio=0.1), (0.05, 0.04), (5, 10), "rabitq"),  # both meet a ratio: the more accurate one
        (Goal(error=None, ratio=0.03), (0.01, 0.04), (5, 10), "rabitq"),
    ],
)
def test_the_better_of_the_two_samplers_is_chosen(engine, goal, errors, ms, wanted):
    trial, tables, budget = candidates(engine, goal, tables_error=errors[0], budget_error=errors[1])
    for candidate, taken in zip((tables, budget), ms, strict=True):
        trial.measured[key_of(candidate)] = Measured(None, taken, ExactStep(20.0, 10.0))
    assert trial.preferred([tables], [budget]) == (tables if wanted == "lsh" else budget)
    assert trial.preferred([tables], []) == tables
