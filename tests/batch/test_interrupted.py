"""Batches that are told to end, in real processes: signals, terminals that close, full disks; then they go on."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magicpig_cli.batch.interrupt import Signals
from magicpig_cli.cli import typed
from tests import warm
from tests.batch.desk import MANY, as_bytes, comparable, wait_for_records

SOME = [{"prompt": 1}, *MANY[:40]]
STOPPERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def go_on(err: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Type the command that was printed."""
    (command,) = [line for line in err.splitlines() if "to go on: " in line]
    command = command.partition("to go on: ")[2].removesuffix("\x1b[0m")
    environment = {**os.environ, "XDG_CONFIG_HOME": str(directory)}
    return subprocess.run(["bash", "-c", command], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("number", STOPPERS)
def test_a_signal_ends_the_run_after_whole_records(process, tmp_path, number):
    (tmp_path / "in.jsonl").write_bytes(as_bytes({"prompt": 1}, *MANY))
    running = process("in.jsonl", "--batch-size", "2", "--json")
    answers = tmp_path / "in.out.jsonl"
    wait_for_records(answers, 3, running)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    done = len(ids(answers))
    assert answers.read_bytes().endswith(b"\n")
    assert 3 <= done < 2000
    assert f"interrupted: {done + 1} of 2,001 lines are done" in err
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    assert json.loads(out)["ok"] == done
    assert json.loads((tmp_path / "in.out.meta.json").read_text())["state"] == "interrupted"
    assert not (tmp_path / "in.out.lock").exists()


def test_the_command_that_is_printed_goes_on(process, tmp_path):
    """With everything that was typed, however odd, but for --overwrite."""
    (tmp_path / "my in.jsonl").write_bytes(as_bytes(*SOME))
    (tmp_path / "o.jsonl").write_text("old")
    typed = ["--overwrite", "-o", "o.jsonl", "-s", "It's\n\x1b[1m $HOME \\n", "--batch-size", "2", "--", "my in.jsonl"]
    running = process("-q", *typed[:-2], "-n", "100", "--stop", "~~~", "--json", "my in.jsonl")
    wait_for_records(tmp_path / "o.jsonl", 3, running)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert "\x1b" not in err
    assert "--overwrite" not in err
    first = (tmp_path / "o.jsonl").read_bytes()
    done = go_on(err, tmp_path)
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "o.jsonl").read_bytes().startswith(first)
    assert sorted(ids(tmp_path / "o.jsonl")) == sorted(line["id"] for line in MANY[:40])
    summary = json.loads(done.stdout)
    assert (summary["total"], summary["failed"], summary["skipped"]) == (41, 1, len(first.splitlines()))
    assert summary["ok"] + summary["skipped"] == 40


