"""Files of results that a command was asked for: refused before there is anything to lose, replaced as a whole."""

from __future__ import annotations

from pathlib import Path

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import refuse_unwritable, replace_file


def want_writable(option: str, path: Path) -> None:
    """Raise UsageError now for what would lose the results at the end."""
    try:
        refuse_unwritable(path)
    except OSError as problem:
        raise UsageError(
            f"{option}: cannot write {path}: {problem.strerror}", hint=f"{option} FILE in a folder of yours"
        ) from None


def write(path: Path, content: bytes) -> None:
    """Make this all that the file holds. Raises MagicpigError."""
    try:
        replace_file(path, content)
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror}") from problem


def want_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value} is unknown", hint=f"use one of {', '.join(allowed)}")
