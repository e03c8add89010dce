"""Rows that stay below the text on a terminal, while the text goes on above them.

Rich's `Live` rests the cursor below its frame and must know how many rows that takes to climb back, which a terminal
that re-wraps lines on resize changes behind its back; and it cannot stand below a line that is not finished. Here the
cursor rests where the text ends, and the terminal itself remembers the place. Everything below the cursor is ours, so
whatever a resize makes of it, one "erase below" removes it, and after a kill -9 the terminal is in no strange state.
The text is written as it is: the terminal wraps it, and what it copies or re-wraps later is the real text.

One thing needs to be known of the text: a terminal does not remember that a row is exactly full once the cursor has
moved. So the character that would fill a row is held back until the next one comes (docs/decisions/009).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len, get_character_cell_size

from magicpig_cli.ui.styles import Piece, styled

_BEGIN = "\x1b[?2026h\x1b[?25l"  # terminals that know 2026 show nothing until the end of it; no cursor that runs about
_END = "\x1b[?25h\x1b[?2026l"
_ERASE_RIGHT, _ERASE_REST = "\x1b[K", "\x1b[J"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_CUT, _WRAP = "\x1b[?7l", "\x1b[?7h"  # what becomes of a row that is too long
_DOWN = "\x1bD"  # one row down in the same column; scrolls at the bottom
# Everything after the cursor. Not at once: from the top left corner, tmux moves what is erased into its history.
_ERASE_BELOW = f"{_DOWN}\x1b[A{_SAVE}{_ERASE_RIGHT}\x1b[B\r{_ERASE_REST}{_RESTORE}"
_TAB = 8
_JOINER, _AS_EMOJI = "\u200d", "\ufe0f"
_SKINS, _FLAG_LETTERS = range(0x1F3FB, 0x1F400), range(0x1F1E6, 0x1F200)
_DOUBTFUL = re.compile("[\u200d\ufe0f\U0001f3fb-\U0001f3ff\U0001f1e6-\U0001f1ff]")

Frame = Callable[[int, int], list[str]]  # (columns, rows) of the terminal → rows to show, each narrower than that


@dataclass(frozen=True, slots=True)
class Kind:
    """What a terminal makes of emoji that consist of several characters."""

    joins: bool  # their parts are one picture
    widens: bool  # a sign that is shown as an emoji takes two cells

    def cells(self, character: str, last: str) -> int:
        """Cells of a character after another one."""
        code = ord(character)
        if character == _AS_EMOJI:
            return int(self.widens)
        if last == _JOINER or code in _SKINS:
            return 0 if self.joins else 2
        if code in _FLAG_LETTERS:
            second = bool(last) and ord(last) in _FLAG_LETTERS
            return (0 if second else 2) if self.joins else 1 + self.widens
        return get_character_cell_size(character)


_KINDS = tuple(Kind(joins, widens) for joins in (False, True) for widens in (False, True))


class Columns:
    """The column where the text ends, 0-based; the terminal's width means that a row is exactly full.

    It may be one of several: terminals that re-wrap lines on resize and those that cut them differ, and so do kinds.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._line = 0  # cells since the line began
        self._last = ""  # character
        self._possible: dict[Kind, set[int]] = {kind: {0} for kind in _KINDS}

    def after(self, text: str) -> set[int]:
        """Where the text may end once this is written."""
        return set().union(*self._after(text).values())

    @property
    def in_a_line(self) -> bool:
        return self._line > 0

    def write(self, text: str) -> None:
        self._possible = self._after(text)
        self._last = text[-1:] or self._last
        _, newline, last = text.rpartition("\n")
        self._line = cell_len(last) + (0 if newline else self._line)

    def begin_line(self) -> None:
        """Something else has moved the cursor to the start of a line."""
        self._line = 0
        self._possible = {kind: {0} for kind in _KINDS}

    def resize(self, width: int) -> None:
        """The terminal has another width now."""
        wrapped = self._line % width or (width if self._line else 0)
        for kind, columns in self._possible.items():
            self._possible[kind] = {wrapped} | {min(column, width - 1) for column in columns}
        self.width = width

    def stays(self, text: str) -> bool:
        """Whether the text surely ends in the row where it begins."""
        if "\n" in text or "\t" in text:
            return False
        cells = max(sum(map(kind.cells, text, self._last + text)) for kind in _KINDS)
        return cells < self.width - max(self.after(""))

    def fills(self, text: str) -> bool:
        """Whether the row may be exactly full once this is written."""
        return self.width in self.after(text)

    def _after(self, text: str) -> dict[Kind, set[int]]:
        if not _DOUBTFUL.search(self._last + text) and len(set(map(frozenset, self._possible.values()))) == 1:
            columns = self._possible[_KINDS[0]]
            ends = {self._advance(column, text, _KINDS[0]) for column in columns}
            return dict.fromkeys(_KINDS, ends)
        return {
            kind: {self._advance(column, text, kind) for column in columns} for kind, columns in self._possible.items()
        }

    def _advance(self, column: int, text: str, kind: Kind) -> int:
        last = self._last
        for character in text:
            if character == "\n":
                column = 0
            elif character == "\t":
                column = min((column // _TAB + 1) * _TAB, self.width - 1)
            else:
                cells = kind.cells(character, last)
                column = cells if column + cells > self.width else column + cells
            last = character
        return column


class Below:
    """Rows below the text. `out` is the terminal's stream for everything but the text; `frame` makes the rows."""

    def __init__(self, out: TextIO, frame: Frame) -> None:
        self._out = out
        self._frame = frame
        self._rows: list[str] = []
        self._size = self._terminal()
        self._columns = Columns(self._size.columns)
        self._held: list[Piece] = []
        self.shown = False

    def draw(self) -> None:
        """Make the rows anew and show them."""
        resized = self._follow_size()
        self._rows = self._frame(self._size.columns, self._size.lines)
        self._send(_BEGIN + (_ERASE_BELOW if resized else "") + self._placed() + _END)
        self.shown = True

    def write(self, text: str, into: TextIO) -> None:
        """Text to a stream that ends on the same terminal. Control characters but newline and tab have no place in it.

        Its last characters may be held back: `close` writes them.
        """
        self.write_styled([(text, "")], into)

    def write_styled(self, pieces: list[Piece], into: TextIO) -> None:
        """The same for pieces of text with their styles."""
        pieces, self._held = [*self._held, *pieces], []
        text = "".join(piece for piece, _ in pieces)
        resized = self._follow_size()
        count = len(text)
        while count and self._columns.fills(text[:count]):
            count -= 1
        pieces, self._held = _cut(pieces, count)
        if not count:
            return
        if not self.shown or (not resized and self._columns.stays(text[:count])):
            self._put(pieces, into)
            return
        if resized:
            self._rows = self._frame(self._size.columns, self._size.lines)
        self._send(_BEGIN + _ERASE_BELOW)
        self._put(pieces, into)
        self._send(self._placed() + _END)

    def write_line(self, line: str, into: TextIO) -> None:
        """A line that is not part of the text, above the rows; an unfinished line of text goes on below it."""
        self._follow_size()
        self._send(_BEGIN + _ERASE_BELOW + ("\n" if self._columns.in_a_line else ""))
        self._put([(line + "\n", "")], into)
        self._send((self._placed() if self.shown else "") + _END)

    def begin_line(self) -> None:
        """The text goes on at the start of a line: somebody else has used the terminal."""
        self._columns.begin_line()

    def erase(self) -> None:
        """Remove the rows; the cursor stays where the text ends."""
        if self.shown:
            self._send(_ERASE_BELOW)
            self.shown = False

    def close(self, into: TextIO) -> None:
        """Remove the rows and write what was held back."""
        self.erase()
        held, self._held = self._held, []
        if held:
            self._put(held, into)

    def _put(self, pieces: list[Piece], into: TextIO) -> None:
        into.write("".join(styled(text, style) for text, style in pieces))
        into.flush()
        self._columns.write("".join(text for text, _ in pieces))

    def _placed(self) -> str:
        """Make room, then each row over what stands there: nothing is blank in between.

        Rows may be too long: the terminal can get narrower between the look at its size and what is written.
        """
        count = len(self._rows)
        if not count:
            return _ERASE_BELOW
        room = _DOWN * count + f"\x1b[{count}A"
        rows = "".join(f"\r\n{row}{_ERASE_RIGHT}" for row in self._rows)
        return room + _SAVE + _ERASE_RIGHT + _CUT + rows + _ERASE_REST + _WRAP + _RESTORE

    def _send(self, codes: str) -> None:
        self._out.write(codes)
        self._out.flush()

    def _terminal(self) -> os.terminal_size:
        try:
            size = os.get_terminal_size(self._out.fileno())
        except OSError:  # it has gone away
            return os.terminal_size((80, 24))
        return os.terminal_size((size.columns or 80, size.lines or 24))  # some pseudo-terminals have no size

    def _follow_size(self) -> bool:
        """Whether the terminal has changed its size since the last look."""
        size = self._terminal()
        if size == self._size:
            return False
        if size.columns != self._size.columns:
            self._columns.resize(size.columns)
        self._size = size
        return True


def _cut(pieces: list[Piece], count: int) -> tuple[list[Piece], list[Piece]]:
    """The first so many characters, and the others."""
    first: list[Piece] = []
    others: list[Piece] = []
    for text, style in pieces:
        here = min(len(text), count)
        count -= here
        first += [(text[:here], style)] if here else []
        others += [(text[here:], style)] if here < len(text) else []
    return first, others
