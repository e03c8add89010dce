"""A conversation on a terminal. Earlier turns stay in the cache: only what is new is read."""

from __future__ import annotations

import difflib
import shlex
import sys
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from magicpig_cli.config import Settings
from magicpig_cli.engine.conversation import Conversation, common_prefix, document_message, read_document
from magicpig_cli.engine.engine import Engine
from magicpig_cli.errors import ContextError, MagicpigError
from magicpig_cli.ui import console
from magicpig_cli.ui.answer import Interrupts, show_notices, statistics_line, stream_answer

_BLOCK = '"""'
_COMMANDS = {
    "/help": "this list",
    "/file PATH…": "put documents into your next message",
    "/system [TEXT]": "show or set the system prompt (starts over)",
    "/context": "tokens used of the context",
    "/undo": "take back the last question and its answer",
    "/clear": "forget the conversation",
    "/exit": "leave (also /quit, /bye, Ctrl-D)",
}
_HELP = """Enter sends, Alt-Enter or Ctrl-J starts a new line, a line of \"\"\" opens and closes a block.
Ctrl-C stops an answer and keeps what is there."""


class _Leave(Exception):
    """The user is done."""


def _screen() -> TextIO:
    """Where the prompt is drawn: never into a file or pipe that collects answers."""
    for stream in (sys.stderr, sys.stdout):
        if stream.isatty():
            return stream
    return Path("/dev/tty").open("w", encoding="utf-8")


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        opened = buffer.text.lstrip().startswith(_BLOCK)
        closed = opened and buffer.text.rstrip().endswith(_BLOCK) and len(buffer.text.strip()) >= 2 * len(_BLOCK)
        if opened and not closed:
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return bindings


def _unblock(text: str) -> str:
    """What was meant by a block: the text between the quotes."""
    stripped = text.strip()
    if stripped.startswith(_BLOCK) and stripped.endswith(_BLOCK) and len(stripped) >= 2 * len(_BLOCK):
        return stripped[len(_BLOCK) : -len(_BLOCK)].strip("\n")
    return text


