"""Evaluations of a tiny random model: what must hold whatever the model, and that a second run goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicpig_cli.errors import ContextError
from magicpig_cli.evals import report
from magicpig_cli.evals.modes import Mode, modes
from magicpig_cli.evals.run import CONTINUATION, Evaluation
from magicpig_cli.evals.units import open_kept
from tests.evals.conftest import CONTEXT, evaluated, request

MODES = "lsh,topk,oracle"
EVERYTHING = {"tasks": ("niah", "tenkeys", "cwe", "ppl", "kl"), "contexts": (1500,), "samples": 2}


def by_mode(evaluation: Evaluation) -> dict[str, dict]:
    return {unit.mode.label: record for unit, record in evaluation.results()}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_exact_and_all_keys_are_not_off(make_engine, topics, kept, family):
    """gemma2: a soft cap, and layers with a sliding window, which are never sampled."""
    engine = make_engine(family)
    found = by_mode(evaluated(engine, request(engine, topics, "topk,oracle", (1.0,)), kept))
    assert found["exact"]["kl"] == [0.0] * 20
    assert (found["exact"]["layers"], found["exact"]["sampled"]) == ([], 0)
    for name in ("topk 100%", "oracle 100%"):
        assert max(found[name]["kl"]) < 1e-9
        assert found[name]["sampled"] == found[name]["offloaded"] > 0
        assert found[name]["loss"] == pytest.approx(found["exact"]["loss"], abs=1e-4)


def test_sampling_is_off_and_less_so_with_more_keys(engine, topics, kept):
    found = by_mode(evaluated(engine, request(engine, topics, "lsh,topk,oracle", (0.02, 0.3)), kept))
    assert list(found) == ["exact", "lsh", "topk 2%", "topk 30%", "oracle 2%", "oracle 30%"]
    for name, record in found.items():
        if name == "exact":
            continue
        assert sum(record["kl"]) > 0
        assert record["layers"] == [1, 2]  # 0 is dense
        assert len(record["squared_errors"]) == 2  # blocks of 16 of 20 positions
        assert (record["index_bytes_per_token"] is None) == (name != "lsh")
    for name in ("topk", "oracle"):
        assert sum(found[f"{name} 30%"]["kl"]) < sum(found[f"{name} 2%"]["kl"])
    assert found["topk 2%"]["sampled"] / found["topk 2%"]["offloaded"] == pytest.approx(0.02, rel=0.05)
    assert found["lsh"]["index_bytes_per_token"] > 2 * 40  # two bytes per table


def test_one_continuation_serves_perplexity_and_divergence(engine, topics, kept):
    evaluation = Evaluation(engine, request(engine, topics, MODES, tasks=("ppl", "kl")), kept)
    assert [job.task for job in evaluation.jobs] == [CONTINUATION]
    assert evaluation.total == 4


def test_hash_seeds_are_for_modes_that_draw(engine, topics, kept):
    evaluation = evaluated(engine, request(engine, topics, MODES, hash_seeds=3), kept)
    seeds = {}
    for unit, record in evaluation.results():
        seeds.setdefault(unit.mode.name, {})[unit.hash_seed] = record["kl"]
    assert {name: list(found) for name, found in seeds.items()} == {
        "exact": [0], "topk": [0], "lsh": [0, 1, 2], "oracle": [0, 1, 2],
    }  # fmt: skip
    assert seeds["lsh"][0] != seeds["lsh"][1]
    assert seeds["oracle"][0] != seeds["oracle"][1]
    rows = report.rows(evaluation.results(), ("kl",))
    assert [row["mode"] for row in rows if row["metric"] == "kl_mean"] == ["exact", "lsh", "topk", "oracle"]


def test_answers_are_those_of_a_chat_of_its_own(engine, topics, kept):
    """Greedy, token by token after a prefill of the whole prompt at once; ten prompts share a text."""
    evaluation = evaluated(engine, request(engine, topics, "topk", tasks=("tenkeys",), samples=10), kept)
    (_, record), _ = evaluation.results()
    sample = evaluation._sample(evaluation.jobs[0])
    assert len(record["answers"]) == len(record["gold_logprobs"]) == 10
    for prompt, text, gold in zip(sample.prompts, record["answers"], record["gold_logprobs"], strict=True):
        sequence = engine.new_sequence()
        *_, (_, logits) = engine.runner.prefill(sequence, prompt.ids, "exact")
        tokens = [int(logits.argmax())]
        while len(tokens) < prompt.room:
            tokens.append(int(engine.runner.decode([sequence], tokens[-1:], "exact").logits[0].argmax()))
        assert engine.codec.decode(tokens).startswith(text)
        sequence.truncate(len(prompt.ids))
        found = []
        for token, target in zip(prompt.gold[:-1], prompt.gold[1:], strict=True):
            logits = engine.runner.decode([sequence], [token], "exact").logits[0]
            found.append(float(logits.double().log_softmax(dim=-1)[target]))
        assert gold == pytest.approx(sum(found) / len(found), abs=1e-4)


def test_all_keys_answer_as_exact_attention_does(engine, topics, kept):
    evaluation = evaluated(
        engine, request(engine, topics, "topk", (1.0,), tasks=("niah", "vt", "fwe"), contexts=(1500,)), kept
    )
    by_task: dict[str, list] = {}
    for unit, record in evaluation.results():
        by_task.setdefault(unit.task, []).append(record)
    assert list(by_task) == ["niah", "vt", "fwe"]
    for exact, all_keys in by_task.values():
        assert exact["answers"] == all_keys["answers"]
        assert exact["gold_logprobs"] == pytest.approx(all_keys["gold_logprobs"], abs=1e-4)


def test_a_second_run_does_only_what_is_missing(engine, topics, tmp_path, monkeypatch):
    wanted = request(engine, topics, MODES, **EVERYTHING)
    with open_kept(tmp_path / "clean.jsonl") as kept:
        clean = evaluated(engine, wanted, kept).results()
    path = tmp_path / "units.jsonl"
    steps = 0
    while True:  # each time it is ended a little later than what was kept
        with open_kept(path) as kept:
            evaluation = Evaluation(engine, wanted, kept)
            before = evaluation.done
            work = evaluation.run()
            for _ in work:
                steps += 1
                if evaluation.done > before + 1:
                    break
            else:
                break
            work.close()
    assert steps > 20
    assert evaluation.done == evaluation.total == len(clean)
    assert evaluation.results() == clean
    monkeypatch.setattr(engine.runner, "prefill", lambda *_: pytest.fail("it was read again"))
    with open_kept(path) as kept:
        assert evaluated(engine, wanted, kept).results() == clean


def test_other_options_are_other_work(engine, topics, kept):
    evaluated(engine, request(engine, topics, MODES), kept)
    for changes, done in (
        ({}, 4),
        ({"positions": 10}, 0),
        ({"seed": 1}, 4),  # text is read from its beginning
        ({"contexts": (CONTEXT + 1,)}, 0),
        ({"hash_seeds": 2}, 4),
        ({"texts": (replace(topics, content=topics.content + "."),)}, 0),
        ({"modes": tuple(modes(["topk"], [0.05, 0.06]))}, 2),
    ):
        assert Evaluation(engine, replace(request(engine, topics, MODES), **changes), kept).done == done, changes
    other = request(engine, topics, MODES)
    plans = {Mode("lsh"): replace(other.plans[Mode("lsh")], L=41)}
    assert Evaluation(engine, replace(other, plans=plans), kept).done == 3


@pytest.mark.parametrize(
    ("sampler", "changes"),
    [
        ("lsh", {"tail": 0.1}),
        ("rabitq", {"tail": 0.1}),
        ("rabitq", {"bits": 64}),
        ("rabitq", {"budget": 0.06}),
        ("rabitq", {"target_error": 0.1}),
        ("rabitq", {"head_shares": {1: (0.5, 1.5, 1.0, 1.0), 2: (1.0,) * 4}}),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_what_a_profile_says_of_a_sampler_is_other_work(engine, topics, kept, sampler, changes):
    (mode,) = modes([sampler], [0.05])[1:]
    plan = replace(engine.plan, mode=sampler, budget=0.05)
    wanted = request(engine, topics, sampler, plans={mode: plan})
    work = evaluated(engine, wanted, kept)
    assert Evaluation(engine, wanted, kept).done == work.total == 2
    changed = Evaluation(engine, replace(wanted, plans={mode: replace(plan, **changes)}), kept)
    assert changed.done == 1  # exact attention


def test_too_short_contexts_are_refused_before_anything_is_read(engine, topics, kept):
    with pytest.raises(ContextError, match="20 positions need a context of 22 tokens or more, and 21"):
        Evaluation(engine, request(engine, topics, contexts=(21,)), kept).check()
    with pytest.raises(ContextError, match="niah needs a context of"):
        Evaluation(engine, request(engine, topics, tasks=("niah",), contexts=(100,)), kept).check()
    Evaluation(engine, request(engine, topics, contexts=(22,)), kept).check()


def test_short_contexts_are_attended_exactly(engine, topics, kept):
    found = by_mode(evaluated(engine, request(engine, topics, MODES, contexts=(200,)), kept))
    assert all(record["kl"] == [0.0] * 20 for record in found.values())
    rows = report.rows(evaluated(engine, request(engine, topics, MODES, contexts=(200,)), kept).results(), ("kl",))
    assert {row["sampled_ratio"] for row in rows} == {None}
    assert any("nothing was sampled" in note for note in report.notes(rows))
