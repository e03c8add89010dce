"""`magicpig` with a model that answers what a test says, on a terminal.

All but the choice of tokens is real. A token is a byte, so characters come in pieces.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import BinaryIO

from tests import warm

END = "ÿ"  # the character that stands for the byte that ends an answer
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@dataclass(frozen=True)
class Script:
    """What the model says, one answer after another; how long a token takes, and a piece of keys and values on disk."""

    answers: tuple[str, ...]
    pause_s: float = 0.0
    piece_s: float = 0.0


@dataclass(frozen=True)
class Program:
    """`magicpig ARGUMENTS…` on the terminal at a path."""

    arguments: tuple[str, ...]
    script: Script
    terminal: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")


def start(program: Program) -> ForkServerProcess:
    """Start it; the process has `exitcode`, `join` and `kill`."""
    process = warm.server().Process(target=_run, args=(program,))
    process.start()
    return process


def _run(program: Program) -> None:
    """In the new process."""
    _take_terminal(program.terminal)
    for name in program.unset:
        os.environ.pop(name, None)
    os.environ.update(program.environment)
    os.chdir(program.folder)
    from magicpig_cli import speeds
    from magicpig_cli.cli import app
    from tests.conftest import STEADY_SPEEDS

    speeds.load_or_measure = lambda *_, **__: STEADY_SPEEDS  # type: ignore[assignment]
    _install(program.script)
    sys.argv = ["magicpig", *program.arguments]
    app.main()


def _take_terminal(path: str) -> None:
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    warm.open_streams(terminal, terminal, terminal)
    warm.take_terminal()


def _install(script: Script) -> None:
    """Replace the choice of tokens."""
    from magicpig_cli.engine import sampling, scheduler
    from magicpig_cli.model.loader import _byte_tokenizer

    tokenizer = _byte_tokenizer()
    answers = iter([tokenizer(text)["input_ids"] for text in script.answers])
    end = tokenizer.convert_tokens_to_ids(END)

    class Scripted(sampling.TokenSampler):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            self._ids = [*next(answers, []), end]

        def pick(self, logits: object) -> int:
            time.sleep(script.pause_s)
            return self._ids.pop(0)

    scheduler.TokenSampler = Scripted  # type: ignore[misc]
    if script.piece_s:
        _slow_down(script.piece_s)


def _slow_down(piece_s: float) -> None:
    """A disk on which each piece of a file of keys and values takes so long."""
    from magicpig_cli.cache import snapshot

    write_pieces = snapshot._write_pieces

    def slowly(file: BinaryIO, snap: snapshot.Snapshot, go_on: Callable[[], None]) -> list[int]:
        def in_time() -> None:
            file.flush()
            time.sleep(piece_s)
            go_on()

        return write_pieces(file, snap, in_time)

    snapshot._write_pieces = slowly


def statistics(rows: list[str]) -> list[tuple[int, int, int]]:
    """(prompt, completion, reused) tokens of each answer. A token is a byte."""
    found = re.findall(r"^(\d[\d,]*) \+ (\d[\d,]*) tokens(?: \((\d[\d,]*) reused\))?", "\n".join(rows), re.MULTILINE)
    return [tuple(int((count or "0").replace(",", "")) for count in counts) for counts in found]  # type: ignore[misc]


def tokens(*messages: str) -> int:
    """Of a prompt of these messages: the template puts three characters before each, and before the answer."""
    return sum(3 + len(message) for message in messages) + 3
