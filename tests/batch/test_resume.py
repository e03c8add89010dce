"""A run goes on with what an earlier one has left: nothing is lost, doubled or paid for twice (CASES 13)."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magicpig_cli.batch.interrupt import Signals
from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.errors import UsageError
from tests.batch.desk import FAILS, GOOD_LINES, LINES, Desk, as_bytes, stopped
from tests.batch.fakes import FakeEngine


def test_a_finished_run_is_not_run_again(desk):
    desk.write(*LINES)
    assert desk.run() == 3
    before, files = desk.result(), [path.read_bytes() for path in (desk.answers, desk.errors)]
    assert desk.run(resume=True) == 3
    assert [path.read_bytes() for path in (desk.answers, desk.errors)] == files
    assert desk.result() == before
    assert desk.loaded == 1
    counts = desk.manifest["counts"]
    assert (counts["total"], counts["ok"], counts["failed"], counts["skipped"]) == (8, 0, 3, 5)
    assert desk.manifest["state"] == "finished"


def test_nothing_to_go_on_with_is_a_normal_run(desk):
    desk.write(*LINES)
    assert desk.run(resume=True) == 3
    assert desk.result() == desk.clean_result()
    desk.answers.write_bytes(b"")
    desk.errors.unlink()
    (desk.directory / "in.out.meta.json").unlink()
    assert desk.run(resume=True) == 3  # an empty file is nothing either
    assert desk.result() == desk.clean_result()


@pytest.mark.parametrize("after", range(1, GOOD_LINES))
@pytest.mark.parametrize("ordered", [False, True])
def test_a_stopped_run_goes_on(desk, after, ordered):
    desk.write(*LINES)
    assert stopped(desk, after, ordered=ordered) == 130
    assert desk.manifest["state"] == "interrupted"
    done = len(desk.answers.read_bytes().splitlines())
    assert desk.run(resume=True, ordered=ordered) == 3
    assert desk.result() == desk.clean_result()
    assert len(desk.engine.finished) == GOOD_LINES - done
    counts = desk.manifest["counts"]
    assert (counts["skipped"], counts["ok"], counts["failed"]) == (done, GOOD_LINES - done, 3)
    assert desk.leftovers() == set()


def in_order(desk: Desk) -> bool:
    """Whether both files are in the order of the input, for lines that have a number or an id of LINES."""
    ids = [line.get("id", f"line-{number}") for number, line in enumerate(LINES, 1)]
    found = [
        [ids.index(json.loads(line)["custom_id"]) for line in path.read_bytes().splitlines()]
        for path in (desk.answers, desk.errors)
    ]
    return found == [sorted(places) for places in found]


@pytest.mark.parametrize("first", [False, True])
def test_order_is_kept_or_restored(desk, first):
    desk.write(*LINES)
    stopped(desk, 3, ordered=first)
    desk.run(resume=True, ordered=True)
    assert in_order(desk)
    assert desk.result() == desk.clean_result()


def test_order_is_restored_where_nothing_is_left_to_run(desk):
    desk.write(*LINES)
    desk.run(batch_size=4)
    assert not in_order(desk)
    desk.run(resume=True, ordered=True)
    assert in_order(desk)
    assert desk.result() == desk.clean_result()


@pytest.mark.parametrize("which", ["answers", "errors"])
def test_a_file_cut_anywhere_in_its_last_two_records(desk, which):
    desk.write(*LINES)
    desk.run()
    path = getattr(desk, which)
    content, wanted = path.read_bytes(), desk.result()
    start = content.rindex(b"\n", 0, content.rindex(b"\n", 0, len(content) - 1)) + 1
    assert content[start:].count(b"\n") == 2
    for cut in range(start, len(content)):
        path.write_bytes(content[:cut])
        desk.engine = FakeEngine(fails=FAILS)
        assert desk.run(resume=True) == 3
        assert desk.result() == wanted
        assert len(desk.engine.pulled) <= 2
        whole = content[:cut].count(b"\n") + content[:cut].endswith(b"}")
        assert whole or cut == start
    assert desk.leftovers() == set()


def test_a_record_that_only_lacks_its_line_end_is_kept(desk):
    desk.write(*LINES)
    desk.run()
    wanted, content = desk.result(), desk.answers.read_bytes()
    desk.answers.write_bytes(content[:-1])
    desk.run(resume=True)
    assert desk.answers.read_bytes() == content
    assert desk.result() == wanted
    assert desk.loaded == 1


@pytest.mark.parametrize(
    "junk", [b"\0" * 4096, b"\xff\xfe", b"{}", b"[]", b"null", b"[" * 100_000, b'{"custom_id": "a"}']
)
def test_what_is_no_record_goes(desk, junk):
    desk.write(*LINES)
    desk.run()
    wanted = desk.result()
    for path in (desk.answers, desk.errors):
        first, rest = path.read_bytes().split(b"\n", 1)
        path.write_bytes(first + b"\n" + junk + b"\n" + rest + junk)
    assert desk.run(resume=True) == 3
    assert desk.result() == wanted
    assert desk.loaded == 1


def test_of_several_records_of_a_line_one_stays_an_answer_rather_than_a_failure(desk):
    desk.write(*LINES)
    desk.run()
    wanted, answers, errors = desk.result(), desk.answers.read_bytes(), desk.errors.read_bytes()
    first = json.loads(answers.splitlines()[0])
    failed = {**first, "response": None, "error": {"code": "request_failed", "message": "once", "line": 1}}
    desk.errors.write_bytes(errors + as_bytes(failed))
    assert desk.run(resume=True) == 3
    assert (desk.answers.read_bytes(), desk.errors.read_bytes()) == (answers, errors)
    for path in (desk.answers, desk.errors):
        path.write_bytes(2 * path.read_bytes())
    assert desk.run(resume=True) == 3
    assert (desk.answers.read_bytes(), desk.errors.read_bytes()) == (answers, errors)
    assert desk.result() == wanted
    assert desk.loaded == 1


# Inputs that change


def edited(lines: list[Any], draw) -> list[Any]:
    """Some lines gone, moved, doubled, new, changed."""
    lines = list(lines)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["insert", "delete", "move", "shuffle", "change"]))
        place = draw(st.integers(0, len(lines)))
        if kind == "insert" or not lines:
            lines.insert(place, draw(ANY_LINE))
        elif kind == "shuffle":
            lines = draw(st.permutations(lines))
        else:
            line = lines.pop(place % len(lines))
            if kind != "delete":
                lines.insert(draw(st.integers(0, len(lines))), line if kind == "move" else draw(ANY_LINE))
    return lines


UNNAMED = st.sampled_from([
    {"prompt": "x"}, {"prompt": "xy"}, {"prompt": "x", "max_tokens": 2}, {"prompt": "x", "seed": 4}, {"prompt": "!"},
    {"prompt": 1}, b"{", {"prompt": "x", "system": "refused with --raw"},
])  # fmt: skip
NAMED = st.builds(lambda line, name: {**line, "id": name} if isinstance(line, dict) else line, UNNAMED,
                  st.sampled_from("abcdef"))  # fmt: skip
ANY_LINE = st.one_of(UNNAMED, UNNAMED, NAMED)


def unique(lines: list[Any]) -> list[Any]:
    """Without the second line of an id, and at least one."""
    seen: set[str] = set()
    kept = []
    for line in lines:
        name = line.get("id") if isinstance(line, dict) else None
        if name is None or name not in seen:
            kept.append(line)
            seen.add(name or "")
    return kept or [{"prompt": "x"}]


def asked(lines: list[Any]) -> Counter[str]:
    """What the engine has to do for them, as far as one line differs from another."""
    good = [
        line for line in lines if isinstance(line, dict) and isinstance(line["prompt"], str) and "system" not in line
    ]
    return Counter(json.dumps(line, sort_keys=True) for line in good)


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_inserted_removed_reordered_doubled_and_changed(desks, data):
    desk = desks()
    desk.engine = FakeEngine(fails=FAILS)
    first = unique(data.draw(st.lists(ANY_LINE, min_size=1, max_size=8)))
    desk.write(*first)
    stopped(desk, data.draw(st.integers(1, 9)), batch_size=data.draw(st.integers(1, 3)))
    finished_all = desk.manifest["state"] == "finished"
    second = unique(edited(first, data.draw))
    desk.write(*second)
    desk.run(resume=True, ordered=data.draw(st.booleans()), batch_size=data.draw(st.integers(1, 3)))
    assert desk.result() == desk.clean_result()
    assert desk.manifest["state"] == "finished"
    counts = desk.manifest["counts"]
    assert counts["ok"] + counts["failed"] + counts["skipped"] == counts["total"] == len(second)
    if finished_all:  # only what is new costs anything
        assert len(desk.engine.pulled) == sum((asked(second) - asked(first)).values())


def test_a_moved_line_takes_its_record_along(desk):
    desk.write({"prompt": "x"}, {"prompt": "y"}, {"prompt": "!"})
    desk.run()
    bodies = {json.loads(line)["id"] for line in desk.answers.read_bytes().splitlines()}
    desk.write({"id": "new", "prompt": 1}, b"", {"prompt": "y"}, {"prompt": "!"}, {"prompt": "x"})
    desk.run(resume=True)
    assert desk.loaded == 1
    assert {json.loads(line)["id"] for line in desk.answers.read_bytes().splitlines()} == bodies
    assert {record["custom_id"]: record["error"] and record["error"]["line"] for record in desk.records()} == {
        "line-3": None, "line-4": 4, "line-5": None, "new": 1,
    }  # fmt: skip
    assert desk.result() == desk.clean_result()


def test_a_document_that_changes_is_a_line_that_changes(desk):
    (desk.directory / "d.txt").write_text("one")
    (desk.directory / "e.txt").write_text("two")
    desk.write({"id": "d", "prompt": "x", "file": "d.txt"}, {"id": "e", "prompt": "x", "file": "e.txt"})
    desk.maker = replace(desk.maker, directory=desk.directory)
    desk.run()
    (desk.directory / "d.txt").write_text("three")
    desk.engine = FakeEngine()
    desk.run(resume=True)
    assert desk.engine.pulled == ["0"]
    lengths = {record["custom_id"]: record["response"]["body"]["usage"]["prompt_tokens"] for record in desk.records()}
    assert lengths == {"d": len("three\n\nx"), "e": len("two\n\nx")}


# Failures


def test_failures_stay_unless_they_are_to_be_retried(desk):
    desk.write(*LINES)
    desk.run()
    desk.engine = FakeEngine()  # nothing fails any more
    assert desk.run(resume=True) == 3
    assert desk.engine.pulled == []
    assert desk.run(resume=True, retry_errors=True) == 3
    assert desk.engine.pulled == ["4"]
    assert desk.result() == desk.clean_result()
    assert [record["custom_id"] for record in desk.records() if record["error"]] == ["bad", "line-7"]


def test_a_retry_that_fails_again_leaves_one_record(desk):
    desk.write(*LINES)
    desk.run()
    wanted = desk.result()
    for _ in range(2):
        assert desk.run(resume=True, retry_errors=True) == 3
        assert desk.result() == wanted


def test_a_bad_line_that_is_corrected_runs(desk):
    desk.write({"id": "a", "prompt": 1}, {"prompt": 2}, {"prompt": "x"})
    assert desk.run() == 3
    desk.write({"id": "a", "prompt": "y"}, {"prompt": 2}, {"prompt": "x"})
    assert desk.run(resume=True) == 3
    assert desk.result() == desk.clean_result()
    desk.write({"id": "a", "prompt": "y"}, {"prompt": "z"}, {"prompt": "x"})
    assert desk.run(resume=True) == 0
    assert desk.result() == desk.clean_result()
    assert not desk.errors.exists()


def test_a_line_that_becomes_bad_loses_its_answer(desk):
    desk.write({"id": "a", "prompt": "y"}, {"prompt": "x"})
    assert desk.run() == 0
    desk.write({"id": "a", "prompt": 1}, {"prompt": "x"})
    assert desk.run(resume=True) == 3
    assert desk.result() == desk.clean_result()
    assert desk.loaded == 1


def test_a_document_that_vanishes_and_comes_back(desk):
    document = desk.directory / "d.txt"
    desk.maker = replace(desk.maker, directory=desk.directory)
    desk.write({"prompt": "x", "file": "d.txt"}, {"prompt": "y"})
    assert desk.run() == 3
    document.write_text("here")
    assert desk.run(resume=True) == 0
    document.unlink()
    assert desk.run(resume=True) == 3
    assert [bool(record["error"]) for record in desk.result()] == [True, False]


def test_what_failed_because_the_input_changed_runs_again(desk, monkeypatch):
    desk.maker = replace(desk.maker, directory=desk.directory)
    document = desk.directory / "d.txt"
    document.write_text("here")
    desk.write({"prompt": "x"}, {"prompt": "y", "file": "d.txt"})
    original = FakeEngine.generate

    def vanishing(engine, requests, batch_size, max_delay_s):
        document.unlink()
        return original(engine, requests, batch_size, max_delay_s)

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "generate", vanishing)
        assert desk.run() == 3
    document.write_text("here")
    assert desk.run(resume=True) == 0


def test_an_answer_stays_though_its_line_would_not_fit_into_memory_now(desk):
    desk.write({"id": "long", "prompt": "x" * 50, "max_tokens": 3}, {"prompt": "y", "max_tokens": 3})
    assert desk.run() == 0
    before, roomy = desk.result(), desk.maker
    desk.maker = replace(roomy, plan=replace(roomy.plan, context=40))
    assert desk.run(resume=True) == 0
    assert desk.result() == before
    assert desk.run(overwrite=True) == 3
    assert [record["error"]["code"] for record in desk.result() if record["error"]] == ["insufficient_memory"]
    desk.maker = roomy
    assert desk.run(resume=True) == 0
    assert desk.result() == before


# Other parameters, other outputs


def changed(**generation: Any) -> Settings:
    return Settings(generation=GenerationOptions(**generation))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (changed(max_tokens=8), changed(max_tokens=16), ["--max-tokens was 8 and is 16"]),
        (changed(), changed(temperature=0.5), ["--temperature was not given and is 0.5"]),
        (changed(seed=1, stop=("x",)), changed(seed=2), ["--stop was [\"x\"] and is []", "--seed was 1 and is 2"]),
        (Settings(), Settings(ModelOptions("other")), ['--model was "demo" and is "other"']),
        (Settings(), Settings(attention=AttentionOptions("lsh", K=9)),
            ['--attention was "auto" and is "lsh"', "-K was not given and is 9"]),
        (Settings(system="a" * 99), Settings(system="b"), ["--system was \"aaaa", "…", 'is "b"']),
        (Settings(), Settings(context=500), ["--context was not given and is 500"]),
    ],
)  # fmt: skip
def test_other_parameters_are_refused_with_both_values(desk, first, second, says):
    desk.write({"prompt": "x"}, {"id": "a", "prompt": "!", "max_tokens": 3})
    desk.run(settings=first)
    before = [path.read_bytes() for path in (desk.answers, desk.errors)], desk.manifest
    with pytest.raises(UsageError) as refused:
        desk.run(settings=second, resume=True)
    for text in says:
        assert text in refused.value.message
    assert "--force" in str(refused.value.hint)
    assert ([path.read_bytes() for path in (desk.answers, desk.errors)], desk.manifest) == before
    desk.run(settings=second, resume=True, force=True)
    with desk.elsewhere("clean") as clean:
        clean.run(settings=second)
        assert clean.result() == desk.result()
    desk.run(settings=second, resume=True)  # they are this output's now


def test_raw_is_a_parameter(desk):
    desk.write({"prompt": "x"})
    desk.run()
    with pytest.raises(UsageError, match="--raw was true and is false"):
        desk.run(resume=True, raw=False)


def test_only_lines_that_a_parameter_decides_run_again(desk):
    desk.write({"id": "own", "prompt": "abc", "max_tokens": 2}, {"id": "given", "prompt": "abcdef"})
    desk.run(settings=changed(max_tokens=3))
    desk.engine = FakeEngine()
    desk.run(settings=changed(max_tokens=5), resume=True, force=True)
    assert desk.engine.pulled == ["1"]


@pytest.mark.parametrize(
    "harmless", [Settings(ModelOptions(offline=True)), Settings(threads=7), Settings(ModelOptions(device="cpu"))]
)
def test_what_decides_nothing_may_change(desk, harmless):
    desk.write({"prompt": "x"})
    desk.run()
    desk.run(settings=harmless, resume=True, ordered=True, batch_size=1, retry_errors=True)
    assert desk.loaded == 1


def test_tables_are_those_of_the_run_before(desk):
    """The planner might choose others, with more memory free."""
    desk.plan = replace(desk.plan, mode="lsh", K=9, L=120, dense_layers=(0, 1))
    desk.write({"prompt": "x"})
    desk.run()
    asked_for = []

    class Prepare:
        def __call__(self, settings, *_):
            asked_for.append(settings.attention)
            return replace(desk.maker, identity="other"), replace(desk.plan, K=10, L=150)

    from magicpig_cli.batch import prepare
    from magicpig_cli.cli import batch as command
    from tests.batch.desk import _DEFAULTS

    desk.patch.setattr(prepare, "without_weights", Prepare())
    options = replace(_DEFAULTS, source=str(desk.directory / "in.jsonl"), resume=True)
    with pytest.raises(UsageError, match="-K was 9 and is 10"):  # where it cannot have them
        command._run(Settings(), options, Signals(), [])
    (attention,) = asked_for
    assert (attention.K, attention.L, attention.dense_layers) == (9, 120, (0, 1))


def test_shares_of_heads_that_were_measured_since_are_refused(desk):
    """`tune-kl` may have written a profile in between, which is picked by itself."""
    desk.plan = replace(desk.plan, mode="rabitq")
    desk.write({"prompt": "x"})
    desk.run()
    heads = desk.plan.shape.heads
    desk.plan = replace(desk.plan, head_shares={1: tuple(0.5 + head % 2 for head in range(heads))})
    with pytest.raises(UsageError, match="head_shares of the profile was not given and is"):
        desk.run(resume=True)
    desk.plan = replace(desk.plan, head_shares={})
    desk.run(resume=True)
    assert desk.loaded == 1


@pytest.mark.parametrize("manifest", [None, b"", b"{}", b"[]", b'{"parameters": 1, "chosen": {}}', b"\xff"])
def test_an_output_of_something_else_is_left_alone(desk, manifest):
    desk.write({"prompt": "x"})
    desk.answers.write_bytes(b'{"custom_id": "line-1"}\n')
    if manifest is not None:
        (desk.directory / "in.out.meta.json").write_bytes(manifest)
    with pytest.raises(UsageError, match=r"in\.out\.meta\.json must say") as refused:
        desk.run(resume=True)
    assert "--overwrite" in str(refused.value.hint)
    assert desk.answers.read_bytes() == b'{"custom_id": "line-1"}\n'
    assert desk.loaded == 0
