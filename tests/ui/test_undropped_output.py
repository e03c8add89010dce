"""Ctrl-C on a terminal that is slow to show what was written."""

from __future__ import annotations

import os
import pty
import select
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from magicpig_cli.ui.terminal import undropped_output


@pytest.fixture
def ends() -> Iterator[tuple[int, TextIO]]:
    """The terminal's end and the program's."""
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as stream:
        yield ours, stream
    os.close(ours)


def shown_after_interrupt(ours: int, stream: TextIO) -> bytes:
    """What the terminal gets of 8,000 characters if Ctrl-C is typed before it reads any."""
    stream.write("x" * 8000)
    stream.flush()
    os.write(ours, b"\x03")
    shown = b""
    while select.select([ours], [], [], 0.5)[0]:
        shown += os.read(ours, 4096)
    return shown


def keeps(stream: TextIO) -> bool:
    return bool(termios.tcgetattr(stream.fileno())[3] & termios.NOFLSH)


def test_all_of_it_is_shown_while_a_panel_is_there(ends):
    ours, stream = ends
    with undropped_output(stream):
        assert shown_after_interrupt(ours, stream).count(b"x") == 8000
    assert not keeps(stream)
    assert shown_after_interrupt(ours, stream).count(b"x") < 8000  # what a terminal does by itself


def test_a_terminal_that_kept_it_before_keeps_it_after(ends):
    _, stream = ends
    modes = termios.tcgetattr(stream.fileno())
    modes[3] |= termios.NOFLSH
    termios.tcsetattr(stream.fileno(), termios.TCSANOW, modes)
    with undropped_output(stream):
        assert keeps(stream)
    assert keeps(stream)


def test_what_is_no_terminal_is_left_alone(tmp_path):
    with open(tmp_path / "file", "w", encoding="utf-8") as stream, undropped_output(stream):
        stream.write("text")
    assert (tmp_path / "file").read_text() == "text"
