"""Rows below the text: the text on the screen is what it would be without them, and nothing of them is left behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.ui.screen import Below, Columns
from tests.ui.emulator import Emulator

MARK = "panel row"


def frame(columns: int, lines: int) -> list[str]:
    """Three rows nearly as wide as the terminal."""
    return [f"{MARK} {n} ".ljust(columns - 1, "=")[: columns - 1] for n in range(3)]


@pytest.fixture
def terminal() -> Iterator[Emulator]:
    emulator = Emulator(columns=40, lines=12)
    yield emulator
    emulator.close()


def pieces(text: str, seed: int) -> Iterator[str]:
    """The text as tokens come: a few characters at a time."""
    draw = random.Random(seed)
    while text:
        count = draw.randint(1, 6)
        yield text[:count]
        text = text[count:]


def shown_without_panel(text: str, columns: int = 40) -> list[str]:
    """What a terminal shows of the text alone."""
    plain = Emulator(columns, 12)
    with plain.open() as out:
        out.write(text)
        out.flush()
        plain.settle()
        rows = plain.everything()
    plain.close()
    return rows


WORDS = "The ferry to the island leaves at seven in the morning and comes back at noon. "
TEXTS = {
    "prose": WORDS * 12,
    "lines": "\n".join("x" * n for n in range(0, 90, 3)),
    "full rows": ("y" * 40 + "\n") * 3 + "z" * 80 + "\n\n" + "w" * 40,
    # The emulator draws a wide character into the last column, where terminals wrap it: none begins there.
    "wide": "渡轮早上七点开往岛上，中午返回。" * 12 + "\n" + "ab渡" * 30,
    "tabs": "a\tb\tc\n\t\tindented\n" * 4,
    "emoji": "ab👍🏽c❤️👨‍👩‍👧🙂" * 11 + "\n" + "🎉xx🇩🇪" * 20 + "\n",
    "accents": "cafe\u0301 und a\u0308hnlich " * 20,
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_text_is_what_it_would_be_alone(terminal, name, seed):
    text = TEXTS[name]
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, frame)
        below.draw()
        for number, piece in enumerate(pieces(text, seed)):
            below.write(piece, stdout)
            if number % 7 == 0:
                below.draw()
            if number % 5 == 0:
                terminal.settle()
                _panel_is_whole(terminal)
        below.close(stdout)
        terminal.settle()
    assert terminal.everything() == shown_without_panel(text)
    assert not terminal.screen.cursor.hidden


def _panel_is_whole(terminal: Emulator) -> None:
    """Its rows stand right below the cursor's, nothing below them, and nowhere else."""
    rows, y = terminal.rows(), terminal.screen.cursor.y
    assert [row[: len(MARK) + 2] for row in rows[y + 1 : y + 4]] == [f"{MARK} {n}" for n in range(3)]
    assert not any(rows[y + 4 :])
    assert sum(MARK in row for row in terminal.everything()) == 3


def test_a_piece_within_a_row_moves_nothing(terminal):
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, frame)
        below.draw()
        terminal.settle()
        before = len(terminal.bytes_seen)
        below.write("some words", stdout)
        terminal.settle()
        sent = terminal.bytes_seen[before:]
        assert sent.startswith(b"some words\x1b]2;")  # and the emulator's own mark


@pytest.mark.parametrize("columns", [20, 33, 39, 41, 80])
def test_nothing_is_left_after_a_resize(terminal, columns):
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, frame)
        below.draw()
        below.write("first line\nsecond", stdout)
        terminal.settle()
        terminal.resize(columns, 12)
        below.draw()
        terminal.settle()
        _panel_is_whole(terminal)
        below.write(" goes on", stdout)
        terminal.resize(50, 12)
        below.write(" and on\nthird", stdout)  # finds the new size by itself
        terminal.settle()
        _panel_is_whole(terminal)
        below.close(stdout)
        terminal.settle()
    assert terminal.everything() == ["first line", "second goes on and on"[: max(columns, 50)], "third"]


def test_a_terminal_that_tells_late_keeps_no_rows_either(terminal):
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, frame)
        below.draw()
        below.write("one\ntwo", stdout)
        terminal.settle()
        terminal.take_size(17, 12)
        below.draw()
        below.write("\nthree", stdout)
        below.draw()
        terminal.settle()
        _panel_is_whole(terminal)
        terminal.tell_size(17, 12)
        below.draw()
        terminal.settle()
        _panel_is_whole(terminal)
        below.close(stdout)
        terminal.settle()
    assert terminal.everything() == ["one", "two", "three"]


def test_a_line_of_somebody_else_stands_above(terminal):
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, frame)
        below.draw()
        below.write("an answer", stdout)
        below.write_line("warning: something", stderr)
        terminal.settle()
        _panel_is_whole(terminal)
        below.write(" goes on", stdout)
        below.close(stdout)
        terminal.settle()
    assert terminal.everything() == ["an answer", "warning: something", " goes on"]


def test_no_rows_where_there_is_no_room(terminal):
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, lambda columns, lines: [])
        below.draw()
        below.write(TEXTS["prose"], stdout)
        below.close(stdout)
        terminal.settle()
    assert terminal.everything() == shown_without_panel(TEXTS["prose"])


@given(st.text(alphabet="ab \n渡é\u0301", max_size=60), st.integers(4, 12), st.integers(0, 60))
def test_columns_do_not_depend_on_the_pieces(text, width, cut):
    at_once, in_two = Columns(width), Columns(width)
    at_once.write(text)
    in_two.write(text[:cut])
    in_two.write(text[cut:])
    assert at_once.after("") == in_two.after("")


def test_after_a_resize_both_kinds_of_terminals_are_thought_of():
    columns = Columns(40)
    columns.write("x" * 30)
    columns.resize(20)
    assert columns.after("") == {10, 19}  # wrapped anew; cut
    assert columns.fills("y" * 10)
    assert columns.fills("y")
    assert not columns.stays("y")
    columns.write("\n")
    assert columns.after("") == {0}


def test_styles_do_not_count_as_columns(terminal):
    """Also where a character that would fill a row is held back for a while."""
    with terminal.open() as stdout, terminal.open() as stderr:
        below = Below(stderr, frame)
        below.draw()
        for _ in range(9):
            below.write_styled([("bold ", "bold"), ("plain ", ""), ("in code", "cyan"), (" ", "")], stdout)
        terminal.settle()
        _panel_is_whole(terminal)
        below.close(stdout)
        terminal.settle()
    assert terminal.everything() == shown_without_panel("bold plain in code " * 9)
    assert terminal.style_of("bold").bold
    assert not terminal.style_of("plain").bold
    assert terminal.style_of("in code").fg == "cyan"
