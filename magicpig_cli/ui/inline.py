"""Inline Markdown of one line: code, bold, italic, struck out. A marker counts only with its partner."""

from __future__ import annotations

import re
from collections.abc import Iterator

from magicpig_cli.ui.styles import Piece, joined, merged

LONGEST_SPAN = 160  # characters after a marker within which its partner ends; so many are held back at most
_MARKER = re.compile(r"`+|\*+|_+|~+|\\")
_STYLES = {("*", 1): "italic", ("_", 1): "italic", ("*", 2): "bold", ("_", 2): "bold", ("*", 3): "bold italic",
           ("_", 3): "bold italic", ("~", 2): "strike"}  # fmt: skip
_ESCAPED = "*_`~#\\"
_NOT_YET = -2
_NONE = -1


class InlineStream:
    """One line of text while it comes. Plain words pass at once; from a marker on, all waits for its partner."""

    def __init__(self, style: str = "") -> None:
        self._style = style
        self._held = ""
        self._before = ""  # the character before what is held

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain now."""
        self._held += text
        return self._scan(final=False)

    def finish(self) -> list[Piece]:
        """The line has ended."""
        return self._scan(final=True)

    def _scan(self, *, final: bool) -> list[Piece]:
        pieces, rest = _spans(self._held, self._style, self._before, final=final)
        taken = len(self._held) - rest
        if taken:
            self._before = self._held[taken - 1]
            self._held = self._held[taken:]
        return merged(pieces)


def inline(text: str, style: str = "") -> list[Piece]:
    """Pieces of a whole line."""
    return merged(_spans(text, style, "", final=True)[0])


def _spans(text: str, style: str, before: str, *, final: bool) -> tuple[list[Piece], int]:
    """Pieces of the text, and how many characters at its end cannot be decided yet."""
    pieces: list[Piece] = []
    at = 0
    while marker := _MARKER.search(text, at):
        pieces.append((text[at : marker.start()], style))
        run, after = marker[0], marker.end()
        if after == len(text) and not final:
            return pieces, len(run)
        if run == "\\":
            escapes = text[after : after + 1] != "" and text[after] in _ESCAPED
            pieces.append((text[after] if escapes else run, style))
            at = after + escapes
            continue
        previous = text[marker.start() - 1] if marker.start() else before
        closing = _closing(text, run, previous, after, final=final)
        if closing == _NOT_YET and len(text) - after <= LONGEST_SPAN:
            return pieces, len(text) - marker.start()
        if closing < 0:
            pieces.append((run, style))
            at = after
            continue
        inner = text[after:closing]
        if run[0] == "`":
            pieces.append((_code(inner), joined(style, "cyan")))
        else:
            pieces += _spans(inner, joined(style, _STYLES[run[0], len(run)]), run[0], final=True)[0]
        at = closing + len(run)
    pieces.append((text[at:], style))
    return pieces, 0


def _code(inner: str) -> str:
    """One space at both sides belongs to the marks."""
    padded = inner.startswith(" ") and inner.endswith(" ") and inner.strip()
    return inner[1:-1] if padded else inner


def _closing(text: str, run: str, previous: str, after: int, *, final: bool) -> int:
    """Where the partner of an opening run begins; _NONE if there is none, _NOT_YET if it may come."""
    code = run[0] == "`"
    if not code and ((run[0], len(run)) not in _STYLES or not _opens(run[0], previous, text[after : after + 1])):
        return _NONE
    for match in _runs(text, run, after):
        following = text[match.end() : match.end() + 1]
        if not following and not final:  # it may grow, or go on as a word
            return _NOT_YET
        if run == "__" and " " not in text[after : match.start()]:  # __init__, mostly
            continue
        if code or _closes(run[0], text[match.start() - 1], following):
            return match.start()
    return _NONE if final else _NOT_YET


def _runs(text: str, run: str, start: int) -> Iterator[re.Match[str]]:
    """Runs of just as many of the same character near the start, none of them right there."""
    for match in re.compile(f"{re.escape(run[0])}+").finditer(text, start, start + LONGEST_SPAN + 1):
        if match.start() > start and len(match[0]) == len(run) and match.end() <= start + LONGEST_SPAN:
            yield match


def _opens(character: str, previous: str, following: str) -> bool:
    if not following or following.isspace():
        return False
    if character == "_" and previous.isalnum():
        return False
    return following.isalnum() or not previous.isalnum() or following in "`\"'“‘([{*_$<"


def _closes(character: str, previous: str, following: str) -> bool:
    return not previous.isspace() and not (character == "_" and following.isalnum())
