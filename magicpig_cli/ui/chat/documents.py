"""/file: documents for the next message, with what they take of the context."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicpig_cli.engine.documents import read_document
from magicpig_cli.errors import ContextError, MagicpigError
from magicpig_cli.ui import console
from magicpig_cli.ui.chat.patience import interruptible

if TYPE_CHECKING:
    from magicpig_cli.ui.chat.state import Chat

# Characters per token of the context that are counted at first: a file of many gigabytes is refused without counting
# it all. Words of English prose have 4 to 6, tokens 4.
_LONGEST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Waiting:
    """A document for the next message."""

    name: str
    text: str
    tokens: int


def file(chat: Chat, argument: str) -> None:
    """/file PATH…; without one it lists what waits."""
    try:
        words = shlex.split(argument)
    except ValueError as problem:
        raise MagicpigError(f"/file {argument}: {problem}", hint='quote the path: /file "it\'s.txt"') from problem
    if not words and not chat.waiting:
        raise MagicpigError("/file needs a path", hint="/file report.txt")
    if not words:
        for document in chat.waiting:
            console.say(f"{document.name}: {document.tokens:,} tokens, waits for your next message")
    for path in [path for word in words for path in _expanded(word)]:
        add_document(chat, path, read_document(path))


def add_document(chat: Chat, name: str, text: str) -> None:
    """Let a document wait for the next message, and say what it takes. Raises ContextError if it has no room."""
    used, total = chat.used_tokens, chat.engine.context
    begin = text[: _LONGEST_TOKENS * total]
    tokens = interruptible(lambda: chat.engine.codec.count(begin))
    cut = len(begin) < len(text)
    if cut and used + tokens < total:  # long tokens: they all count
        tokens, cut = interruptible(lambda: chat.engine.codec.count(text)), False
    if used + tokens >= total:  # the answer takes one at least
        beside = f" beside the {used:,} in use" if used else ""
        raise ContextError(
            f"{name} has {'more than ' * cut}{tokens:,} tokens, which do not fit{beside}: the context is {total:,}",
            hint="split the document, /clear, or start with a larger -c",
        )
    chat.waiting.append(Waiting(Path(name).name, text, tokens))
    if not chat.quiet:
        then = used + tokens
        console.say(
            f"{name}: {tokens:,} tokens, goes into your next message; "
            f"context then {then:,} of {total:,} ({then / total:.0%})"
        )


def _expanded(word: str) -> Iterable[str]:
    """The files that a pattern stands for; a name that exists, or no pattern, is itself."""
    if not glob.has_magic(word) or Path(word).exists():
        return [word]
    return sorted(glob.glob(str(Path(word).expanduser()))) or [word]
