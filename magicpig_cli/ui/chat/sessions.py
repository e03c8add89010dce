"""What the chat asks of whoever keeps conversations, and the commands that ask it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Protocol

from rich.cells import cell_len, set_cell_size

from magicpig_cli.errors import MagicpigError
from magicpig_cli.sessions import Loaded
from magicpig_cli.ui import console

if TYPE_CHECKING:
    from magicpig_cli.ui.chat.state import Chat


class Sessions(Protocol):
    """Keeps conversations. `chat` has `conversation`, `sequence`, `settings` and `engine`; all may raise MagicpigError.

    `name` is that of the present conversation, None while it has none.
    """

    name: str | None

    def open(self, name: str, chat: Chat) -> Loaded | None:
        """At the start: read one that was kept, or begin it (None)."""

    def save(self, name: str | None, chat: Chat) -> list[str]:
        """Keep it, under its own name if None. Returns lines to say."""

    def load(self, name: str, chat: Chat) -> Loaded:
        """Read one that was kept; from now on it is the present one."""

    def names(self) -> list[str]:
        """All that can be loaded, the most recent first."""

    def table(self) -> tuple[Rows[str], Rows[Rows[str]]]:
        """(column names, rows) of what can be loaded."""

    def after_turn(self, chat: Chat) -> None:
        """An answer has been added."""

    def leave(self, chat: Chat) -> None:
        """The chat ends, by whatever way but kill -9."""


def save(chat: Chat, argument: str) -> None:
    """/save [NAME]"""
    for line in _sessions(chat).save(argument or None, chat):
        console.say(line)


def load(chat: Chat, argument: str) -> None:
    """/load NAME"""
    sessions = _sessions(chat)
    if not argument:
        raise MagicpigError("/load needs a name", hint="/sessions lists them")
    _go_on(chat, argument, sessions.load(argument, chat))


def open_session(chat: Chat, name: str) -> None:
    """At the start of a chat: go on with a conversation that was kept, or begin one of this name."""
    loaded = _sessions(chat).open(name, chat)
    if loaded is not None:
        _go_on(chat, name, loaded, quiet=chat.quiet)
    elif not chat.quiet:
        console.say(f"{name}: a new conversation, kept after every turn")


def _go_on(chat: Chat, name: str, loaded: Loaded, *, quiet: bool = False) -> None:
    chat.replace(loaded)
    turns = "1 turn" if loaded.turns == 1 else f"{loaded.turns:,} turns"
    for line in () if quiet else (*loaded.notices, f"{name}: {turns}; the conversation goes on"):
        console.say(line)


def list_sessions(chat: Chat, _: str) -> None:
    """/sessions"""
    columns, rows = _sessions(chat).table()
    if not rows:
        console.say("there are none; /save NAME keeps this conversation")
        return
    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        console.say("  ".join(map(set_cell_size, row, widths)).rstrip())


def _sessions(chat: Chat) -> Sessions:
    if chat.sessions is None:
        raise MagicpigError("saving conversations is not available here")
    return chat.sessions
