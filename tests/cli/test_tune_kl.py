"""`magicpig tune-kl` as a user runs it: wrong options, a whole run on a tiny model, Ctrl-C, a second run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from magicpig_cli.cli import app
from magicpig_cli.corpus import natural_text
from magicpig_cli.model.loader import _byte_tokenizer
from tests import warm
from tests.conftest import keep_steady_speeds
from tests.tiny import tiny_model

GOAL = ("-c", "1k", "--target-error", "0.3", "--grid", "K=5..6,L=20..60:20", "-t", "1")


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", eos_token_id=None, max_position_embeddings=8192).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def home(tmp_path) -> dict[str, str]:
    """An environment with directories of its own."""
    keep_steady_speeds(tmp_path / "cache")
    return {
        **os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_DATA_HOME": str(tmp_path / "data"),
        "NO_COLOR": "1",
    }  # fmt: skip


def magicpig(home: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, env=home)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target-error", "0.1", "--target-ratio", "0.1"], "--target-error and --target-ratio exclude each other"),
        (["--target-error", "0"], "--target-error 0.0 is not between 0 and 1"),
        (["--target-error", "nan"], "--target-error nan is not between 0 and 1"),
        (["--target-ratio", "2"], "--target-ratio 2.0 is not between 0 and 1"),
        (["--memory", "lots"], "--memory: 'lots' is not an amount of memory"),
        (["--memory", "0"], "--memory 0 leaves no room"),
        (["--grid", "K=8-12"], "K=8-12 is neither a number nor a range"),
        (["--grid", "K=8..20"], "K=8..20 is not between 1 and 16"),
        (["--text", "/nowhere/a.txt"], "cannot read /nowhere/a.txt: No such file"),
        (["--text", "~nobody-here/a.txt"], "cannot read ~nobody-here/a.txt: "),
        (["--text", "/"], "cannot read /: Is a directory"),
        (["--save-profile", "../mine"], "'../mine' is not a profile's name"),
        (["--attention", "lsh"], "No such option"),
        (["-K", "9"], "No such option"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(monkeypatch, capsys, arguments, says):
    monkeypatch.setattr("magicpig_cli.ui.loading.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    assert app.run(["tune-kl", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert says in printed.err
    assert "hint: " in printed.err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["-c", "300"], 1, "a context of 300 tokens is never sampled"),
        (["-c", "1k", "--text", "short.txt"], 2, "short.txt has 11 tokens"),
        (["-c", "1k", "--memory", "10k"], 1, "; signatures need 54.4 KiB"),
        (["-c", "9k"], 1, "9,216 tokens was asked for, but this model was made for 8,192"),
    ],
)
def test_what_cannot_be_tuned_is_refused_with_numbers(
    tiny_directory, tmp_path, monkeypatch, capsys, arguments, code, says
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("hello world")
    assert app.run(["tune-kl", "-m", str(tiny_directory), *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert "hint: " in printed.err


def test_a_run_a_profile_and_a_second_run(tiny_directory, home, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(natural_text()[:4000])
    arguments = ("tune-kl", "-m", str(tiny_directory), *GOAL, "--text", str(text))
    first = magicpig(home, *arguments, "--json", "--save-profile", "mine")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert first.stdout.count("\n") == 1
    assert "\x1b" not in first.stderr
    assert f"profile mine: {tmp_path}/data/magicpig-cli/profiles/mine.yaml" in first.stderr
    chosen = document["chosen"]
    assert document["context"] == 1024
    assert document["meta"]["profile"] == "mine"

    planned = magicpig(
        home, "chat", "-m", str(tiny_directory), "-v", "-n", "1", "--attention", "lsh", "--profile", "mine", "hi"
    )
    tables = next(c for c in document["candidates"] if c["verified"] and c["sampler"] == "lsh")
    assert f"K={tables['K']} L={tables['L']}" in planned.stderr
    sampled = magicpig(home, "chat", "-m", str(tiny_directory), "-n", "1", "--json", "--profile", "mine", "hi")
    assert json.loads(sampled.stdout)["attention"]["dense_layers"] == chosen["dense_layers"]
    picked = json.loads(magicpig(home, "doctor", "--json").stdout)
    assert picked["profile"] != "mine"  # it is for that model alone

    second = magicpig(home, *arguments)
    assert second.returncode == 0, second.stderr
    assert second.stderr.count("not again, an earlier run kept") == 2
    lines = second.stdout.splitlines()
    assert lines[0].split()[:3] == ["sampler", "sampled", "measured"]
    assert sum(line.startswith("* ") for line in lines) == 2  # in the table, and what it means
    assert lines[-1].startswith("magicpig chat -m ")
    assert all(line == line.rstrip() for line in lines)


def test_ctrl_c_leaves_no_profile_and_no_half_capture(tiny_directory, home, tmp_path):
    child = pexpect.spawn(
        sys.executable, ["-m", "magicpig_cli", "tune-kl", "-m", str(tiny_directory), "-c", "8k", "--save-profile", "no",
                         "--grid", "K=8..12,L=900..1000"],
        encoding="utf-8", codec_errors="replace", timeout=120, dimensions=(30, 120), env=home,
    )  # fmt: skip
    child.expect("real tables")
    child.sendintr()
    child.expect("interrupted")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert not (tmp_path / "data").exists() or not list((tmp_path / "data").rglob("*.yaml"))
    kept = list((tmp_path / "cache" / "magicpig-cli" / "captures").iterdir())
    assert len(kept) == 1  # the first text was read
    assert (kept[0] / "about.json").is_file()
