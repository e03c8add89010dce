"""Code of a Markdown fence, coloured line by line in the terminal's own colours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from magicpig_cli.ui.styles import Piece

if TYPE_CHECKING:
    from rich.syntax import Syntax

_CONTEXT = 30  # lines before that a line is coloured with: it may stand in a comment or a string that was opened there


class CodeLines:
    """The lines of one block. A language that nobody knows is not coloured."""

    def __init__(self, language: str) -> None:
        self._language = language
        self._before: list[str] = []
        self._syntax: Syntax | None = None

    def line(self, text: str) -> list[Piece]:
        """Pieces of the next line, without its end."""
        if not self._language or not text.strip():
            self._before.append(text)
            return [(text, "")]
        from rich.console import Console
        from rich.syntax import Syntax

        if self._syntax is None:
            self._syntax = Syntax("", self._language, theme="ansi_dark", background_color="default", tab_size=0)
        if self._syntax.lexer is None:
            self._language = ""
            return [(text, "")]
        self._before.append(text)
        if len(self._before) > 2 * _CONTEXT:
            del self._before[:_CONTEXT]
        lines = self._syntax.highlight("\n".join(self._before)).split("\n", allow_blank=True)
        last = lines[len(self._before) - 1]
        last.rstrip_end(len(text))
        if last.plain != text:  # the lexer has changed something (tabs, carriage returns): the code counts
            return [(text, "")]
        console = Console(color_system="standard", force_terminal=True, width=len(text) + 1, legacy_windows=False)
        return [(segment.text, _plain(str(segment.style or ""))) for segment in last.render(console)]


def _plain(style: str) -> str:
    """A style without the background that Rich gives code."""
    words = style.replace(" on default", "").replace("on default", "")
    return "" if words in ("none", "default") else words
