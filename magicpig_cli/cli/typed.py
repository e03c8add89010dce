"""What was typed, as a command that can be typed again."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence

_NOT_SHOWN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are no UTF-8


def command_with(arguments: Sequence[str], flag: str, *, without: Iterable[str]) -> str:
    """This program with these arguments and a flag, some others left out: one line for a POSIX shell."""
    left_out = set(without)
    kept = [argument for argument in arguments if argument not in left_out]
    options_end = kept.index("--") if "--" in kept else len(kept)
    if flag not in kept[:options_end]:
        kept.insert(options_end, flag)
    return " ".join(map(_quoted, [*_program(), *kept]))


def _program() -> list[str]:
    """How this process was started: `magicpig` where the shell finds that, else a path."""
    started = sys.argv[0]
    if os.path.basename(started) == "__main__.py":
        return [_found("python", sys.executable), "-m", "magicpig_cli"]
    return [_found(os.path.basename(started), started)]


def _found(name: str, path: str) -> str:
    """The name where it stands for that path. Not for what a link leads to: an environment's Python is a link."""
    on_path = shutil.which(name)
    return name if on_path is not None and os.path.abspath(on_path) == os.path.abspath(path) else path


def _quoted(argument: str) -> str:
    """As a shell takes it; what would not be seen, in the quotes that bash, zsh and ksh know."""
    if not _NOT_SHOWN.search(argument):
        return shlex.quote(argument)
    text = argument.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _NOT_SHOWN.sub(lambda match: _escaped(match[0]), text) + "'"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogateescape"))
