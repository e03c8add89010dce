"""`magicpig eval` as a user runs it: wrong options, a whole run on a tiny model, Ctrl-C, kills, a second run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest

from magicpig_cli.cli import app
from magicpig_cli.cli.eval import _Target
from magicpig_cli.ui import eval as page
from tests import warm
from tests.conftest import keep_steady_speeds

WORK = ("--tasks", "niah,kl", "-c", "1500", "--samples", "2", "--positions", "16", "-t", "1", "--hash-seeds", "2")


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    """An environment with directories of its own."""
    keep_steady_speeds(tmp_path / "cache")
    return {
        **os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data"),
        "NO_COLOR": "1",
    }  # fmt: skip


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "magicpig_cli", "eval", *arguments]


def magicpig_eval(home: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("eval", *arguments, env=home)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tasks", "nia"], "--tasks nia is unknown"),
        (["--tasks", ","], "--tasks names nothing"),
        (["--attention", "auto"], "--attention auto is unknown here"),
        (["--attention", "magic"], "--attention magic is unknown here"),
        (["--attention", ""], "--attention names nothing"),
        (["--budget", "x"], "--budget x is not a number"),
        (["--budget", "0"], "--budget 0 is not a share between 0 and 1"),
        (["--budget", "0.02,1.5"], "--budget 1.5 is not a share between 0 and 1"),
        (["--budget", "nan"], "--budget nan is not a share between 0 and 1"),
        (["-c", "4q"], "'4q' is not a number of tokens"),
        (["-c", "0"], "a context of 0 tokens"),
        (["--samples", "0"], "--samples"),
        (["--hash-seeds", "0"], "--hash-seeds"),
        (["--text", "/nowhere/a.txt"], "cannot read /nowhere/a.txt: No such file"),
        (["--output", "eval.txt"], "--output eval.txt does not end in .json, .csv, .md"),
        (["--output", "/no/such/place/eval.json"], "cannot write /no/such/place/eval.json"),
        (["--plot", "eval.txt"], "--plot eval.txt does not end in .png"),
        (["--plot", "-"], "--plot - is no file"),
        (["--plot", "eval.png", "--tasks", "niah"], "--plot draws what the task kl measures"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(monkeypatch, capsys, tmp_path, arguments, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("magicpig_cli.ui.loading.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    assert app.run(["eval", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert says in printed.err
    assert "hint: " in printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-c", "100", "--tasks", "niah"], "niah needs a context of"),
        (["-c", "100", "--tasks", "kl"], "128 positions need a context of 130 tokens"),
        (["-c", "1k,9k"], "9,216 tokens was asked for, but this model was made for 8,192"),
    ],
)
def test_contexts_that_are_too_short_or_too_long(tiny_directory, monkeypatch, tmp_path, capsys, arguments, says):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert app.run(["eval", "-m", str(tiny_directory), *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert "hint: " in printed.err


def test_a_run_its_files_and_a_second_run(tiny_directory, home, tmp_path):
    out, plot = tmp_path / "eval.json", tmp_path / "eval.svg"
    arguments = (*WORK, "-m", str(tiny_directory), "--text", "stdlib", "--budget", "0.02,0.1")
    first = magicpig_eval(home, *arguments, "--json", "-o", str(out), "--plot", str(plot))
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("\n") == 1
    assert "\x1b" not in first.stderr
    document = json.loads(first.stdout)
    assert json.loads(out.read_text()) == document
    assert plot.read_bytes().startswith(b"<?xml")
    assert set(document) == {"meta", "results"}
    assert document["meta"]["texts"][0]["name"] == "stdlib"
    keys = {"task", "text", "context", "mode", "metric", "value", "ci95", "n", "sampled_ratio", "index_bytes_per_token"}
    assert all(keys <= set(row) for row in document["results"])
    found = {(row["task"], row["metric"], row["mode"], row["budget"]): row for row in document["results"]}
    assert found["kl", "kl_mean", "exact", None]["value"] == 0
    assert found["kl", "kl_mean", "lsh", None]["index_bytes_per_token"] > 0
    assert found["kl", "kl_mean", "topk", 0.1]["sampled_ratio"] == pytest.approx(0.1, rel=0.05)
    assert found["niah", "accuracy", "oracle", 0.02]["n"] == 2
    low, high = found["niah", "accuracy", "exact", None]["ci95"]
    assert 0 <= low < high <= 1

    units = tmp_path / "eval.units.jsonl"
    kept = units.read_bytes()
    second = magicpig_eval(home, *arguments, "-o", str(out))
    assert second.returncode == 0, second.stderr
    assert f"39 of 39 measurements are in {units} already" in second.stderr
    assert units.read_bytes() == kept
    lines = second.stdout.splitlines()
    assert lines[0].split()[:5] == ["task", "text", "context", "mode", "accuracy"]
    assert any(line.startswith("stdlib") and "*oracle 10%" in line for line in lines)
    assert "no fast path" in lines[-1]
    assert all(line == line.rstrip() for line in lines)
    assert json.loads(out.read_text())["results"] == document["results"]


def test_files_are_written_though_nobody_reads_the_table(tmp_path, monkeypatch):
    def print_tables(_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(page, "print_tables", print_tables)
    with pytest.raises(BrokenPipeError):
        _Target(tmp_path / "eval.json", None, as_json=False, quiet=True).deliver({}, [])
    assert json.loads((tmp_path / "eval.json").read_text()) == {"meta": {}, "results": []}


def test_a_killed_run_goes_on(tiny_directory, home, tmp_path):
    arguments = (*WORK, "-m", str(tiny_directory), "--json")
    clean = magicpig_eval(home, *arguments, "-o", str(tmp_path / "clean.json"))
    assert clean.returncode == 0, clean.stderr
    units = tmp_path / "killed.units.jsonl"
    arguments = (*arguments, "-o", str(tmp_path / "killed.json"))
    for least in (1, 3):
        running = warm.Program("eval", *arguments, env=home)
        _wait_for(lambda least=least: units.exists() and units.read_bytes().count(b"\n") >= least)
        running.kill()
        running.communicate()
    assert not (tmp_path / "killed.json").exists()
    before = units.read_bytes().count(b"\n")
    done = magicpig_eval(home, *arguments)
    assert done.returncode == 0, done.stderr
    assert f"{before} of 24 measurements" in done.stderr
    assert json.loads(done.stdout)["results"] == json.loads(clean.stdout)["results"]


def test_ctrl_c_says_how_to_go_on(tiny_directory, home, tmp_path):
    child = pexpect.spawn(
        sys.executable, command(*WORK, "-m", str(tiny_directory), "--samples", "200", "--fresh")[1:],
        encoding="utf-8", codec_errors="replace", timeout=120, dimensions=(30, 200), env=home,
    )  # fmt: skip
    folder = tmp_path / "cache" / "magicpig-cli" / "eval"
    _wait_for(lambda: any(path.read_bytes().count(b"\n") > 1 for path in folder.glob("*.jsonl")))
    child.sendintr()
    child.expect(r"measurements are in .*/cache/magicpig-cli/eval/\w+\.jsonl; this goes on from there:")
    child.expect(r"magicpig(_cli)? eval --tasks niah,kl -c 1500 .*--samples 200\r\n")
    child.expect("interrupted")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert len(list(folder.iterdir())) == 1  # the lock is gone


def _wait_for(happened, limit_s: float = 120) -> None:
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_demo_model(demo_available, home, tmp_path):
    done = magicpig_eval(
        home | {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))},
        "--tasks", "passkey,kl", "-c", "1k", "--samples", "2", "--positions", "16", "--attention", "lsh,topk",
        "--json", "-o", str(tmp_path / "demo.json"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {(row["metric"], row["mode"]): row for row in json.loads(done.stdout)["results"]}
    assert found["accuracy", "exact"]["value"] >= 0.5  # of two pass keys
    assert found["kept", "topk"]["value"] >= 0.5
    assert 0 < found["kl_mean", "topk"]["value"] < found["kl_mean", "lsh"]["value"] < 1
    assert 0 < found["attn_error", "topk"]["value"] < 0.5
