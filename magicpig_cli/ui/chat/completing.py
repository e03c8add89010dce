"""Completion of slash commands and of what follows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from magicpig_cli.ui.chat.commands import COMMANDS
from magicpig_cli.ui.chat.editing import is_command
from magicpig_cli.ui.chat.settings import KEYS, choices

if TYPE_CHECKING:
    from magicpig_cli.ui.chat.state import Chat


class SlashCompleter(Completer):
    """Names of commands, paths for /file, names for /load and /save, keys and some values for /set."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        line = document.text_before_cursor.lstrip()
        if not is_command(document.text):
            return
        name, space, argument = line.partition(" ")
        if not space:
            for command in COMMANDS:
                if command.name.startswith(name):
                    yield Completion(
                        command.name, start_position=-len(name), display=command.usage, display_meta=command.help
                    )
        elif name == "/file":
            yield from self._path(argument, complete_event)
        else:
            *before, word = argument.split(" ")
            for value in self._values(name, before):
                if value.startswith(word):
                    yield Completion(value, start_position=-len(word))

    def _values(self, name: str, before: list[str]) -> Iterable[str]:
        if name in ("/load", "/save") and not before:
            return self._chat.sessions.names() if self._chat.sessions is not None else ()
        if name == "/set":
            return choices(before[0]) if before else KEYS
        return ()

    def _path(self, argument: str, event: CompleteEvent) -> Iterable[Completion]:
        """The last path. One with a space is quoted, or the space escaped, and both stay as they were typed."""
        word = argument[len(argument) - len(_last_word(argument)) :]
        plain = word.lstrip("'\"").replace("\\ ", " ")
        quoted = word[:1] in ("'", '"')
        for found in self._paths.get_completions(Document(plain), event):
            text = found.text if quoted else found.text.replace(" ", "\\ ")
            yield Completion(text, start_position=0, display=found.display)


def _last_word(argument: str) -> str:
    """What of the argument belongs to the path that is being typed."""
    for quote in ("'", '"'):
        if argument.count(quote) % 2:
            return argument[argument.rindex(quote) :]
    at = len(argument)
    while at and not (argument[at - 1] == " " and argument[at - 2 : at - 1] != "\\"):
        at -= 1
    return argument[at:]
