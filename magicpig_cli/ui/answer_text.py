"""The text of an answer on its way to stdout: styled on a terminal, as the model wrote it anywhere else."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from magicpig_cli.engine.thinking import Tags, ThinkingStream
from magicpig_cli.ui import console
from magicpig_cli.ui.live import View
from magicpig_cli.ui.markdown import Markdown
from magicpig_cli.ui.styles import Piece, merged


@dataclass(frozen=True, slots=True)
class TextLook:
    """How an answer is shown on a terminal. opened: the thinking that the prompt has begun."""

    markdown: bool = True
    think: bool = True
    opened: Tags | None = None


class AnswerText:
    """One answer, to be fed as it comes and finished.

    Without colours (NO_COLOR, TERM=dumb) Markdown stays as it is written: its marks say what styles would. So it does
    on a terminal that cannot show a bullet.
    """

    def __init__(self, view: View, look: TextLook) -> None:
        self._view = view
        self._think = look.think
        self._thought = False  # something of it was shown
        self._any = False  # something was written
        self._ended = True  # and it ends with a line
        self._sorted = ThinkingStream(look.opened) if sys.stdout.isatty() else None
        plain = not look.markdown or not console.styles_text(sys.stdout)
        columns = console.terminal_columns
        self._markdown = None if plain else Markdown(columns, hold_tables=view.counts_tokens)

    def feed(self, text: str) -> None:
        if self._sorted is None:
            self._write(_plain(text))
        else:
            self._show(self._sorted.feed(text))

    def finish(self, tail: str) -> None:
        """The last of the text, and the end of its line."""
        self.feed(tail)
        if self._sorted is not None:
            self._show(self._sorted.finish())
        if self._markdown is not None:
            self._write(self._markdown.finish())
        if not self._ended or not self._any:
            self._write(_plain("\n"))

    def _show(self, parts: list[tuple[bool, str]]) -> None:
        for thinking, text in parts:
            if thinking:
                self._show_thought(text)
            else:
                self._begin_answer()
                self._write(_plain(text) if self._markdown is None else self._markdown.feed(text))

    def _show_thought(self, text: str) -> None:
        dim = "dim" if console.styles_text(sys.stdout) else ""
        if self._think:
            self._write([(text, dim)])
        elif not self._thought:
            self._write([("thinking …", dim)])
        self._thought = True

    def _begin_answer(self) -> None:
        """An empty line between the thought and the answer."""
        if self._thought:
            self._write(_plain("\n" if self._ended else "\n\n"))
            self._thought = False

    def _write(self, pieces: list[Piece]) -> None:
        pieces = merged(pieces)
        if pieces:
            self._view.write_styled(pieces)
            self._any, self._ended = True, pieces[-1][0].endswith("\n")


def _plain(text: str) -> list[Piece]:
    return [(text, "")]
