"""The live view on a terminal as people have it: what they see while it runs, after a resize, and when it is gone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from magicpig_cli.cli import app, bench
from magicpig_cli.ui import console, live, loading
from magicpig_cli.ui.live_panel import MAX_WIDTH
from tests import warm
from tests.ui.emulator import Emulator

FRAME = "╭╰│"
Started = subprocess.Popen | warm.Program


@pytest.fixture
def terminal() -> Iterator[Emulator]:
    emulator = Emulator(columns=100, lines=30)
    yield emulator
    emulator.close()


@pytest.fixture
def start(tiny_directory: Path, terminal: Emulator, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts `magicpig COMMAND` with the tiny model on the terminal."""
    running: list[Started] = []

    def run(
        command: str, *arguments: str, environment: dict[str, str] | None = None, shell: str = "", **options
    ) -> Started:  # fmt: skip
        inherited = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}
        given = {
            "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONUTF8": "1", "XDG_CONFIG_HOME": str(tmp_path),
        }  # fmt: skip
        arguments, env = (command, *arguments, "-m", str(tiny_directory)), inherited | given | (environment or {})
        if shell:
            program = shlex.join([sys.executable, "-m", "magicpig_cli", *arguments])
            running.append(terminal.start(["bash", "-c", shell.format(program)], env=env))
        else:
            streams = {"stdin": terminal.theirs, "stdout": terminal.theirs, "stderr": terminal.theirs}
            running.append(warm.Program(*arguments, env=env, own_terminal=True, **(streams | options)))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.wait()


def framed(rows: list[str]) -> list[str]:
    """The rows that are part of a panel."""
    return [row for row in rows if row[:1] in tuple(FRAME)]


def tall(rows: list[str]) -> bool:
    """Whether there is one whole panel and nothing else of one."""
    return len(framed(rows)) == 7 and rows.index(framed(rows)[0]) + 6 == rows.index(framed(rows)[-1])


def test_a_conversation_shows_it_while_it_answers_and_not_at_the_prompt(start, terminal):
    process = start("chat", "-n", "6000", "--temperature", "0")
    terminal.wait_for("/help lists commands")
    terminal.wait_for(">")
    assert not framed(terminal.rows())
    terminal.type("tell me\r")
    terminal.wait_for("tok/s")
    rows = terminal.wait_for("answering")
    assert tall(rows)
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    terminal.wait_until(lambda rows: [row for row in rows if row][-1] == ">")
    terminal.type("/context\r")
    rows = terminal.wait_for("of 8,192 tokens")
    assert not framed(terminal.everything())
    assert not terminal.screen.cursor.hidden
    assert "tell me" in "\n".join(terminal.everything())
    terminal.type("/exit\r")
    assert process.wait(60) == 0


def test_no_character_of_the_answer_is_lost(start, terminal):
    arguments = ("chat", "tell me", "-n", "700", "--temperature", "1", "--seed", "3", "--no-markdown")
    assert start(*arguments).wait(120) == 0
    terminal.settle()
    with_panel = terminal.everything()
    assert "╭" in terminal.bytes_seen.decode()
    answer = start(*arguments, stdout=subprocess.PIPE).communicate()[0].decode()
    plain = Emulator(columns=100, lines=30)
    with plain.open() as out:
        out.write(console.printable(answer))
        out.flush()
        plain.settle()
    plain.close()
    assert len(answer) > 500
    assert with_panel[-1].startswith("7 + 700 tokens")
    begin = next(place for place, row in enumerate(with_panel) if "has no chat template" in row) + 1
    assert with_panel[begin:-1] == plain.everything()


