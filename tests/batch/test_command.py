"""`magicpig batch` on a tiny model: files, exit codes, what is refused before weights are read, signals, pipes."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import magicpig_cli
from magicpig_cli.cli import app
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import Finished, Requeued, WaitingForMemory
from magicpig_cli.model.segments import Segments
from tests.batch.desk import MANY, as_bytes, wait_for_records

GOOD = {"id": "a", "prompt": "Why?"}
SUMMARY_KEYS = [
    "total", "ok", "failed", "skipped", "prompt_tokens", "completion_tokens", "wall_s", "decode_tok_s", "batch_size",
    "peak_rss_bytes",
]  # fmt: skip


@pytest.fixture
def batch(tiny_directory, tmp_path, monkeypatch, capfdbinary):
    """`batch(*arguments, stdin=b"")` in an empty directory; returns code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("MAGICPIG_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str, stdin: bytes = b"") -> SimpleNamespace:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = app.run(["batch", *arguments, "-m", str(tiny_directory), "--threads", "1"])
        out, err = capfdbinary.readouterr()
        return SimpleNamespace(code=code, out=out.decode(), err=err.decode())

    return run


@pytest.fixture
def no_weights(monkeypatch):
    """Loading weights is a failure of the test."""
    monkeypatch.setattr(Engine, "load", lambda *_: pytest.fail("weights were loaded"))


def write(name: str, *lines: Any) -> Path:
    path = Path(name)
    path.write_bytes(as_bytes(*lines))
    return path


def records(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def names() -> set[str]:
    return {path.name for path in Path().iterdir()}


def test_files_beside_the_input(batch):
    Path("sub").mkdir()
    write("sub/in.jsonl", GOOD, {"prompt": 1}, {"prompt": "Who?", "max_tokens": 3})
    done = batch("sub/in.jsonl")
    assert done.code == 3
    assert done.out == ""
    assert {path.name for path in Path("sub").iterdir()} == {
        "in.jsonl", "in.out.jsonl", "in.out.errors.jsonl", "in.out.meta.json",
    }  # fmt: skip
    assert names() == {"sub"}
    answers = {record["custom_id"]: record["response"]["body"]["usage"] for record in records("sub/in.out.jsonl")}
    assert {key: usage["completion_tokens"] for key, usage in answers.items()} == {"a": 6, "line-3": 3}
    assert [record["error"]["line"] for record in records("sub/in.out.errors.jsonl")] == [2]
    assert "warning: line 2: prompt: want a string" in done.err
    assert "3 lines: 2 answered, 1 failed" in done.err


def test_manifest(batch):
    write("in.jsonl", GOOD, {"prompt": 1})
    assert batch("in.jsonl", "-o", "o.jsonl", "--temperature", "0.5", "-K", "4", "-L", "20", "--raw").code == 3
    content = json.loads(Path("o.meta.json").read_text())
    assert (content["version"], content["state"]) == (magicpig_cli.__version__, "finished")
    assert content["counts"] == {
        "total": 2, "ok": 1, "failed": 1, "skipped": 0, "prompt_tokens": 4, "completion_tokens": 6,
    }  # fmt: skip
    assert content["parameters"]["generation"]["temperature"] == 0.5
    assert (content["parameters"]["attention"]["K"], content["parameters"]["raw"]) == (4, True)
    assert len(content["input"]["sha256"]) == 64
    assert set(content["timings"]) == {"check_s", "load_s", "wall_s", "decode_tok_s"}
    assert names() >= {"o.jsonl", "o.errors.jsonl", "o.meta.json"}


def test_summary_object_is_the_last_line_of_stdout(batch):
    write("in.jsonl", GOOD, {"prompt": "x"})
    done = batch("in.jsonl", "--json", "-q", "--batch-size", "2")
    assert (done.code, done.err) == (0, "")
    summary = json.loads(done.out)
    assert list(summary) == SUMMARY_KEYS
    assert (summary["total"], summary["ok"], summary["failed"], summary["skipped"]) == (2, 2, 0, 0)
    assert (summary["completion_tokens"], summary["batch_size"]) == (12, 2)
    assert summary["decode_tok_s"] > 0
    assert summary["peak_rss_bytes"] > 1 << 20
    assert "in.out.errors.jsonl" not in names()


def test_a_finished_run_whose_summary_nobody_reads_is_finished(batch, monkeypatch):
    write("in.jsonl", GOOD)
    read, unread = os.pipe()
    os.close(read)
    with monkeypatch.context() as patched, suppress(BrokenPipeError), os.fdopen(unread, "w") as stream:
        patched.setattr(sys, "stdout", stream)
        done = batch("in.jsonl", "--json", "-q")
    assert (done.code, done.err) == (141, "")
    assert json.loads(Path("in.out.meta.json").read_text())["state"] == "finished"


def test_stdin_to_stdout(batch):
    stdin = b"\xef\xbb\xbf" + as_bytes({"prompt": 1}, GOOD).replace(b"\n", b"\r\n") + b"\r\n"
    done = batch("-", stdin=stdin)
    assert done.code == 3
    failed, answered = map(json.loads, done.out.splitlines())
    assert (failed["custom_id"], failed["error"]["line"]) == ("line-1", 1)
    assert answered["custom_id"] == "a"
    assert names() == set()


def test_ordered_holds_for_failures_in_the_same_stream(batch):
    lines = ({"id": "long", "prompt": "x", "max_tokens": 9}, {"id": "bad"}, {"id": "short", "prompt": "x"})
    done = batch("-", "--ordered", "--json", "--batch-size", "3", stdin=as_bytes(*lines))
    *found, summary = map(json.loads, done.out.splitlines())
    assert [record["custom_id"] for record in found] == ["long", "bad", "short"]
    assert list(summary) == SUMMARY_KEYS


def test_an_answer_does_not_depend_on_order_neighbours_or_batch_size(batch):
    lines = [{"id": str(n), "prompt": "Why? " * (1 + n * 5), "temperature": 1.0} for n in range(5)]
    parity = ("--dtype", "float32", "--kv-dtype", "float32", "-q")
    found = []
    for order, extra in ((lines, "1"), (lines[::-1], "3"), (lines, "5")):
        done = batch("-", "--batch-size", extra, *parity, stdin=as_bytes(*order))
        answers = map(json.loads, done.out.splitlines())
        found.append({answer["custom_id"]: answer["response"]["body"]["choices"] for answer in answers})
    assert len(found[0]) == 5
    assert found[0] == found[1] == found[2]
    other = batch("-", "--seed", "1", *parity, stdin=as_bytes(*lines))
    assert {json.dumps(json.loads(line)["response"]["body"]["choices"]) for line in other.out.splitlines()}.isdisjoint(
        json.dumps(choices) for choices in found[0].values()
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (["none.jsonl"], b"", 2, "no file none.jsonl"),
        (["."], b"", 2, "directory"),
        (["-"], b"\n \r\n", 2, "no lines"),
        (["-"], as_bytes(GOOD, GOOD), 2, "lines 1 and 2 both have the id 'a'"),
        (["in.jsonl", "-o", "in.jsonl", "--overwrite"], b"", 2, "is the input"),
        (["in.jsonl", "-o", "old.jsonl"], b"", 2, "old.jsonl exists"),
        (["in.jsonl", "-o", "none/o.jsonl"], b"", 2, "no directory none"),
        (["in.jsonl", "-o", "."], b"", 2, "directory"),
        (["in.jsonl", "-o", "/dev/null"], b"", 2, "no regular file"),
        (["in.jsonl", "--batch-size", "0"], b"", 2, "--batch-size 0"),
        (["in.jsonl", "--batch-size", "some"], b"", 2, "--batch-size some"),
        (["in.jsonl", "-c", "9k"], b"", 1, "9,216"),
        (["in.jsonl", "--dense-layers", "7"], b"", 2, "layer 7"),
        (["-", "--strict"], as_bytes(GOOD, {"prompt": 1}, b"{"), 1, "2 of 3 lines are bad; line 2: prompt"),
        ([], b"", 2, "INPUT.jsonl"),
        (["in.jsonl", "--resume", "--overwrite"], b"", 2, "--resume keeps the output and --overwrite replaces it"),
        (["in.jsonl", "--retry-errors"], b"", 2, "--retry-errors"),
        (["in.jsonl", "--force"], b"", 2, "--force"),
        (["in.jsonl", "--resume", "-o", "-"], b"", 2, "--resume needs a file"),
        (["-", "--resume"], b"", 2, "--resume needs a file"),
        (["in.jsonl", "--resume", "-o", "old.jsonl"], b"", 2, "old.meta.json must say with what"),
    ],
)
def test_refused_before_weights_are_read(batch, no_weights, arguments, stdin, code, says):
    write("in.jsonl", GOOD)
    write("old.jsonl", "precious")
    done = batch(*arguments, "-q", stdin=stdin)
    assert (done.code, done.out) == (code, "")
    error, hint = done.err.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert hint.startswith("hint: ")
    assert names() == {"in.jsonl", "old.jsonl"}
    assert Path("old.jsonl").read_bytes() == as_bytes("precious")


def test_only_bad_lines_need_no_weights(batch, no_weights):
    write("in.jsonl", {"prompt": 1}, b"{")
    assert batch("in.jsonl").code == 3
    assert Path("in.out.jsonl").read_bytes() == b""
    assert len(records("in.out.errors.jsonl")) == 2


def test_overwrite_leaves_nothing_of_the_run_before(batch):
    write("in.jsonl", GOOD, {"prompt": 1})
    assert batch("in.jsonl").code == 3
    write("in.jsonl", {"id": "b", "prompt": "x"})
    assert batch("in.jsonl").code == 2
    assert batch("in.jsonl", "--overwrite").code == 0
    assert [record["custom_id"] for record in records("in.out.jsonl")] == ["b"]
    assert names() == {"in.jsonl", "in.out.jsonl", "in.out.meta.json"}


def test_an_old_output_survives_a_run_that_never_begins(batch, no_weights):
    write("in.jsonl", {"prompt": 1})
    write("o.jsonl", "precious")
    assert batch("in.jsonl", "-o", "o.jsonl", "--overwrite", "--strict").code == 1
    assert Path("o.jsonl").read_bytes() == as_bytes("precious")


def test_dry_run(batch, no_weights):
    write("in.jsonl", GOOD, {"prompt": "x" * 300, "max_tokens": 10})
    done = batch("in.jsonl", "--dry-run", "--batch-size", "2")
    assert done.code == 0
    assert "2 lines: 2 good, 0 bad" in done.out
    assert "memory: " in done.out
    assert "batch size 2" in done.out
    assert "no shared prefixes" in done.out
    assert "memory has room for " in done.out
    assert "duration: about " in done.out
    assert "every answer at its longest" in done.out
    assert [line.split()[:3] for line in done.out.splitlines() if line.lstrip().startswith("≤")] == [
        ["≤", "64", "1"], ["≤", "128", "0"], ["≤", "256", "0"], ["≤", "512", "1"],
    ]  # fmt: skip
    assert names() == {"in.jsonl"}
    report = json.loads(batch("in.jsonl", "--dry-run", "--json", "--raw").out)
    assert (report["total"], report["ok"], report["prompt_tokens"]) == (2, 2, 304)
    assert report["sequence_tokens"] == 4 + 6 + 300 + 10  # the model's own answer length where the line has none
    assert report["histogram"][0] == {"up_to": 64, "lines": 1}
    assert len(report["plan"]) >= 4
    assert (report["shared_prefixes"], report["saved_prompt_tokens"]) == (0, 0)
    assert report["fits"]["longest"]["tokens"] == 310
    assert report["predicted"]["total_s"] == report["predicted"]["prefill_s"] + report["predicted"]["decode_s"] > 0


def test_dry_run_of_lines_that_share(batch, no_weights):
    Path("d.txt").write_text("All about ferries. " * 100)
    write("in.jsonl", *({"prompt": f"Question {n}?", "file": "d.txt"} for n in range(3)))
    report = json.loads(batch("in.jsonl", "--dry-run", "--json").out)
    assert report["shared_prefixes"] == 1
    apart = json.loads(batch("in.jsonl", "--dry-run", "--json", "--no-prefix-sharing").out)
    assert (apart["shared_prefixes"], apart["saved_prompt_tokens"]) == (0, 0)
    assert apart["prompt_tokens"] == report["prompt_tokens"]
    assert apart["predicted"]["prefill_s"] > 1.5 * report["predicted"]["prefill_s"]
    assert "read by itself, as asked" in batch("in.jsonl", "--dry-run", "--no-prefix-sharing").out
    page = batch("in.jsonl", "--dry-run").out
    assert f"1 shared prefix: {report['saved_prompt_tokens']:,} prompt tokens need not be read again" in page


def test_a_batch_size_of_no_use_is_said(batch, no_weights):
    write("in.jsonl", GOOD, {"prompt": "x"})
    assert (
        "--batch-size 64 is more than the 2 lines to answer" in batch("in.jsonl", "--dry-run", "--batch-size", "64").err
    )
    assert "--batch-size" not in batch("in.jsonl", "--dry-run", "--batch-size", "2").err
    assert batch("in.jsonl", "--dry-run", "--batch-size", "64", "-q").err == ""


def test_dry_run_of_bad_lines(batch, no_weights):
    write("in.jsonl", GOOD, {"prompt": 1})
    done = batch("in.jsonl", "--dry-run")
    assert done.code == 3
    assert "warning: line 2" in done.err
    assert batch("in.jsonl", "--dry-run", "--strict").code == 1


def test_notices(batch, no_weights):
    bad = [{"prompt": 1}] * 12
    write("in.jsonl", {"prompt": "x", "model": "[/other]", "max_token": 5}, *bad)
    done = batch("in.jsonl", "--dry-run")
    assert "lines name the model [/other]" in done.err
    assert "ignored keys: max_token\n" in done.err
    assert done.err.count("warning: line ") == 10
    assert "2 more lines are bad" in done.err
    assert batch("in.jsonl", "--dry-run", "-q").err == ""


def test_system_text_and_documents(batch, no_weights):
    Path("sub").mkdir()
    Path("sub/doc.txt").write_text("Facts." * 20)
    Path("secret.txt").write_text("secret")
    write("sub/in.jsonl", {"prompt": "x", "file": "doc.txt"}, {"prompt": "x", "file": "../secret.txt"})
    done = batch("sub/in.jsonl", "--dry-run", "--json")
    report = json.loads(done.out)
    assert (report["ok"], report["failed"]) == (1, 1)
    assert report["prompt_tokens"] > 120
    assert "outside" in done.err
    longer = json.loads(batch("sub/in.jsonl", "--dry-run", "--json", "--allow-outside-files", "-s", "Be brief.").out)
    assert longer["ok"] == 2
    assert longer["prompt_tokens"] > 2 * report["prompt_tokens"] - 120
    assert "--raw has no place" in batch("sub/in.jsonl", "--dry-run", "--raw", "-s", "Be brief.").err


def test_a_model_that_breaks_says_how_far_it_came(batch, monkeypatch):
    write("in.jsonl", GOOD, {"id": "b", "prompt": "x", "max_tokens": 2}, {"prompt": 1})
    generate = Engine.generate

    def breaks(engine, requests, batch_size, max_delay_s):
        for event in generate(engine, requests, batch_size, max_delay_s):
            yield event
            if isinstance(event, Finished):
                raise RuntimeError("the device is gone [/x]")

    monkeypatch.setattr(Engine, "generate", breaks)
    done = batch("in.jsonl")
    assert done.code == 1
    assert "2 of 3 lines are done; the answers are in in.out.jsonl\n" in done.err
    assert "error: RuntimeError: the device is gone [/x]\n" in done.err
    assert [record["custom_id"] for record in records("in.out.jsonl")] == ["b"]
    assert json.loads(Path("in.out.meta.json").read_text())["state"] == "failed"


def test_interrupted_while_loading_writes_nothing(batch, monkeypatch):
    write("in.jsonl", GOOD, {"prompt": 1})

    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Engine, "load", interrupted)
    done = batch("in.jsonl")
    assert done.code == 130
    assert "interrupted: 0 of 2 lines are done\nto go on: " in done.err
    assert done.err.rstrip().endswith(" --resume")
    assert names() == {"in.jsonl"}
    write("in.out.jsonl", "precious")
    done = batch("in.jsonl", "--overwrite")
    assert "--overwrite" in done.err  # nothing is replaced yet
    assert "--resume" not in done.err
    assert Path("in.out.jsonl").read_bytes() == as_bytes("precious")


