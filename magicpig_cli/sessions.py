"""Keeping the conversation of a chat in the data directory, to go on with it another day (`session_files`: where).

The text is written after every turn; keys, values and index when the chat is left and by /save. Nothing heavy is
imported until a conversation is saved or loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from magicpig_cli import session_files as files
from magicpig_cli.config import GenerationOptions, Settings
from magicpig_cli.engine.conversation import with_system
from magicpig_cli.errors import MagicpigError
from magicpig_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.engine.conversation import Conversation
    from magicpig_cli.engine.engine import Engine


class Talk(Protocol):
    """What is asked of a chat."""

    engine: Engine
    settings: Settings
    conversation: Conversation
    sequence: Sequence

    @property
    def cached_tokens(self) -> int:
        """First tokens of the sequence that belong to the conversation: it may hold more, of turns taken back."""


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


class Sessions:
    """Keeps the conversation of a chat, and finds others. `name` is that of the present one, None while it has none.

    with_cache: also keep keys, values and index. say, warn: take lines for the user.
    """

    def __init__(self, say: Callable[[str], None], warn: Callable[[str], None], *, with_cache: bool = True) -> None:
        self.name: str | None = None
        self._say, self._warn, self._with_cache = say, warn, with_cache
        self._lock = contextlib.ExitStack()
        self._created = ""
        self._kept_messages: list[dict[str, str]] | None = None  # as the files have them, if that is known
        self._kept_ids: list[int] | None = None  # tokens whose keys and values need not be written again
        self._given: GenerationOptions | None = None  # what the command line said: it outranks what was kept

    # What a chat asks for

    def open(self, name: str, chat: Talk) -> Loaded | None:
        """At the start of a chat: go on with this session, or begin it. None: it is new. Raises MagicpigError.

        What the command line says outranks what was kept: the system text now, generation options from now on.
        """
        self._given = chat.settings.generation
        name = files.checked_name(name)
        if files.text_path(name).exists():
            return self._load(name, chat, chat.settings.system)
        self._begin(name)
        return None

    def load(self, name: str, chat: Talk) -> Loaded:
        """Read one that was kept, which then is the present one; the one before is kept. Raises MagicpigError.

        Whatever ends it early leaves the present one the present one.
        """
        name = files.checked_name(name)
        if name == self.name:
            raise MagicpigError(f"{name} is the present conversation", hint="/sessions lists all")
        return self._load(name, chat)

    def save(self, name: str | None, chat: Talk) -> list[str]:
        """Keep the conversation, under its own name if None, or one made of the date. Raises MagicpigError."""
        name = files.checked_name(name) if name is not None else self.name or files.dated_name()
        if name != self.name:
            self._begin(name)
        self._write_text(name, chat)
        lines = [f"kept as {name}: {files.text_path(name)}"]
        if self._with_cache:
            self._write_cache(name, chat)
        return lines

    def names(self) -> list[str]:
        """All that can be loaded, the most recent first."""
        return [one.name for one in files.kept()]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """(column names, rows) of what can be loaded."""
        rows = [
            [
                one.name + (" *" if one.name == self.name else ""), _local(one.updated), one.model, f"{one.turns:,}",
                f"{one.tokens:,}", format_bytes(one.bytes),
            ]
            for one in files.kept()
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

    def _begin(self, name: str) -> None:
        """Become a session that is new. Raises MagicpigError."""
        _require_new(name)
        with contextlib.ExitStack() as lock:
            lock.enter_context(files.alone(name))
            _require_new(name)  # now that nobody else begins it
            self._become(name, lock.pop_all())

    def _load(self, name: str, chat: Talk, system: str | None = None) -> Loaded:
        """Read a session and become it. system: replaces what was kept."""
        if not files.text_path(name).exists():
            files.read(name)  # says so, and makes no lock
        with contextlib.ExitStack() as lock:
            lock.enter_context(files.alone(name))
            content = files.read(name)  # now that nobody else writes it
            if self.name is not None:
                self._keep_all(self.name, chat)
            loaded = self._loaded(name, content, chat, system)
            self._become(name, lock.pop_all(), content["created"])
        self._kept_messages = content["messages"]
        self._kept_ids = None if loaded.sequence is None else list(loaded.sequence.ids)
        return loaded

    def _become(self, name: str, lock: contextlib.ExitStack, created: str = "") -> None:
        """Be the session of this name, no longer the one before."""
        self._lock.close()
        self._lock, self.name, self._created = lock, name, created
        self._kept_messages = self._kept_ids = None

    def _keep_all(self, name: str, chat: Talk) -> None:
        """Text and cache of a conversation that is being left; what goes wrong is a warning.

        One that was only looked at stays as it is, also where its model and settings were others.
        """
        messages = chat.conversation.messages
        if not _turns(messages) and not files.text_path(name).exists():
            return  # it has never begun
        try:
            if messages != self._kept_messages:
                self._write_text(name, chat)
            if self._with_cache:
                self._write_cache(name, chat)
        except MagicpigError as problem:
            self._warn(f"session {name}: {problem.message}")
        except (KeyboardInterrupt, SystemExit):
            self._warn(f"session {name}: interrupted; the text is kept, and will be read again")
            raise

    def _write_text(self, name: str, chat: Talk) -> None:
        engine, messages = chat.engine, chat.conversation.messages
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._created = self._created or now
        model = engine.settings.model
        files.write(name, {
            "created": self._created, "updated": now,
            "model": {
                "name": engine.model_name, "revision": engine.revision, "given": _lasting(model.model),
                "given_revision": model.revision,
            },
            "turns": _turns(messages), "tokens": chat.cached_tokens, "system": chat.conversation.system,
            "settings": {"generation": asdict(chat.settings.generation), "attention": engine.attention_summary()},
            "messages": messages,
        })  # fmt: skip
        self._kept_messages = list(messages)

    def _write_cache(self, name: str, chat: Talk) -> None:
        """Keys, values and index, unless the file holds these tokens already. Raises MagicpigError."""
        from magicpig_cli.cache.snapshot import require_space, snapshot

        path, ids = files.cache_path(name), chat.sequence.ids[: chat.cached_tokens]
        if not _turns(chat.conversation.messages):  # it was cleared
            files.remove_cache(name)
        if not ids or ids == self._kept_ids:
            return
        taken = snapshot(chat.sequence, len(ids))
        size = chat.engine.saved_bytes(taken)
        require_space(path, size)
        self._say(f"keeping keys, values and index of {len(ids):,} tokens: {format_bytes(size)}")
        begin = time.perf_counter()
        chat.engine.save(taken, path, temporary_name=files.temporary_name(name), mode=files.PRIVATE)
        self._kept_ids = ids
        self._say(f"done in {format_seconds(time.perf_counter() - begin)}")

    def _loaded(self, name: str, content: dict[str, Any], chat: Talk, system: str | None) -> Loaded:
        messages, notices = content["messages"], []
        if system is None:
            system = content.get("system")
        else:
            messages = with_system(messages, system)
        if content["model"]["name"] != chat.engine.model_name:
            notices.append(f"session {name} was held with {content['model']['name']}, and goes on with another model")
        sequence, begin = None, time.perf_counter()
        try:
            sequence, said = self._restored(name, messages, chat)
            notices += said
        except MagicpigError as problem:
            notices.append(f"the text is read again: {problem.message}")
        read_s = time.perf_counter() - begin
        return Loaded(messages, system, self._generation(content), sequence, tuple(notices), read_s)

    def _restored(self, name: str, messages: list[dict[str, str]], chat: Talk) -> tuple[Sequence | None, list[str]]:
        """Rows of the conversation from the file, and what to say of them. Raises MagicpigError."""
        path = files.cache_path(name)
        if not messages or not path.exists():
            return None, []
        from magicpig_cli.cache.saved import SavedCache

        begin = time.perf_counter()
        saved = SavedCache(path)
        ids = chat.engine.codec.encode_chat(messages)
        if len(ids) > chat.engine.context:
            too_long = f"{len(ids):,} tokens do not fit the context of {chat.engine.context:,}: a larger -c, or /undo"
            return None, [too_long]
        sequence, why = chat.engine.restore(saved, ids)
        took = format_seconds(time.perf_counter() - begin)
        said = [f"{sequence.length:,} of {len(ids):,} tokens read from {format_bytes(saved.nbytes)} in {took}"]
        said += [f"the index is made anew ({why})"] if why else []
        return sequence, said

    def _generation(self, content: dict[str, Any]) -> GenerationOptions:
        """What was kept, except where the command line says otherwise."""
        options = files.generation_of(content)
        given = asdict(self._given) if self._given is not None else {}
        return replace(options, **{key: value for key, value in given.items() if value not in (None, ())})


def _require_new(name: str) -> None:
    if files.text_path(name).exists():
        raise MagicpigError(
            f"there is a session {name} already", hint=f"/load {name} goes on with it; /save takes another name"
        )


def _lasting(model: str) -> str:
    """What was given as --model, so that it means the same in another directory."""
    path = Path(model).expanduser()
    return str(path.resolve()) if model != "demo" and path.exists() else model


def _turns(messages: list[dict[str, str]]) -> int:
    return sum(message["role"] == "user" for message in messages)


def _local(moment: str) -> str:
    """An ISO 8601 time as the clock here shows it."""
    try:
        return datetime.fromisoformat(moment).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return moment