@pytest.mark.parametrize("columns", [42, 140])
def test_a_resize_leaves_nothing_behind(start, terminal, columns):
    process = start("chat", "tell me", "-n", "6000", "--temperature", "0")
    terminal.wait_for("answering")
    terminal.resize(columns, 30)
    terminal.settle()
    before = len(terminal.bytes_seen)
    # Once it has been drawn for the new size there is one frame; a look may come in the middle of drawing one.
    terminal.wait_until(lambda _: "╰" in terminal.bytes_seen[before:].decode(errors="replace"))
    terminal.wait_until(lambda rows: tall(rows) and len(framed(terminal.everything())) == 7)
    terminal.type("\x03")
    assert process.wait(60) == 130
    terminal.settle()
    assert not framed(terminal.everything())
    assert not terminal.screen.cursor.hidden


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed; it re-wraps lines on resize")
def test_a_terminal_that_wraps_lines_anew(tiny_directory, tmp_path):
    def tmux(*arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *arguments],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout

    def everything() -> list[str]:
        return tmux("capture-pane", "-t", "live", "-p", "-S", "-").splitlines()

    def wait(condition: Callable[[list[str]], bool]) -> list[str]:
        until = time.monotonic() + 60
        while not condition(rows := everything()):
            assert time.monotonic() < until, "\n".join(rows)
            time.sleep(0.02)
        return rows

    # Where what is above has no more rows than a frame wraps into, tmux gives the cursor up (docs/decisions/009).
    command = f"seq 25; {sys.executable} -m magicpig_cli chat tellme -n 7000 --temperature 0 -m {tiny_directory}"
    tmux("new-session", "-d", "-s", "live", "-x", "100", "-y", "30", f"export PYTHONUTF8=1; {command}; sleep 100")
    try:
        wait(lambda rows: "answering" in "\n".join(rows))
        for columns, lines in ((48, 30), (30, 24), (110, 24), (90, 30)):
            tmux("resize-window", "-t", "live", "-x", str(columns), "-y", str(lines))
            wait(lambda rows: tall(rows) and len(framed(rows)[0]) == min(columns - 1, MAX_WIDTH))  # noqa: B023
        tmux("send-keys", "-t", "live", "C-c")
        rows = wait(lambda rows: "interrupted" in "\n".join(rows))
        assert not framed(rows)
        assert tmux("display-message", "-t", "live", "-p", "#{cursor_flag}").strip() == "1"
    finally:
        tmux("kill-server")


def test_suspended_it_leaves_the_terminal_to_others(start, terminal):
    shell = start("chat", "tell me", "-n", "7000", "--temperature", "0", shell="set -m; {}; echo is stopped; read; fg")
    terminal.wait_for("answering")
    terminal.type("\x1a")  # Ctrl-Z
    terminal.wait_for("is stopped")
    assert not framed(terminal.everything())
    terminal.type("\r")
    terminal.wait_for("answering")
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert shell.wait(60) == 130
    assert not framed(terminal.everything())


def test_keys_stay_unseen_after_ctrl_z_and_fg(start, terminal):
    """An interactive shell sets its own modes while the answer is stopped, as `stty` does here."""
    script = "set -m; {}; stty echo -noflsh; echo is stopped; read; fg"
    shell = start("chat", "tell me", "-n", "7000", "--temperature", "0", shell=script)
    terminal.wait_for("answering")
    terminal.type("\x1a")
    terminal.wait_for("is stopped")
    assert local_modes(terminal) == (True, False)
    terminal.type("\r")
    terminal.wait_for("answering")
    terminal.wait_until(lambda _: local_modes(terminal) == (False, True))
    terminal.type("\x03")
    terminal.wait_for("interrupted")
    assert shell.wait(60) == 130
    assert local_modes(terminal) == (True, False)


def test_the_prompt_is_suspended_with_what_was_typed(start, terminal):
    shell = start("chat", shell="set -m; {}; echo is stopped; read; fg")
    terminal.wait_for("/help lists commands")
    terminal.wait_for(">")
    terminal.type("half a line")
    terminal.wait_for("> half a line")
    terminal.type("\x1a")
    terminal.wait_for("is stopped")
    terminal.type("\r")
    terminal.wait_until(lambda rows: [row for row in rows if row][-1] == "> half a line")
    terminal.type("\x15/exit\r")
    assert shell.wait(60) == 0


def test_an_answer_that_ends_in_the_background_ends(start, terminal):
    """Its last act is to give the terminal its modes back, which from the background would stop it."""
    script = "set -m; {}; bg; wait %1; echo it ended with $?"
    arguments = ("chat", "tell me", "-n", "3000", "--temperature", "0")  # 3 s: it is stopped before it ends
    shell = start(*arguments, shell=script)
    terminal.wait_for("answering")
    terminal.type("\x1a")
    terminal.wait_for("it ended with 0")
    assert shell.wait(60) == 0


def local_modes(terminal: Emulator) -> tuple[bool, bool]:
    """Whether keys are echoed, and whether what is not shown yet outlives a Ctrl-C."""
    modes = termios.tcgetattr(terminal.theirs)[3]
    return bool(modes & termios.ECHO), bool(modes & termios.NOFLSH)


def test_a_reader_of_the_answer_finds_no_panel_below_it(start, terminal):
    """A pipe may end on the same terminal (`| tee`), so the panel ends with the prompt; a file does not."""
    process = start("chat", "tell me " * 200, "-n", "500", stdout=subprocess.PIPE)
    assert process.communicate()[0]
    terminal.settle()
    assert b"reading the prompt" in terminal.bytes_seen
    assert b"answering" not in terminal.bytes_seen
    start("chat", "tell me", "-n", "2500", stdout=subprocess.DEVNULL).wait(120)
    terminal.settle()
    assert b"answering" in terminal.bytes_seen
    assert not framed(terminal.everything())