def test_killed_and_a_second_writer(process, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*MANY))
    first = process("in.jsonl")
    answers = tmp_path / "in.out.jsonl"
    wait_for_records(answers, 2, first)
    second = process("in.jsonl", "--overwrite")
    _, err = second.communicate(timeout=60)
    assert second.returncode == 1
    assert f"process {first.pid} is writing the same output" in err
    first.kill()
    first.wait()
    lines = answers.read_bytes().split(b"\n")
    assert all(json.loads(line)["error"] is None for line in lines[:-1])
    assert lines[-1] == b""
    (tmp_path / "in.jsonl").write_bytes(as_bytes(GOOD))
    third = process("in.jsonl", "--overwrite")
    third.communicate(timeout=60)
    assert third.returncode == 0
    assert [record["custom_id"] for record in records(answers)] == ["a"]


def test_a_reader_that_has_seen_enough(process, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*MANY))
    running = process("in.jsonl", "-o", "-", "-q")
    assert running.stdout is not None
    assert json.loads(running.stdout.readline())["error"] is None
    running.stdout.close()
    assert running.stderr is not None
    assert running.stderr.read() == ""
    assert running.wait(timeout=60) == 141


def test_what_memory_does_is_said_once(batch, monkeypatch):
    write("in.jsonl", GOOD, {"id": "b", "prompt": "x", "max_tokens": 2})
    generate, delays = Engine.generate, []

    def short(engine, requests, batch_size, max_delay_s):
        delays.append(max_delay_s)
        yield Requeued("0", 3)
        yield WaitingForMemory("0", 3 << 30, 1 << 30)
        yield WaitingForMemory("0", 3 << 30, 1 << 30)
        yield from generate(engine, requests, batch_size, max_delay_s)

    monkeypatch.setattr(Engine, "generate", short)
    done = batch("in.jsonl", "--max-delay", "0.25")
    assert done.code == 0
    assert delays == [0.25]
    assert done.err.count("warning: memory ran out: going on with 3 sequences together") == 1
    assert done.err.count("waiting for memory: the next line needs 3.0 GiB, and other programs leave 1.0 GiB") == 1


@pytest.mark.parametrize(("options", "times"), [((), 1), (("-q",), 0)])
def test_steps_without_cuda_graphs_are_said_once(batch, monkeypatch, options, times):
    write("in.jsonl", GOOD)
    notice = "decode steps of 1 run without CUDA graphs, which is slower: CUDA out of memory."
    monkeypatch.setattr(Segments, "new_notices", lambda _: [notice])
    done = batch("in.jsonl", *options)
    assert done.code == 0
    assert done.err.count(notice) == times
