"""Conversations that are kept in the data directory, to go on with another day.

NAME.json is readable: messages, system text, model, settings, dates; written after every turn. NAME.safetensors holds
keys, values and index (`cache.saved`), written when the chat is left and by /save. It may be older than the messages
or missing: what it lacks is read again. Both are for their owner's eyes alone. Nothing heavy is imported until a
conversation is saved or loaded.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import unicodedata
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import platformdirs

from magicpig_cli.config import APP_NAME, GenerationOptions, Settings
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import replace_file
from magicpig_cli.lock import locked
from magicpig_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.engine.conversation import Conversation
    from magicpig_cli.engine.engine import Engine

_FORMAT = "magicpig-session"
_VERSION = 1
_NAME = re.compile(r"\w[\w .+-]{0,63}")
_PRIVATE = 0o600


class Talk(Protocol):
    """What is asked of a chat."""

    engine: Engine
    settings: Settings
    conversation: Conversation
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Loaded:
    """A conversation that was kept. sequence: its rows, if they are there and of this model; else it is read again."""

    messages: list[dict[str, str]]
    system: str | None = None
    generation: GenerationOptions | None = None
    sequence: Sequence | None = None
    notices: tuple[str, ...] = ()
    read_s: float = 0.0  # what reading the rows took

    @property
    def turns(self) -> int:
        return _turns(self.messages)


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


def checked_name(name: str) -> str:
    """A name that is nothing but a file's name. Raises UsageError."""
    name = unicodedata.normalize("NFC", name.strip())
    if not _NAME.fullmatch(name) or name.endswith(".") or len(name.encode()) > 200:
        raise UsageError(
            f"{name!r} is no name for a session",
            hint="up to 64 letters, digits, spaces and . _ + -, beginning with a letter or digit",
        )
    return name


def kept() -> list[Kept]:
    """All sessions, the most recent first. Files that are none are passed over."""
    found = []
    for path in folder().glob("*.json"):
        with contextlib.suppress(MagicpigError, OSError):
            content = _read(path.stem)
            size = sum(file.stat().st_size for file in (path, _cache(path.stem)) if file.exists())
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


def _text(name: str) -> Path:
    return folder() / f"{name}.json"


def _cache(name: str) -> Path:
    return folder() / f"{name}.safetensors"


def _read(name: str) -> dict[str, Any]:
    """What the JSON of a session says, as far as the program relies on it. Raises MagicpigError."""
    path = _text(name)
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        if content["version"] > _VERSION:
            raise MagicpigError(
                f"session {name} was kept by a newer version of magicpig: format {content['version']}, this one reads "
                f"{_VERSION}",
                hint="update magicpig",
            )
        wanted = {"updated": str, "created": str, "turns": int, "tokens": int, "messages": list, "model": dict}
        for key, kind in wanted.items():
            if not isinstance(content[key], kind):
                raise ValueError(f"{key} is {content[key]!r}")
        for message in content["messages"]:
            if message["role"] not in ("system", "user", "assistant") or not isinstance(message["content"], str):
                raise ValueError(f"a message is {message!r}")
        content["model"]["name"]
    except FileNotFoundError:
        raise MagicpigError(f"there is no session {name}", hint="/sessions lists them") from None
    except OSError as problem:
        raise MagicpigError(f"cannot read {path}: {problem.strerror or problem}") from problem
    except (ValueError, KeyError, TypeError) as problem:
        raise MagicpigError(f"{path} is no session: {problem}", hint="mend it, or delete it") from problem
    return content


