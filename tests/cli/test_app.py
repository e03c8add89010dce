"""How runs begin and end: light help, exit codes, one-line errors, pipes. Real processes where that is the point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import magicpig_cli
from magicpig_cli.cli import app, chat
from magicpig_cli.cli.options import command_options
from magicpig_cli.errors import ContextError, MagicpigError, UsageError

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith(("MAGICPIG_", "XDG_"))}
HEAVY = ("torch", "transformers", "numpy", "huggingface_hub", "prompt_toolkit")


def magicpig(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "magicpig_cli", *arguments], capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--help"], *([name, "--help"] for name in app.COMMANDS), ["models", "check", "-h"]]
)
def test_help_imports_nothing_heavy(arguments):
    code = (
        "import sys\nfrom magicpig_cli.cli import app\n"
        f"assert app.run({arguments!r}) == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Usage: magicpig" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_root_lists_every_command_with_its_help():
    plain = magicpig()
    assert plain.returncode == 0
    assert plain.stdout == magicpig("--help").stdout
    for name in app.COMMANDS:
        assert name in plain.stdout


def test_version():
    assert magicpig("--version").stdout == f"magicpig {magicpig_cli.__version__}\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [("chat", "--no-cuda-graphs"), ("chat", "CUDA graphs"), ("bench", "launch_ms"), ("models check", "forms")],
)
def test_what_is_told_of_a_gpu_is_in_the_help_and_in_the_readme(capsys, monkeypatch, command, name):
    monkeypatch.setenv("COLUMNS", "300")
    assert app.run([*command.split(), "--help"]) == 0
    assert name in " ".join(capsys.readouterr().out.split())
    assert name in (Path(__file__).parents[2] / "README.md").read_text()


def test_unknown_command():
    done = magicpig("cht")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: No such command 'cht'")
    assert "chat" in done.stderr


@pytest.fixture
def raising(monkeypatch):
    """`magicpig chat` that raises what the test says."""

    def prepare(problem: BaseException) -> None:
        @command_options()
        def chat_that_fails() -> None:
            """Fail."""
            raise problem

        monkeypatch.setattr(chat, "chat", chat_that_fails)

    return prepare


@pytest.mark.parametrize(
    ("problem", "code", "printed"),
    [
        (MagicpigError("it broke"), 1, "error: it broke\n"),
        (ContextError("too\nlong [/INST]", hint="-c [/'A', 1]"), 1, "error: too long [/INST]\nhint: -c [/'A', 1]\n"),
        (UsageError("what?"), 2, "error: what?\n"),
        (typer.Exit(3), 3, ""),
        (typer.Exit(0), 0, ""),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (
            ValueError("[/login] \x1b[2J"), 1,
            "error: ValueError: [/login] \\x1b[2J\nhint: run it again with --debug for the traceback\n",
        ),
    ],
)  # fmt: skip
def test_endings(raising, capsys, problem, code, printed):
    raising(problem)
    assert app.run(["chat"]) == code
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("problem", [ValueError("bad"), MagicpigError("bad")])
@pytest.mark.parametrize("arguments", [["chat", "--debug"], ["--debug", "chat"]])
def test_debug_shows_the_traceback(raising, capsys, problem, arguments):
    raising(problem)
    assert app.run(arguments) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert "chat_that_fails" in printed
    assert "--debug" not in printed.splitlines()[-1]


UNREAD = [["models", "--help"], ["--version"], []]  # printed by Rich, before a typer.Exit, at the end of a run
BUFFERED = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONUNBUFFERED"}  # as most people run it


@pytest.fixture
def unread():
    """A pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.parametrize("arguments", UNREAD)
def test_a_reader_that_has_seen_enough_ends_the_run_silently(unread, arguments):
    done = subprocess.run(
        [sys.executable, "-m", "magicpig_cli", *arguments], stdout=unread, stderr=subprocess.PIPE, text=True,
        env=BUFFERED, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.returncode == 141


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 141), (["models", "--nope"], 2)])
def test_neither_stdout_nor_stderr_is_read(unread, arguments, code):
    command = [sys.executable, "-m", "magicpig_cli", *arguments]
    assert subprocess.run(command, stdout=unread, stderr=unread, env=BUFFERED, timeout=60).returncode == code


def test_a_full_disk_at_stdout_is_told_once():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "magicpig_cli", "--version"], stdout=full, stderr=subprocess.PIPE, text=True,
            env=BUFFERED, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("No space left on device") == 1


def test_a_script_ends_as_a_command_does(unread):
    code = "import sys\nfrom magicpig_cli.ui import console\nsys.exit(console.exit_status(lambda: print('result')))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=unread, stderr=subprocess.PIPE, text=True, env=BUFFERED, timeout=60
    )
    assert (done.returncode, done.stderr) == (141, "")


def test_doctor_json_has_exactly_the_documented_keys(tmp_path):
    done = magicpig("doctor", "--json", HF_TOKEN="hf_secret_of_mine", HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "hf_secret_of_mine" not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert list(report) == ["versions", "cpu", "memory", "gpus", "openmp_runtimes", "profile", "hub", "speeds"]
    assert list(report["cpu"]) == ["model", "isa", "tiers", "cores_physical", "cores_usable", "threads"]
    assert list(report["memory"]) == ["total_bytes", "free_bytes", "limit_bytes"]
    assert report["hub"] == {"cache": str(tmp_path / "hub"), "token": True}
    assert report["versions"]["magicpig"] == magicpig_cli.__version__
    assert len(report["openmp_runtimes"]) == 1
    assert report["cpu"]["threads"] >= 1


def test_doctor_page_is_plain_text_in_a_pipe():
    done = magicpig("doctor", FORCE_COLOR="1", HF_TOKEN="hf_secret_of_mine", MAGICPIG_ISA="reference")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "hf_secret_of_mine" not in done.stdout
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert lines["kernels"].strip().startswith("reference")
    assert "token present" in lines["Hub cache"]
    assert not any(line.endswith(" ") for line in done.stdout.splitlines())


def test_an_unknown_isa_cap_is_a_usage_error():
    done = magicpig("doctor", MAGICPIG_ISA="avx9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: MAGICPIG_ISA=avx9")
