"""What the chat asks of whoever keeps conversations, and the commands that ask it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from magicpig_cli.config import GenerationOptions
from magicpig_cli.errors import MagicpigError
from magicpig_cli.ui import console

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.ui.chat.state import Chat


@dataclass(frozen=True, slots=True)
class Loaded:
    """A conversation that was kept. sequence: its rows, if they are there and of this model; else it is read again."""

    messages: list[dict[str, str]]
    system: str | None = None
    generation: GenerationOptions | None = None
    sequence: Sequence | None = None
    notices: tuple[str, ...] = ()


class Sessions(Protocol):
    """Keeps conversations. `chat` has `conversation`, `sequence`, `settings` and `engine`; all may raise MagicpigError.

    `name` is that of the present conversation, None while it has none.
    """

    name: str | None

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
    loaded = sessions.load(argument, chat)
    chat.replace(loaded)
    for line in loaded.notices:
        console.say(line)
    turns = sum(message["role"] == "user" for message in loaded.messages)
    console.say(f"{argument}: {turns:,} {'turn' if turns == 1 else 'turns'}; the conversation goes on")


def list_sessions(chat: Chat, _: str) -> None:
    """/sessions"""
    columns, rows = _sessions(chat).table()
    if not rows:
        console.say("there are none; /save NAME keeps this conversation")
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        console.say("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _sessions(chat: Chat) -> Sessions:
    if chat.sessions is None:
        raise MagicpigError("saving conversations is not available here")
    return chat.sessions