class Sessions:
    """Keeps the conversation of a chat, and finds others. `name` is that of the present one, None while it has none.

    with_cache: also keep keys, values and index. say, warn: take lines for the user.
    """

    def __init__(self, say: Callable[[str], None], warn: Callable[[str], None], *, with_cache: bool = True) -> None:
        self.name: str | None = None
        self._say, self._warn, self._with_cache = say, warn, with_cache
        self._lock = contextlib.ExitStack()
        self._created = ""
        self._cached_ids: list[int] | None = None  # what the file of keys and values holds, if that is known
        self._given: GenerationOptions | None = None  # what the command line said: it outranks what was kept

    # What a chat asks for

    def open(self, name: str, chat: Talk) -> Loaded | None:
        """At the start of a chat: go on with this session, or begin it. None: it is new. Raises MagicpigError."""
        self._given = chat.settings.generation
        name = checked_name(name)
        if _text(name).exists():
            return self.load(name, chat)
        self._take(name)
        return None

    def load(self, name: str, chat: Talk) -> Loaded:
        """Read one that was kept, which then is the present one; the one before is kept. Raises MagicpigError."""
        name = checked_name(name)
        if name == self.name:
            raise MagicpigError(f"{name} is the present conversation", hint="/sessions lists all")
        content = _read(name)
        lock = _locked(name)
        try:
            if self.name is not None:
                self._keep_all(self.name, chat)
        except BaseException:
            lock.close()
            raise
        self._become(name, content["created"], lock)
        return self._loaded(name, content, chat)

    def save(self, name: str | None, chat: Talk) -> list[str]:
        """Keep the conversation, under its own name if None, or one made of the date. Raises MagicpigError."""
        name = checked_name(name) if name is not None else self.name or _dated_name()
        if name != self.name:
            if _text(name).exists():
                raise MagicpigError(
                    f"there is a session {name} already", hint=f"/load {name} goes on with it; /save takes another name"
                )
            self._take(name)
        self._write_text(name, chat)
        lines = [f"kept as {name}: {_text(name)}"]
        if self._with_cache:
            self._write_cache(name, chat)
        return lines

    def names(self) -> list[str]:
        """All that can be loaded, the most recent first."""
        return [one.name for one in kept()]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(column names, rows) of what can be loaded."""
        rows = [
            [
                one.name + (" *" if one.name == self.name else ""), _local(one.updated), one.model, f"{one.turns:,}",
                f"{one.tokens:,}", format_bytes(one.bytes),
            ]
            for one in kept()
        ]  # fmt: skip
        return ["name", "last used", "model", "turns", "tokens", "size"], rows

    def after_turn(self, chat: Talk) -> None:
        """An answer has been added: the messages are written down, if the conversation has a name."""
        if self.name is not None:
            try:
                self._write_text(self.name, chat)
            except MagicpigError as problem:
                self._warn(f"the conversation is not kept: {problem.message}")

    def leave(self, chat: Talk) -> None:
        """The chat ends: keys and values too are written down. Ctrl-C meanwhile leaves them out."""
        try:
            if self.name is not None:
                self._keep_all(self.name, chat)
        finally:
            self._lock.close()

    # How

    def _take(self, name: str) -> None:
        """Be the session of this name, which nobody else is writing. Raises MagicpigError."""
        self._become(name, "", _locked(name))

    def _become(self, name: str, created: str, lock: contextlib.ExitStack) -> None:
        """Be that session, no longer the one before."""
        self._lock.close()
        self._lock, self.name, self._created, self._cached_ids = lock, name, created, None

    def _keep_all(self, name: str, chat: Talk) -> None:
        """Text and cache of a conversation that is being left; what goes wrong is a warning."""
        if not _turns(chat.conversation.messages):
            return
        try:
            self._write_text(name, chat)
            if self._with_cache:
                self._write_cache(name, chat)
        except MagicpigError as problem:
            self._warn(f"session {name}: {problem.message}")
        except KeyboardInterrupt:
            self._warn(f"session {name}: interrupted; the text is kept, and will be read again")
            raise

    def _write_text(self, name: str, chat: Talk) -> None:
        engine, messages = chat.engine, chat.conversation.messages
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._created = self._created or now
        content = {
            "format": _FORMAT, "version": _VERSION, "created": self._created, "updated": now,
            "model": {"name": engine.model_name, "revision": engine.revision},
            "turns": _turns(messages), "tokens": chat.sequence.length, "system": chat.conversation.system,
            "settings": {"generation": asdict(chat.settings.generation), "attention": engine.attention_summary()},
            "messages": messages,
        }  # fmt: skip
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        try:
            replace_file(_text(name), text.encode("utf-8", errors="backslashreplace"), mode=_PRIVATE)
        except OSError as problem:
            raise MagicpigError(f"cannot write {_text(name)}: {problem.strerror or problem}") from problem

    def _write_cache(self, name: str, chat: Talk) -> None:
        """Keys, values and index, unless the file holds these tokens already. Raises MagicpigError."""
        from magicpig_cli.cache.snapshot import require_space, snapshot

        if not chat.sequence.length or chat.sequence.ids == self._cached_ids:
            return
        taken = snapshot(chat.sequence, chat.sequence.length)
        size = chat.engine.saved_bytes(taken)
        require_space(_cache(name), size)
        self._say(f"keeping keys, values and index of {len(taken.ids):,} tokens: {format_bytes(size)}")
        begin = time.perf_counter()
        chat.engine.save(taken, _cache(name), temporary_name=f".{name}.new", mode=_PRIVATE)
        self._cached_ids = taken.ids
        self._say(f"done in {format_seconds(time.perf_counter() - begin)}")

    def _loaded(self, name: str, content: dict[str, Any], chat: Talk) -> Loaded:
        messages, notices = content["messages"], []
        if content["model"]["name"] != chat.engine.model_name:
            notices.append(f"session {name} was held with {content['model']['name']}, and goes on with another model")
        sequence, begin = None, time.perf_counter()
        try:
            sequence, said = self._restored(name, messages, chat)
            notices += said
        except MagicpigError as problem:
            notices.append(f"the text is read again: {problem.message}")
        read_s = time.perf_counter() - begin
        return Loaded(messages, content.get("system"), self._generation(content), sequence, tuple(notices), read_s)

    def _restored(self, name: str, messages: list[dict[str, str]], chat: Talk) -> tuple[Sequence | None, list[str]]:
        """Rows of the conversation from the file, and what to say of them. Raises MagicpigError."""
        if not messages or not _cache(name).exists():
            return None, []
        from magicpig_cli.cache.saved import SavedCache

        begin = time.perf_counter()
        saved = SavedCache(_cache(name))
        ids = chat.engine.codec.encode_chat(messages)
        if len(ids) > chat.engine.context:
            return None, [
                f"{len(ids):,} tokens do not fit the context of {chat.engine.context:,}: a larger -c, or /undo"
            ]
        sequence, why = chat.engine.restore(saved, ids)
        if sequence.ids == saved.ids:
            self._cached_ids = saved.ids
        took = format_seconds(time.perf_counter() - begin)
        said = [f"{sequence.length:,} of {len(ids):,} tokens read from {format_bytes(saved.nbytes)} in {took}"]
        return sequence, said + ([f"the index is made anew ({why})"] if why else [])

    def _generation(self, content: dict[str, Any]) -> GenerationOptions:
        """What was kept, except where the command line says otherwise."""
        saved = (content.get("settings") or {}).get("generation") or {}
        known = {field.name for field in fields(GenerationOptions)}
        options = GenerationOptions(**{key: value for key, value in saved.items() if key in known})
        options = replace(options, stop=tuple(options.stop))
        given = asdict(self._given) if self._given is not None else {}
        return replace(options, **{key: value for key, value in given.items() if value not in (None, ())})


def _locked(name: str) -> contextlib.ExitStack:
    """The lock of a session, to be closed. Raises MagicpigError if another process has it."""
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as problem:
        raise MagicpigError(f"cannot make {place}: {problem.strerror or problem}") from problem
    lock = contextlib.ExitStack()
    lock.enter_context(
        locked(place / f"{name}.lock", doing=f"has session {name} open", hint="leave it there, or take another name")
    )
    return lock


def _turns(messages: list[dict[str, str]]) -> int:
    return sum(message["role"] == "user" for message in messages)


def _dated_name() -> str:
    """A name made of the date that nobody has taken."""
    today = datetime.now().strftime("%Y-%m-%d")
    number = 1
    while _text(f"{today}-{number}").exists():
        number += 1
    return f"{today}-{number}"


def _local(moment: str) -> str:
    """An ISO 8601 time as the clock here shows it."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return moment
