"""The slash commands: what there is, and the short ones. Each takes the chat and what follows its name."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from magicpig_cli.errors import MagicpigError
from magicpig_cli.ui import console
from magicpig_cli.ui.chat import documents, sessions, settings
from magicpig_cli.ui.chat.state import Asked, Chat
from magicpig_cli.units import format_bytes

_KEYS = f"""Enter sends, Alt-Enter or Ctrl-J starts a new line, a line of {'"' * 3} opens and closes a block.
Ctrl-C stops an answer and keeps what is there; while a prompt is read it gives the text back. Ctrl-D leaves."""


class Leave(Exception):
    """The user is done."""


@dataclass(frozen=True, slots=True)
class Command:
    """`run` may return a text for the next prompt to begin with."""

    usage: str
    help: str
    run: Callable[[Chat, str], str | None]

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]


def run(chat: Chat, line: str) -> str | None:
    """Run the command of a line; returns text for the next prompt, if any. Raises Leave, MagicpigError."""
    name, _, argument = line.partition(" ")
    command = _find(name)
    if command is None:
        path = next((path for path in (line, name) if os.path.isfile(path)), None)
        hint = _meant(name) if path is None else f"/file {shlex.quote(path)} puts it into your next message"
        raise MagicpigError(f"there is no command {name}", hint=hint)
    argument = argument.strip()
    if argument and " " not in command.usage:
        raise MagicpigError(f"nothing can follow {name}, but there is {argument!r}", hint=command.name)
    return command.run(chat, argument)


def _meant(name: str) -> str:
    names = [*(command.name for command in COMMANDS), *_ALIASES]
    close = difflib.get_close_matches(name.lower(), names, n=1) if name.strip("/") else []
    return f"did you mean {close[0]}?" if close else "/help lists them"


def _find(name: str) -> Command | None:
    name = _ALIASES.get(name, name)
    return next((command for command in COMMANDS if command.name == name), None)


def _help(_chat: Chat, argument: str) -> None:
    if argument:
        command = _find("/" + argument.lstrip("/"))
        if command is None:
            raise MagicpigError(f"there is no command {argument}", hint=_meant("/" + argument.lstrip("/")))
        console.say(f"{command.usage}  {command.help}")
        return
    width = max(len(command.usage) for command in COMMANDS)
    console.say("\n".join(f"{command.usage:<{width}}  {command.help}" for command in COMMANDS))
    console.say(_KEYS)


def _clear(chat: Chat, _: str) -> None:
    chat.forget()
    console.say("forgotten")


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.set_system(None if argument in ('""', "''") else argument)
    if not argument or not chat.cached_tokens:
        console.say(f"system prompt: {chat.conversation.system or 'none'}")
        return
    console.say(f"system prompt set; your next message reads the {chat.cached_tokens:,} tokens of before again")


def _stats(chat: Chat, _: str) -> None:
    memory = chat.engine.memory()
    parts = [f"{name} {format_bytes(memory[key])}" for name, key in _MEMORY if memory[key]]
    for line in (*chat.totals.lines(), "memory     " + ", ".join(parts)):
        console.say(line)


_MEMORY = (("K/V", "kv_bytes"), ("index", "index_bytes"), ("process", "rss_bytes"), ("GPU", "vram_bytes"))


def _context(chat: Chat, _: str) -> None:
    used, total = chat.cached_tokens, chat.engine.context
    console.say(f"{used:,} of {total:,} tokens ({used / total:.0%})")
    for document in chat.waiting:
        console.say(f"+ {document.tokens:,} of {document.name}, with your next message")


def _regen(chat: Chat, _: str) -> None:
    drawn = chat.setup.drawn
    if chat.gives_the_same and drawn.greedy:
        console.say("temperature 0 gives the same answer; /set temperature 0.7 varies it")
    elif chat.gives_the_same:
        console.say(f"seed {drawn.seed} is fixed and gives the same answer; /set seed default draws another")
    chat.again()


def _undo(chat: Chat, _: str) -> None:
    """The last thing that was done: documents that were chosen, else a turn, whose documents then wait again."""
    if chat.waiting:
        names = ", ".join(document.name for document in chat.waiting)
        chat.waiting = []
        console.say(f"took back {names}")
        return
    asked = _taken_back(chat)
    waits = ", ".join(document.name for document in asked.documents)
    console.say("took back the last turn" + (f"; {waits} goes into your next message" if waits else ""))


def _retry(chat: Chat, _: str) -> str:
    return _taken_back(chat).text


def _taken_back(chat: Chat) -> Asked:
    asked = chat.take_back()
    if asked is None:
        raise MagicpigError("there is no turn to take back")
    chat.count_cache()
    return asked


def _exit(_chat: Chat, _: str) -> None:
    raise Leave


COMMANDS = (
    Command("/help [COMMAND]", "this list", _help),
    Command("/file PATH…", "put documents into your next message", documents.file),
    Command("/context", "tokens used of the context", _context),
    Command("/regen", "answer the last message again", _regen),
    Command("/retry", "take the last message back to edit it", _retry),
    Command("/undo", "take back the last message and its answer, or documents that wait", _undo),
    Command("/clear", "forget the conversation", _clear),
    Command("/system [TEXT]", 'show or set the system prompt ("" for none)', _system),
    Command(
        "/set [KEY [VALUE]]",
        "how answers are drawn and shown; budget: share of keys read",
        settings.set_value,
    ),
    Command("/show", "all settings and where they come from", settings.show),
    Command("/stats", "tokens, times, sampled keys and memory", _stats),
    Command("/save [NAME]", "keep this conversation", sessions.save),
    Command("/load NAME", "go on with one that was kept", sessions.load),
    Command("/sessions", "list those that were kept", sessions.list_sessions),
    Command("/exit", "leave (also /quit, /bye, Ctrl-D)", _exit),
)
_ALIASES = {"/quit": "/exit", "/bye": "/exit", "/?": "/help"}
