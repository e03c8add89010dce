"""The line that people type into: Enter sends, Alt-Enter and Ctrl-J begin a new line, three quotes open a block."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import Completer
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import ANSI, AnyFormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from magicpig_cli.ui.chat.history import CappedHistory, history_path

BLOCK = '"""'
_PROMPT = ANSI("\x1b[1m>\x1b[0m ")


def editor(completer: Completer, toolbar: Callable[[], AnyFormattedText]) -> PromptSession[str]:
    """The prompt. Its `prompt` raises KeyboardInterrupt (Ctrl-C) and EOFError (Ctrl-D on an empty line)."""
    return PromptSession(
        _PROMPT, key_bindings=_key_bindings(), multiline=True, prompt_continuation="  ",
        output=create_output(_screen()), history=CappedHistory(history_path()), completer=completer,
        complete_while_typing=Condition(_is_command), bottom_toolbar=toolbar, reserve_space_for_menu=6,
        enable_suspend=True,
    )  # fmt: skip


def is_command(line: str) -> bool:
    """Whether a line is a slash command. A pasted block is always a message."""
    return line.lstrip().startswith("/") and "\n" not in line.strip()


def unblocked(text: str) -> str:
    """What was meant by a block: the text between the quotes."""
    return text.strip()[len(BLOCK) : -len(BLOCK)].strip("\n") if _opens_block(text) and _closes_block(text) else text


def _is_command() -> bool:
    return is_command(get_app().current_buffer.text)


def _opens_block(text: str) -> bool:
    return text.lstrip().startswith(BLOCK)


def _closes_block(text: str) -> bool:
    return text.rstrip().endswith(BLOCK) and len(text.strip()) >= 2 * len(BLOCK)


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
        if _opens_block(buffer.text) and not _closes_block(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    return bindings
