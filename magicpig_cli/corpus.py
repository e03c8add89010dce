"""Text that every Python installation has, so that nothing needs to be downloaded to measure something."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

from magicpig_cli.errors import UsageError

_SOURCE_CHARACTERS = 2_000_000  # of the standard library: more than any context holds


def natural_text() -> str:
    """English prose and examples: the help topics of the language."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def python_source() -> str:
    """Python code: the modules at the top of the standard library, in order of name."""
    parts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, parts)) >= _SOURCE_CHARACTERS:
            break
    return "\n\n".join(parts)


SHIPPED: Mapping[str, Callable[[], str]] = {"pydoc_data.topics": natural_text, "stdlib": python_source}


def read_text(path: Path) -> str:
    """The text of a file. Raises UsageError."""
    try:
        return path.expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except (RuntimeError, ValueError) as problem:  # ~ of a user who is not there, a NUL in the name
        reason = str(problem)
    raise UsageError(f"cannot read {path}: {reason}", hint="--text FILE with plain text")


def repeat_ids(ids: list[int], length: int) -> list[int]:
    """The first `length` ids, from the start again where they end."""
    return (ids * -(-length // len(ids)))[:length]
