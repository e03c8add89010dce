"""The files of conversations that are kept: where they are, what they are called, and who has one open.

NAME.json is readable: messages, system text, model, settings, dates. NAME.safetensors holds keys, values and index
(`cache.saved`). It may be older than the messages or missing: what it lacks is read again. Both are for their owner's
eyes alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

import platformdirs

from magicpig_cli.config import APP_NAME, GenerationOptions
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import replace_file
from magicpig_cli.lock import locked

FORMAT = "magicpig-session"
VERSION = 1
PRIVATE = 0o600
_NAME = re.compile(r"\w[\w .+-]{0,63}")


@dataclass(frozen=True, slots=True)
class Kept:
    """What a list of sessions shows of one."""

    name: str
    updated: str  # ISO 8601, UTC
    model: str
    turns: int
    tokens: int
    bytes: int  # of both files


def folder() -> Path:
    """Where sessions are kept."""
    return platformdirs.user_data_path(APP_NAME) / "sessions"


def text_path(name: str) -> Path:
    return folder() / f"{name}.json"


def cache_path(name: str) -> Path:
    return folder() / f"{name}.safetensors"


def temporary_name(name: str) -> str:
    """Of the file of keys and values while it is written."""
    return f".{name}.new"


def checked_name(name: str) -> str:
    """A name that is nothing but a file's name. Raises UsageError."""
    name = unicodedata.normalize("NFC", name.strip())
    if not _NAME.fullmatch(name) or name.endswith(".") or len(name.encode()) > 200:
        raise UsageError(
            f"{name!r} is no name for a session",
            hint="up to 64 letters, digits, spaces and . _ + -, beginning with a letter or digit",
        )
    return name


def dated_name() -> str:
    """A name made of the date that nobody has taken."""
    today = datetime.now().strftime("%Y-%m-%d")
    number = 1
    while text_path(f"{today}-{number}").exists():
        number += 1
    return f"{today}-{number}"


def kept() -> list[Kept]:
    """All sessions, the most recent first. Files that are none are passed over."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(MagicpigError, OSError):
            content = read(path.stem)
            size = sum(file.stat().st_size for file in (path, cache_path(path.stem)) if file.exists())
            found.append(
                Kept(path.stem, content["updated"], content["model"]["name"], content["turns"], content["tokens"], size)
            )
    return sorted(found, key=lambda one: one.updated, reverse=True)


def most_recent() -> str:
    """Name of the session that was used last. Raises UsageError if there is none."""
    found = kept()
    if not found:
        raise UsageError("there is no conversation to continue", hint="magicpig chat --session NAME keeps one")
    return found[0].name


def model_of(name: str) -> tuple[str, str | None] | None:
    """What was given as --model and --revision for a session; None if it is new, or does not say.

    Raises MagicpigError.
    """
    if not text_path(name).exists():
        return None
    model = read(name)["model"]
    given = model.get("given")
    return (given, model.get("given_revision")) if isinstance(given, str) else None


def read(name: str) -> dict[str, Any]:
    """What the JSON of a session says, as far as the program relies on it. Raises MagicpigError."""
    path = text_path(name)
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] > VERSION:
            raise MagicpigError(
                f"session {name} was kept by a newer version of magicpig: format {content['version']}, this one reads "
                f"{VERSION}",
                hint="update magicpig",
            )
        _check(content)
    except FileNotFoundError:
        raise MagicpigError(f"there is no session {name}", hint="/sessions lists them") from None
    except OSError as problem:
        raise MagicpigError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise MagicpigError(f"{path} is no session: {problem}", hint="mend it, or delete it") from problem
    return content


def _check(content: dict[str, Any]) -> None:
    """Raise an error of some kind for a content that people have edited wrongly."""
    wanted = {"updated": str, "created": str, "turns": int, "tokens": int, "messages": list, "model": dict}
    for key, kind in wanted.items():
        if not isinstance(content[key], kind):
            raise ValueError(f"{key} is {content[key]!r}")
    if not isinstance(content.get("system"), str | None):
        raise ValueError(f"system is {content['system']!r}")
    for message in content["messages"]:
        if message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
            raise ValueError(f"a message is {message!r}")
    content["model"]["name"]
    generation_of(content)


def generation_of(content: dict[str, Any]) -> GenerationOptions:
    """How answers were drawn, from what `read` returns; what this version does not know is left out."""
    saved = (content.get("settings") or {}).get("generation") or {}
    known = {field.name for field in fields(GenerationOptions)}
    given = {key: value for key, value in saved.items() if key in known and value is not None}
    stop = given.pop("stop", [])
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop is {stop!r}")
    for key, value in given.items():
        whole = key in ("max_tokens", "top_k", "seed")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise ValueError(f"{key} is {value!r}")
    return GenerationOptions(**given, stop=tuple(stop))


def write(name: str, content: dict[str, Any]) -> None:
    """Replace the JSON of a session. Raises MagicpigError."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **content}, ensure_ascii=False, indent=1) + "\n"
    try:
        replace_file(text_path(name), text.encode("utf-8", errors="backslashreplace"), mode=PRIVATE)
    except OSError as problem:
        raise MagicpigError(f"cannot write {text_path(name)}: {problem.strerror or problem}") from problem


def remove_cache(name: str) -> None:
    """Remove keys and values, if there are any. Raises MagicpigError."""
    try:
        cache_path(name).unlink(missing_ok=True)
    except OSError as problem:
        raise MagicpigError(f"cannot remove {cache_path(name)}: {problem.strerror or problem}") from problem


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """While inside, no other process has the session. Raises MagicpigError if one has.

    What a process that was killed has left of a file is removed.
    """
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as problem:
        raise MagicpigError(f"cannot make {place}: {problem.strerror or problem}") from problem
    doing, hint = f"has session {name} open", "leave it there, or take another name"
    with locked(place / f"{name}.lock", doing, hint, "XDG_DATA_HOME=FOLDER names another place"):
        with contextlib.suppress(OSError):
            (place / temporary_name(name)).unlink(missing_ok=True)
        yield
