"""`chat --prompt-cache FILE`: the documents of a first message are read once, and from a file ever after.

The file holds keys, values and index of the prompt up to the end of the documents, so that it serves any question about
them. It is written beside the first answer, from its first token on: a long answer that is killed leaves the file, and
the time to the first token knows nothing of it. It is written again only if the documents have grown or changed;
what a conversation adds is kept by `--session`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import is_stream, refuse_unwritable
from magicpig_cli.lock import locked
from magicpig_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.cache.snapshot import Snapshot
    from magicpig_cli.engine.conversation import ChatCodec
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.events import Event, Finished

_OTHER_QUESTIONS = ("?", "!")
_GIVEN_UP = "interrupted"
_WORTH_WRITING = 64  # tokens that a file lacks: fewer are read sooner than all are written


def check_path(path: Path) -> None:
    """Raise UsageError for what can never become a cache, before anything heavy is loaded."""
    if path.is_dir():
        raise UsageError(f"--prompt-cache: {path} is a directory", hint=f"--prompt-cache {path / 'book.cache'}")
    if is_stream(path):
        raise UsageError(f"--prompt-cache: {path} is no regular file", hint="--prompt-cache book.cache")
    if path.exists():
        return
    try:
        refuse_unwritable(path)
    except OSError as problem:
        raise UsageError(
            f"--prompt-cache: cannot write {path}: {problem.strerror or problem}", hint="name another place"
        ) from problem


@dataclass(frozen=True)
class FirstMessage:
    """A conversation whose last message holds documents, as (name, text), and a question about them."""

    messages: list[dict[str, Any]]
    documents: list[tuple[str, str]]
    question: str

    def tokens(self, codec: ChatCodec, ids: list[int]) -> int:
        """How many tokens of its prompt `ids` would be the same with any other question; all without documents."""
        from magicpig_cli.engine.conversation import common_prefix
        from magicpig_cli.engine.documents import document_message

        if not self.documents:
            return len(ids)
        other = next(text for text in _OTHER_QUESTIONS if not self.question.startswith(text))
        message = {**self.messages[-1], "content": document_message(self.documents, other)}
        return common_prefix(ids, codec.encode_chat([*self.messages[:-1], message]))


class PromptCache:
    """One file, for the turns that begin a conversation. `say` and `warn` take lines for the user.

    A turn is held within it: at the end the file is there. Whatever ends the turn early gives the file up: the old one
    stays, and nothing is left beside it. Ctrl-C while only the file is waited for gives up that alone.

    Raises MagicpigError for a file of another model, a damaged one and one of somebody else: it is not overwritten.
    """

    def __init__(self, path: Path, engine: Engine, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self.path = path
        self._engine, self._say, self._warn = engine, say, warn
        if path.exists():
            from magicpig_cli.cache.saved import SavedCache

            engine.check_saved(SavedCache(path))
        self._sequence: Sequence | None = None
        self._tokens = 0  # to be written once they have been read; 0 = nothing
        self._read_s = 0.0
        self._writing: _Writing | None = None

    def __enter__(self) -> PromptCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._writing is not None:
                with contextlib.suppress(KeyboardInterrupt):
                    self._writing.wait()
        finally:
            self._close()

    def answer(
        self, first: FirstMessage, ids: list[int], sequence: Sequence,
        stream: Callable[[Sequence, Callable[[Event], None]], Finished],
    ) -> Finished:  # fmt: skip
        """What `stream` answers, with what the file has of the prompt; `ttft_s` includes reading that.

        ids: the prompt; sequence: what is in memory already. stream(sequence, observe): answers with that sequence, and
        tells `observe` every event. Raises MagicpigError as the class does.
        """
        finished = stream(self._begin(first, ids, sequence), self._observe)
        timing = finished.timing
        return replace(finished, timing=replace(timing, ttft_s=timing.ttft_s + self._read_s))

    def _begin(self, first: FirstMessage, ids: list[int], sequence: Sequence) -> Sequence:
        """The sequence to answer a prompt with: from the file where that has more of it than `sequence`."""
        from magicpig_cli.engine.conversation import common_prefix

        tokens = first.tokens(self._engine.codec, ids)
        self._read_s, self._sequence, wanted = 0.0, sequence, tokens > 0
        if self.path.exists():
            from magicpig_cli.cache.saved import SavedCache

            begin = time.perf_counter()
            saved = SavedCache(self.path)
            shared = common_prefix(saved.ids, ids)
            if min(shared, len(ids) - 1) > common_prefix(sequence.ids, ids):
                self._sequence, why = self._engine.restore(saved, ids)
                self._read_s = time.perf_counter() - begin
                self._tell(self._sequence, min(shared, tokens), tokens, why)
            # A question alone, maybe with -f forgotten, is no reason to write over documents.
            wanted = tokens - shared >= _WORTH_WRITING and bool(first.documents)
        self._tokens = tokens if wanted and self._has_room(tokens) else 0
        return self._sequence

    def _tell(self, found: Sequence, shared: int, tokens: int, why: str | None) -> None:
        line = f"prompt cache: {found.length:,} tokens read from {self.path} in {format_seconds(self._read_s)}"
        if shared < tokens:
            line += f"; after {shared:,} of the {tokens:,} tokens the text is another than in the file"
        if why is not None:
            line += f"; the index is made anew ({why})"
        self._say(line)

    def _has_room(self, tokens: int) -> bool:
        """Whether the file can be written, as far as can be told before. Says how large it will be."""
        from magicpig_cli.cache.snapshot import require_space

        plan = self._engine.plan
        size = plan.kv_bytes(tokens) + plan.index_bytes(tokens)
        try:
            require_space(self.path, size)
        except MagicpigError as problem:
            self._warn(f"no prompt cache: {problem.message}")
            return False
        self._say(f"prompt cache: {tokens:,} tokens will be kept in {self.path}, at most {format_bytes(size)}")
        return True

    def _observe(self, event: Event) -> None:
        """The first token starts the writing."""
        from magicpig_cli.cache.snapshot import snapshot
        from magicpig_cli.events import TokenEvent

        if self._tokens and isinstance(event, TokenEvent):
            assert self._sequence is not None
            taken = snapshot(self._sequence, self._tokens)
            self._tokens = 0
            self._writing = _Writing(self._engine, taken, self.path)
            self._writing.start()

    def _close(self) -> None:
        """What is still being written is given up. Says what has become of it."""
        self._tokens = 0
        writing = self._writing
        if writing is None:
            return
        writing.stop()
        self._writing = None
        if writing.problem is not None:
            self._warn(f"no prompt cache: {writing.problem.message}")
        else:
            took = format_seconds(writing.took_s)
            self._say(
                f"prompt cache: {writing.tokens:,} tokens, {format_bytes(writing.size)}, written to {self.path} "
                f"in {took} beside the answer"
            )


class _Writing(threading.Thread):
    """Writes one snapshot. The sequence may grow meanwhile, but not be cut below it."""

    def __init__(self, engine: Engine, taken: Snapshot, path: Path) -> None:
        super().__init__(name="magicpig-prompt-cache", daemon=True)
        self.tokens = len(taken.ids)
        self.size = 0
        self.took_s = 0.0
        self.problem: MagicpigError | None = None
        self._engine, self._taken, self._path = engine, taken, path
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._first = threading.Lock()  # whoever takes it first: the writing, or giving it up

    def run(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        try:
            self._write()
        finally:
            self._ended.set()

    def _write(self) -> None:
        begin = time.perf_counter()
        hidden = f".{self._path.name}"
        lock, doing = self._path.with_name(f"{hidden}.lock"), f"is writing {self._path.name} already"
        try:
            with locked(lock, doing, "it will be there next time", "--prompt-cache names another place"):
                self.size = self._engine.save(
                    self._taken, self._path, temporary_name=f"{hidden}.new", go_on=self._go_on
                )
        except MagicpigError as problem:
            self.problem = problem
        except Exception as problem:  # a thread's exception would be a traceback on the screen, and nothing else
            self.problem = MagicpigError(f"{type(problem).__name__}: {problem}")
        self.took_s = time.perf_counter() - begin

    def _go_on(self) -> None:
        if self._stopped.is_set():
            raise MagicpigError(_GIVEN_UP)

    def wait(self) -> None:
        """Wait for its end. Not `join`: Python 3.11 takes a thread for ended once Ctrl-C has interrupted that."""
        self._ended.wait()

    def stop(self) -> None:
        """Give it up; returns when nothing of it is left. Also where a signal has come before it was started."""
        self._stopped.set()
        if self._first.acquire(blocking=False):
            self.problem = MagicpigError(_GIVEN_UP)
            self._ended.set()
        self.wait()