class _Chat:
    """The state of one conversation: messages, their cache, documents waiting for the next message."""

    def __init__(
        self, engine: Engine, settings: Settings, documents: list[tuple[str, str]], *, quiet: bool, live: bool
    ) -> None:  # fmt: skip
        self.engine, self.settings, self.quiet, self.live = engine, settings, quiet, live
        self.conversation = Conversation(engine.codec, settings.system)
        self.sequence = engine.new_sequence()
        self.documents = documents
        self.interrupts = Interrupts()

    def turn(self, text: str) -> str | None:
        """Answer one message. Returns the text to edit again if the turn was dropped."""
        documents, self.documents = self.documents, []
        self.conversation.add_user(document_message(documents, text) if documents else text)
        try:
            ids = self._prompt_ids()
            show_notices(self.engine, quiet=self.quiet)
            request = self.engine.request("chat", ids, self.settings.generation, self.sequence)
            finished = stream_answer(
                self.engine, request, self.interrupts, show_text=True, quiet=self.quiet, live=self.live
            )
        except ContextError as error:
            console.error(ContextError(error.message, hint="/undo or /clear makes room; -c gives a larger context"))
            finished = None
        except MagicpigError as error:
            console.error(error)
            finished = None
        except KeyboardInterrupt:
            self._drop(documents)
            raise
        if finished is None or (finished.reason == "interrupted" and not finished.token_ids):
            self._drop(documents)
            return text
        self.conversation.add_assistant(finished.text)
        if not self.quiet:
            console.say(statistics_line(finished))
        return None

    def _prompt_ids(self) -> list[int]:
        """Tokens of the conversation. Ctrl-C meanwhile (a very long document) raises MagicpigError, twice ends all."""
        try:
            return self.conversation.prompt_ids()
        except KeyboardInterrupt:
            if self.interrupts.is_second():
                raise
            raise MagicpigError("interrupted before the prompt was read") from None

    def _drop(self, documents: list[tuple[str, str]]) -> None:
        """As if the last message had not been sent; its documents wait for the next one."""
        self.conversation.undo()
        self.documents = documents

    def command(self, line: str) -> None:
        """Run a slash command. Raises _Leave, MagicpigError."""
        name, _, argument = line.partition(" ")
        actions = {
            "/help": self._help, "/file": self._file, "/system": self._system, "/context": self._context,
            "/undo": self._undo, "/clear": self._clear, "/exit": self._exit, "/quit": self._exit, "/bye": self._exit,
        }  # fmt: skip
        if name not in actions:
            close = difflib.get_close_matches(name, actions, n=1)
            raise MagicpigError(f"there is no command {name}", hint=close[0] if close else "/help lists them")
        actions[name](argument.strip())

    def _help(self, _: str) -> None:
        width = max(map(len, _COMMANDS))
        console.say("\n".join(f"{name:<{width}}  {what}" for name, what in _COMMANDS.items()) + "\n" + _HELP)

    def _file(self, argument: str) -> None:
        try:
            paths = shlex.split(argument)
        except ValueError as problem:
            raise MagicpigError(f"/file {argument}: {problem}", hint='quote the path: /file "it\'s.txt"') from problem
        if not paths:
            raise MagicpigError("/file needs a path", hint="/file report.txt")
        for path in paths:
            text = read_document(path)
            self.documents.append((Path(path).name, text))
            console.say(f"{path}: {self.engine.codec.count(text):,} tokens, goes into your next message")

    def _system(self, argument: str) -> None:
        if not argument:
            console.say(self.conversation.system or "no system prompt")
            return
        self.conversation = Conversation(self.engine.codec, argument)
        self.sequence.truncate(0)
        console.say("system prompt set; the conversation starts over")

    def _context(self, _: str) -> None:
        console.say(f"{self.sequence.length:,} of {self.engine.context:,} tokens")

    def _undo(self, _: str) -> None:
        taken = self.conversation.undo()
        if taken is None:
            raise MagicpigError("there is no turn to take back")
        kept = self.conversation.prompt_ids() if self.conversation.messages else []
        self.sequence.truncate(common_prefix(self.sequence.ids, kept))
        console.say("took back the last turn")

    def _clear(self, _: str) -> None:
        self.conversation.clear()
        self.documents = []
        self.sequence.truncate(0)
        console.say("forgotten")

    def _exit(self, _: str) -> None:
        raise _Leave


def converse(
    engine: Engine, settings: Settings, documents: list[tuple[str, str]], *, quiet: bool, live: bool = True
) -> None:
    """Prompt and answer until the user leaves. Ctrl-C twice within a second raises KeyboardInterrupt."""
    chat = _Chat(engine, settings, documents, quiet=quiet, live=live)
    session: PromptSession[str] = PromptSession(
        key_bindings=_key_bindings(), multiline=True, output=create_output(_screen())
    )
    if not quiet:
        console.say(f"{engine.model_name} · {engine.context:,} tokens of context · /help lists commands")
    default = ""
    while True:
        try:
            line = session.prompt(ANSI("\x1b[1m>\x1b[0m "), default=default)
        except KeyboardInterrupt:
            if chat.interrupts.is_second():
                raise
            console.say("Ctrl-C again, Ctrl-D or /exit leaves")
            continue
        except EOFError:
            return
        default = ""
        try:
            if line.lstrip().startswith("/") and "\n" not in line.strip():  # a pasted block is always a message
                chat.command(line.strip())
            elif _unblock(line).strip():
                default = chat.turn(_unblock(line)) or ""
        except KeyboardInterrupt:
            if chat.interrupts.is_second():
                raise
            console.say("interrupted")
        except MagicpigError as error:
            console.error(error)
        except _Leave:
            return