def test_nothing_moves_in_a_pipe(start):
    process = start(
        "chat", "tell me", "-n", "300", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        environment={"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"},
    )  # fmt: skip
    _, said = process.communicate()
    assert process.returncode == 0
    assert b"\x1b" not in said
    assert len(said.splitlines()) == 2  # there is no template, and statistics


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(["--no-live"], {}), ([], {"MAGICPIG_NO_LIVE": "1"}), (["-q"], {}), ([], {"TERM": "dumb"})],
    ids=["--no-live", "MAGICPIG_NO_LIVE", "-q", "dumb"],
)
def test_no_panel_where_it_is_not_wanted(start, terminal, arguments, environment):
    process = start("chat", "tell me", "-n", "300", *arguments, environment=environment)
    assert process.wait(120) == 0
    terminal.settle()
    assert "╭" not in terminal.bytes_seen.decode()
    assert len(terminal.everything()) > 2


def test_no_colours_and_no_more_columns_than_asked_for(start, terminal):
    start("chat", "tell me", "-n", "300", environment={"NO_COLOR": "1", "COLUMNS": "50"}).wait(120)
    terminal.settle()
    sent = terminal.bytes_seen.decode()
    panel = sent[sent.index("╭") :]
    assert "\x1b[1m" not in panel
    assert "\x1b[3" not in panel
    assert max(len(row.partition("\x1b")[0]) for row in panel.splitlines() if row[:1] in tuple(FRAME)) == 50


def test_a_batch_shows_slots_and_lines_and_writes_the_same_records(start, terminal, tmp_path):
    lines = [{"id": f"q{n}", "prompt": "word " * (20 * n + 1), "max_tokens": 1500} for n in range(6)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{bad\n")
    process = start("batch", str(source), "--batch-size", "3", "--temperature", "0")
    rows = terminal.wait_for("▶▶▶")
    assert tall(rows)
    terminal.wait_for("/ 7 lines")
    assert "1 failed" in "\n".join(rows)
    assert process.wait(120) == 3
    terminal.settle()
    assert not framed(terminal.everything())
    assert "7 lines: 6 answered, 1 failed" in " ".join(terminal.everything())
    records = {r["custom_id"]: r for r in map(json.loads, (tmp_path / "in.out.jsonl").read_text().splitlines())}
    plain = start(
        "batch", str(source), "-o", str(tmp_path / "plain.jsonl"), "--batch-size", "3", "--temperature", "0",
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert b"\x1b" not in plain.communicate()[1]
    for record in map(json.loads, (tmp_path / "plain.jsonl").read_text().splitlines()):
        choices = records[record["custom_id"]]["response"]["body"]["choices"]
        assert choices == record["response"]["body"]["choices"]


def test_a_bench_shows_what_it_measures_and_prints_its_table(start, terminal):
    process = start(
        "bench", "--context", "3000", "--gen-tokens", "1000", "--reps", "2", "--warmup", "0", "--fill", "real"
    )  # fmt: skip
    terminal.wait_for("3,000 tokens, batch 1, exact, rep 1/2")
    assert tall(terminal.wait_for("3,000 tokens, batch 1, lsh, rep 2/2"))
    assert process.wait(120) == 0
    terminal.settle()
    rows = terminal.everything()
    assert not framed(rows)
    lines = [[row for row in rows if row.startswith("3000 ") and mode in row] for mode in ("exact", "lsh")]
    assert len(lines[0]) == len(lines[1]) > 0  # one in every part of the table


def test_the_option_comes_from_the_configuration_too(monkeypatch, tmp_path):
    seen: list[bool] = []

    monkeypatch.setattr(loading, "load_engine", lambda settings, quiet: SimpleNamespace())
    monkeypatch.setattr(bench, "_plan", lambda settings: None)
    monkeypatch.setattr(bench, "_check_room", lambda plan, request: None)
    monkeypatch.setattr(bench, "_measure", lambda engine, request, target, *, live: seen.append(live))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("MAGICPIG_NO_LIVE", raising=False)
    assert app.run(["bench"]) == 0
    (tmp_path / "magicpig-cli").mkdir()
    (tmp_path / "magicpig-cli" / "config.yaml").write_text("no-live: true\n")
    assert app.run(["bench"]) == 0
    monkeypatch.setenv("MAGICPIG_NO_LIVE", "0")
    assert app.run(["bench"]) == 0
    assert seen == [True, False, True]


def test_a_handler_that_python_cannot_put_back_is_left_alone(monkeypatch):
    """Another program that embeds this one may have installed it."""
    monkeypatch.setattr(signal, "getsignal", lambda _number: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("it was replaced"))
    with live._handling("SIGWINCH", lambda *_: None):
        pass