class Terminal:
    """A pseudo-terminal that is a process's own."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.shown = b""

    def options(self) -> dict[str, Any]:
        return {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave, "own_terminal": True}

    def read(self) -> None:
        """What has come out so far."""
        os.set_blocking(self.master, False)
        try:
            while data := os.read(self.master, 65536):
                self.shown += data
        except OSError:
            pass

    def close(self) -> None:
        os.close(self.master)


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Whoever started the tests may ignore hangups (nohup, a job of CI); what is started here would ignore them too."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def on_a_terminal(process):
    """`on_a_terminal(*arguments)`: (process, its terminal)."""

    def start(*arguments: str) -> tuple[warm.Program, Terminal]:
        terminal = Terminal()
        running = process(*arguments, **terminal.options())
        os.close(terminal.slave)
        return running, terminal

    return start


def wait(running: warm.Program, terminal: Terminal) -> int:
    while running.poll() is None:
        terminal.read()
        time.sleep(0.01)
    terminal.read()
    return running.returncode


def wait_on_terminal(path: Path, count: int, running: warm.Program, terminal: Terminal) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        terminal.read()
        assert running.poll() is None, terminal.shown
        time.sleep(0.01)


@pytest.mark.parametrize(("keys", "view"), [(b"\x03", []), (b"\x03\x03", []), (b"\x03\x03\x03", ["--no-live"])])
def test_ctrl_c_on_a_terminal(on_a_terminal, tmp_path, keys, view):
    (tmp_path / "in.jsonl").write_bytes(as_bytes({"prompt": 1}, *MANY))
    running, terminal = on_a_terminal("in.jsonl", "--batch-size", "4", *view)
    answers = tmp_path / "in.out.jsonl"
    wait_on_terminal(answers, 3, running, terminal)
    for key in keys:
        os.write(terminal.master, bytes([key]))
    assert wait(running, terminal) == 130
    shown = terminal.shown.decode().replace("\r\n", "\n")
    assert f"interrupted: {len(ids(answers)) + 1} of 2,001 lines are done" in shown
    assert "to go on: " in shown
    assert "Traceback" not in shown
    assert json.loads((tmp_path / "in.out.meta.json").read_text())["state"] == "interrupted"
    assert not (tmp_path / "in.out.lock").exists()


def test_a_terminal_that_is_closed(on_a_terminal, tmp_path):
    """Of an ssh session, over night: the kernel sends SIGHUP, and nothing can be written to it any more."""
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*SOME))
    running, terminal = on_a_terminal("in.jsonl", "--batch-size", "2", "--json")
    wait_on_terminal(tmp_path / "in.out.jsonl", 3, running, terminal)
    terminal.close()
    assert running.wait(timeout=60) == 130
    done = ids(tmp_path / "in.out.jsonl")
    assert 3 <= len(done) < 40
    assert json.loads((tmp_path / "in.out.meta.json").read_text())["state"] == "interrupted"
    later = process_that_goes_on(running, tmp_path)
    assert later.returncode == 3, later.stderr
    assert sorted(ids(tmp_path / "in.out.jsonl")) == sorted(line["id"] for line in MANY[:40])


def process_that_goes_on(running: warm.Program, directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(directory)}
    return warm.run(*running.args[3:], "--resume", cwd=directory, env=environment, timeout=100)


def test_who_wants_hangups_ignored_has_them_ignored(on_a_terminal, process, tmp_path):
    """As `nohup` does; writing to a terminal that is gone does not end the run either."""
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*SOME))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running, terminal = on_a_terminal("in.jsonl", "--batch-size", "2")
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_on_terminal(tmp_path / "in.out.jsonl", 3, running, terminal)
    terminal.close()
    assert running.wait(timeout=100) == 3
    assert len(ids(tmp_path / "in.out.jsonl")) == 40
    assert json.loads((tmp_path / "in.out.meta.json").read_text())["state"] == "finished"


def test_a_log_that_is_gone_does_not_end_the_run(process, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*SOME))
    running = process("in.jsonl")
    assert running.stderr is not None
    running.stderr.close()
    running.stderr = None
    assert running.wait(timeout=100) == 3
    assert len(ids(tmp_path / "in.out.jsonl")) == 40


def test_a_disk_that_is_full(process, tmp_path):
    """The record that has no room is not there at all; the others are, and the run goes on once there is room."""
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*SOME))
    room = 9001  # bytes
    running = process("in.jsonl", "--batch-size", "2")
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (room, room))
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "error: cannot write in.out.jsonl: File too large" in err
    assert "Traceback" not in err
    content = (tmp_path / "in.out.jsonl").read_bytes()
    assert content.endswith(b"\n")
    assert 0 < len(content) <= room
    done = len(ids(tmp_path / "in.out.jsonl"))
    assert f"{done + 1} of 41 lines are done; the answers are in in.out.jsonl" in err
    assert json.loads((tmp_path / "in.out.meta.json").read_text())["state"] == "failed"
    later = go_on(err, tmp_path)
    assert later.returncode == 3, later.stderr
    assert f"going on: {done} of 41 lines are answered, 1 have failed" in later.stderr
    assert len(set(ids(tmp_path / "in.out.jsonl"))) == len(ids(tmp_path / "in.out.jsonl")) == 40


def test_killed_and_gone_on_with_equals_one_run(process, tmp_path):
    """The tiny model itself, float32 as the determinism contract has it; for the demo see tests/must_show."""
    exact = ["--dtype", "float32", "--kv-dtype", "float32", "--temperature", "0", "--batch-size", "3", "-q"]
    (tmp_path / "in.jsonl").write_bytes(as_bytes(*SOME))
    assert process("in.jsonl", "-o", "clean.jsonl", *exact).wait(timeout=100) == 3
    for after in (3, 20):
        running = process("in.jsonl", "--resume", *exact)
        wait_for_records(tmp_path / "in.out.jsonl", after, running)
        running.kill()
        running.wait()
    assert process("in.jsonl", "--resume", *exact).wait(timeout=100) == 3
    for name in ("", ".errors"):
        found, wanted = (
            sorted((comparable(line) for line in (tmp_path / f"{stem}{name}.jsonl").read_bytes().splitlines()),
                   key=lambda record: record["custom_id"]) for stem in ("in.out", "clean")
        )  # fmt: skip
        assert found == wanted


# In this process


def test_a_second_signal_does_not_wait():
    """While answers are written the first signal only asks; any other raises at once."""
    before = [signal.getsignal(number) for number in STOPPERS]
    with Signals() as signals:
        for number in STOPPERS:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert not signals.asked
        with signals.gently():
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOPPERS] == before


def test_a_second_signal_waits_for_a_record_and_a_third_does_not():
    done = []

    def hold(signals: Signals, count: int) -> None:
        with signals.gently(), signals.held():
            for _ in range(count):
                os.kill(os.getpid(), signal.SIGTERM)
            done.append(count)

    for count, ends in ((1, None), (2, KeyboardInterrupt), (3, KeyboardInterrupt)):
        with Signals() as signals:
            if ends is None:
                hold(signals, count)
            else:
                with pytest.raises(ends):
                    hold(signals, count)
    assert done == [1, 2]


def test_signals_that_are_ignored_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals, signals.gently():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "argument", ["plain", "two words", "it's", "$HOME `x` \\", "a\nb", "\x1b[2J'\\", "é\x85", "\udcff", ""]
)
def test_commands_can_be_typed_again(argument, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/nowhere/printf"])
    line = typed.command_with(["batch", "--overwrite", argument, "--", "in"], "--resume", without=["--overwrite"])
    line.encode()  # can be printed
    assert "\n" not in line
    assert "\x1b" not in line
    shell = subprocess.run(["bash", "-c", line.replace("/nowhere/printf", "printf '%s\\0'")], capture_output=True)
    assert shell.stdout.split(b"\0")[:-1] == [
        os.fsencode(text) for text in ("batch", argument, "--resume", "--", "in")
    ]  # fmt: skip
    assert typed.command_with(["batch", "in", "--resume"], "--resume", without=()).endswith(" batch in --resume")


def test_how_this_program_is_called(monkeypatch, tmp_path):
    script = tmp_path / "magicpig"
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert typed.command_with([], "--x", without=()) == "magicpig --x"
    monkeypatch.setenv("PATH", "/nowhere")
    assert typed.command_with([], "--x", without=()) == f"{script} --x"
    monkeypatch.setattr(sys, "argv", ["/lib/magicpig_cli/__main__.py"])
    assert typed.command_with([], "--x", without=()) == f"{sys.executable} -m magicpig_cli --x"
