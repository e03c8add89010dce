"""Markdown of an answer while it is written, append-only: nothing that is on the screen is ever drawn again.

What waits, and for what:
- Words of paragraphs, headings, lists and quotes pass as they come: people read along, and a block can take a minute
  at 12 tokens a second. Only from an inline marker on (`*`, backtick) text waits for its partner, mostly a few words;
  if none comes on the line or within LONGEST_SPAN characters, it is printed as the model wrote it. So a style is never
  wrong and no character vanishes: `2 ** 3`, `snake_case` and `**/*.py` stay.
- Code waits for the end of its line, then the line is coloured once. Fences stay, dimmed: they say the language, and
  what is copied is the code without frames or spaces around it.
- A table waits for its end, since its last row may be the widest; the panel below counts on meanwhile. Where there is
  no panel, rows pass as they are.

Lines are not broken here: the terminal wraps them, and unwraps them for a copy or another width (docs/decisions/009).
Rendering whole blocks (Rich's Markdown) would hold back each paragraph to its end and break its lines for good.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from magicpig_cli.ui.code import CodeLines
from magicpig_cli.ui.inline import InlineStream
from magicpig_cli.ui.styles import Piece, merged
from magicpig_cli.ui.table import table_pieces

_LONGEST_LINE = 2000  # characters that may wait for the end of a line
_UNDECIDED = re.compile(r"#{1,6}|\d{1,9}[.)]?|[-+*_](?:[-*_ ]{0,20})|`{1,2}|~{1,2}|>?|")  # at a line's start
_RULE = re.compile(r"(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})")
_FENCE = re.compile(r"(`{3,}|~{3,})\s*([^`\s]*)[^`]*")
_HEADING = re.compile(r"(#{1,6})[ \t]+")
_BULLET = re.compile(r"[-+*][ \t]+(?=\S)")
_NUMBER = re.compile(r"\d{1,9}[.)][ \t]+")
_QUOTE = re.compile(r">[ \t]?")
_HEADINGS = {1: "bold underline", 2: "bold"}  # deeper ones are bold too


class Markdown:
    """One answer. `columns` tells the width for a table; hold_tables: see above."""

    def __init__(self, columns: Callable[[], int], *, hold_tables: bool = True) -> None:
        self._columns = columns
        self._hold_tables = hold_tables
        self._line = ""  # what waits of the present line
        self._inline: InlineStream | None = None  # of a line whose words pass
        self._fence: str | None = None  # the marks that opened a block of code
        self._code: CodeLines | None = None
        self._raw = False  # the present line is too long to wait for
        self._table: list[str] = []

    def feed(self, text: str) -> list[Piece]:
        """Pieces that can be shown now."""
        pieces: list[Piece] = []
        for part in text.splitlines(keepends=True) if "\n" in text else [text]:
            pieces += self._take(part.removesuffix("\n"), ended=part.endswith("\n"))
        return merged(pieces)

    def finish(self) -> list[Piece]:
        """The answer has ended, maybe in the middle of anything."""
        pieces = self._take("", ended=True, newline="") if self._line or self._inline else []
        return merged([*pieces, *self._end_table()])

    def _take(self, text: str, *, ended: bool, newline: str = "\n") -> list[Piece]:
        """A piece of one line."""
        if self._raw:
            pieces: list[Piece] = [(text, "")]
        elif self._inline is not None:
            pieces = self._inline.feed(text)
        else:
            self._line += text
            pieces = self._begin(ended) if self._fence is None else self._code_line(ended)
        if not ended:
            return pieces
        if self._inline is not None:
            pieces += self._inline.finish()
        if self._table and not pieces:  # the line waits with its table
            newline = ""
        self._line, self._inline, self._raw = "", None, False
        return [*pieces, (newline, "")]

    def _begin(self, ended: bool) -> list[Piece]:
        """Pieces of a line that has just begun; none while it is open what it will be."""
        body = self._line.lstrip(" \t")
        if body.startswith("|") and self._hold_tables and len(self._line) < _LONGEST_LINE:
            if ended:
                self._table.append(self._line)
            return []
        if not ended and self._waits(body):
            return []
        return self._end_table() + (self._whole(body) if ended else self._open(body))

    def _waits(self, body: str) -> bool:
        """Whether the rest of the line may change what it is."""
        if len(self._line) >= _LONGEST_LINE:
            return False
        fence = body.startswith(("```", "~~~")) and len(body) < _LONGEST_LINE // 10
        return fence or _UNDECIDED.fullmatch(body) is not None

    def _whole(self, body: str) -> list[Piece]:
        """A line that came at once, or waited for its end."""
        if fence := _FENCE.fullmatch(body):
            self._fence, self._code = fence[1], CodeLines(fence[2])
            return [(self._line, "dim")]
        if _RULE.fullmatch(body):
            return [("─" * min(40, self._columns() - 1), "dim")]
        return self._open(body)

    def _open(self, body: str) -> list[Piece]:
        """The mark of a line whose words pass from now on."""
        indent = self._line[: len(self._line) - len(body)]
        style, mark = "", indent
        if match := _HEADING.match(body):
            style, mark = _HEADINGS.get(len(match[1]), "bold"), ""
        elif match := _BULLET.match(body):
            mark = indent + "• "
        elif match := _NUMBER.match(body):
            mark = indent + match[0]
        elif match := _QUOTE.match(body):
            style, mark = "italic", indent + "▌ "
        self._inline = InlineStream(style)
        rest = body[match.end() :] if match else body
        return [(mark, "dim" if style == "italic" else ""), *self._inline.feed(rest)]

    def _code_line(self, ended: bool) -> list[Piece]:
        assert self._fence is not None
        assert self._code is not None
        if not ended:
            if len(self._line) < _LONGEST_LINE:
                return []
            self._raw = True
            return [(self._line, "")]
        mark = self._line.strip()
        if mark.startswith(self._fence) and not mark.strip(self._fence[0]):
            self._fence = self._code = None
            return [(self._line, "dim")]
        return self._code.line(self._line)

    def _end_table(self) -> list[Piece]:
        rows, self._table = self._table, []
        return table_pieces(rows, self._columns()) if rows else []
