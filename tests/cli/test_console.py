"""What people see: nothing is markup, nothing drives the terminal, progress moves only on a terminal (CASES 7, 32)."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from magicpig_cli.errors import MagicpigError
from magicpig_cli.ui import console

STRANGE = ["[/INST]", "[/login]", "[/'A', 1]", "[bold]x[/bold]", "[red", ":smile:", "a\\[b]", "https://x/[y]"]


@pytest.mark.parametrize("text", STRANGE)
def test_text_is_printed_as_it_is(capsys, text):
    console.say(text)
    console.warn(text)
    console.error(MagicpigError(text, hint=text))
    console.print_table((text,), [(text,), ("plain",)])
    printed = capsys.readouterr()
    assert printed.err == f"{text}\nwarning: {text}\nerror: {text}\nhint: {text}\n"
    assert printed.out == f"{text}\n{text}\nplain\n"


def test_control_characters_become_visible(capsys):
    console.say("a\x1b[2Jb\x07c\rd\x9be\tf\ng")
    assert capsys.readouterr().err == "a\\x1b[2Jb\\x07c\\rd\\x9be\tf\ng\n"


def test_detail_needs_verbose(capsys):
    console.set_verbose(False)
    console.detail("hidden")
    console.set_verbose(True)
    console.detail("shown")
    console.set_verbose(False)
    assert capsys.readouterr().err == "shown\n"


def test_tables_align_and_are_never_cut_in_a_pipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    console.print_table(("name", "n"), [("x" * 200, "1"), ("y", "1,000")], right=("n",))
    header, first, second = capsys.readouterr().out.splitlines()
    assert first == "x" * 200 + "      1"
    assert len(header) == len(first) == len(second)


class Clock:
    """time.monotonic under the test's control."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_line_every_ten_seconds(capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    with console.Track("reading [/INST]", unit="tok") as progress:
        for second in range(35):
            clock.now = 100.0 + second
            progress.update(second * 100, 4000)
        progress.close()
        clock.now += 100
        progress.update(4000, 4000)
    assert capsys.readouterr().err.splitlines() == [
        "reading [/INST]: 1,000 / 4,000 tok, 100 tok/s (25%, 30.0 s left)",
        "reading [/INST]: 2,000 / 4,000 tok, 100 tok/s (50%, 20.0 s left)",
        "reading [/INST]: 3,000 / 4,000 tok, 100 tok/s (75%, 10.0 s left)",
    ]


def test_quiet_progress_is_silent(capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    with console.Track("x", quiet=True) as progress:
        clock.now += 100
        progress.update(1)
        progress.note("aside")
    assert capsys.readouterr() == ("", "")


SHOW = """
import time
from magicpig_cli.ui import console
console.say("notice [/b]")
with console.Track("work [/b]", unit="tok") as progress:
    for n in range(60):
        progress.update(n, 60)
        if n == 30:
            progress.note("aside [/i]")
        time.sleep(0.02)
print("result")
"""


def on_a_terminal(**environment: str) -> str:
    """What a program sends to a terminal as stderr."""
    ours, theirs = pty.openpty()
    inherited = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-c", SHOW], stdout=subprocess.PIPE, stderr=theirs, env={**inherited, **environment}
    ) as process:  # fmt: skip
        os.close(theirs)
        sent = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            sent += part
        assert process.stdout is not None
        assert process.stdout.read() == b"result\n"
    os.close(ours)
    assert process.returncode == 0
    return sent.decode()


def test_a_terminal_gets_a_moving_bar():
    sent = on_a_terminal(TERM="xterm-256color", COLUMNS="100")
    assert "\x1b[2mnotice [/b]\x1b[0m" in sent
    assert "work [/b]" in sent
    assert sent.count("aside [/i]") == 1
    assert "\x1b[2maside [/i]\x1b[0m" in sent
    assert 2 <= sent.count("work [/b]") <= 13  # 1.2 s at four refreshes a second, plus start, end and the note


def test_no_color_moves_without_colours():
    sent = on_a_terminal(TERM="xterm-256color", NO_COLOR="1")
    assert sent.startswith("notice [/b]\r\n")
    assert "work [/b]" in sent
    assert "\x1b[2m" not in sent
    assert sent.count("aside [/i]") == 1


def test_a_dumb_terminal_gets_plain_lines():
    assert on_a_terminal(TERM="dumb") == "notice [/b]\r\naside [/i]\r\n"


def test_force_color_does_not_move_in_a_pipe():
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, env=environment, timeout=60)
    assert (done.stdout, done.stderr) == ("result\n", "notice [/b]\naside [/i]\n")
