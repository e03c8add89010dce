"""Records into files: one write each, on disk within seconds; a manifest beside them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, cast

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import replacement, sync_directory

SYNC_EVERY_S = 5.0  # no record is longer without a sync than that
Mode = Literal["new", "overwrite", "append"]
_OPEN_MODES = {"new": "xb", "overwrite": "wb", "append": "ab"}
_WAYS_OUT = "--resume goes on with it, --overwrite replaces it, -o gives another place"


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """`o.jsonl` and its companions."""

    answers: Path
    errors: Path
    manifest: Path
    lock: Path

    @classmethod
    def beside(cls, answers: Path) -> OutputPaths:
        stem = answers.name.removesuffix(".jsonl")
        errors, manifest, lock = (answers.with_name(stem + end) for end in (".errors.jsonl", ".meta.json", ".lock"))
        return cls(answers, errors, manifest, lock)

    def refuse_input(self, source: Path) -> None:
        """Raise UsageError if a run would write over its own input."""
        for path in (self.answers, self.errors, self.manifest, self.lock):
            if path.resolve() == source.resolve() or (path.exists() and path.samefile(source)):
                raise UsageError(f"{path} is the input and would be written", hint="give another -o")

    def refuse_existing(self) -> None:
        """Raise UsageError if results are there already."""
        for path in (self.answers, self.errors):
            if path.exists() or path.is_symlink():
                raise UsageError(f"{path} exists", hint=_WAYS_OUT)

    def hold_results(self) -> bool:
        """Whether there is something that would be lost."""
        return any(path.exists() and path.stat().st_size for path in (self.answers, self.errors))

    @staticmethod
    def temporary(path: Path) -> str:
        """What one of these is called while it is made anew; nobody else makes it, for who does holds the lock."""
        return f".{path.resolve().name}.new"

    def remove_unfinished(self) -> None:
        """Remove what a killed process has left of making one of them anew."""
        for path in (self.answers, self.errors, self.manifest):
            path.resolve().with_name(self.temporary(path)).unlink(missing_ok=True)


class RecordFile:
    """One JSONL file or stream. A record is a single write, so that what is there is always whole lines."""

    def __init__(self, file: BinaryIO, name: str, *, on_disk: bool) -> None:
        self._file = file
        self._name = name
        self._on_disk = on_disk
        self._unsynced_since: float | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. Raises MagicpigError (a full disk), BrokenPipeError."""
        left = memoryview(encoded(record))
        whole = self._file.tell() if self._on_disk else 0
        try:
            while left:
                left = left[self._file.write(left) :]
            self._file.flush()
        except BrokenPipeError:
            raise
        except BaseException as problem:
            if self._on_disk:
                with contextlib.suppress(OSError):
                    self._file.seek(whole)
                    self._file.truncate()
            if isinstance(problem, OSError):
                raise cannot_write(self._name, problem) from problem
            raise
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def sync(self, older_than_s: float = 0.0) -> None:
        """Bring to disk what was written more than that long ago. Raises MagicpigError."""
        since = self._unsynced_since
        if not self._on_disk or since is None or time.monotonic() - since < older_than_s:
            return
        self._unsynced_since = None  # before: what is written meanwhile may come too late for this one
        try:
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise cannot_write(self._name, problem) from problem

    def close(self) -> None:
        if self._on_disk:
            self._file.close()


class Output:
    """Answers and failures of one run, as a context manager. Failures go to a file of their own, opened with the first.

    A thread brings records to disk in time, also while the engine is busy with one long step.
    held: what is written inside of that is not interrupted.
    """

    def __init__(
        self, answers: RecordFile, open_errors: Callable[[], RecordFile],
        held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self.held = held
        self._answers = answers
        self._open_errors = open_errors
        self._errors: RecordFile | None = None
        self._ended, self._synced = threading.Event(), threading.Event()
        self._syncing = threading.Thread(target=self._sync_in_time, name="sync", daemon=True)
        self._problem: MagicpigError | None = None  # met by that thread

    @classmethod
    def to_stream(cls, stream: BinaryIO) -> Output:
        """Everything into one stream, which stays open. Its reader may stand still, so nothing is held."""
        answers = RecordFile(stream, "stdout", on_disk=False)
        return cls(answers, lambda: answers)

    @classmethod
    def to_files(
        cls, paths: OutputPaths, mode: Mode, held: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> Output:
        """The files of `paths`, new or (mode "append") gone on with. Raises UsageError, MagicpigError."""
        if mode == "overwrite":
            paths.errors.unlink(missing_ok=True)
        return cls(_opened(paths.answers, mode), lambda: _opened(paths.errors, mode), held)

    def answer(self, record: dict[str, Any]) -> None:
        self._refuse_unsynced()
        self._answers.write(record)

    def error(self, record: dict[str, Any]) -> None:
        self._refuse_unsynced()
        if self._errors is None:
            self._errors = self._open_errors()
        self._errors.write(record)

    def _sync_in_time(self) -> None:
        try:
            while not self._ended.wait(SYNC_EVERY_S / 5):
                try:
                    self._sync(SYNC_EVERY_S * 4 / 5)
                except MagicpigError as problem:
                    self._problem = problem
        finally:
            self._synced.set()

    def _sync(self, older_than_s: float) -> None:
        for file in (self._answers, self._errors):
            if file is not None:
                file.sync(older_than_s)

    def _refuse_unsynced(self) -> None:
        """Raise what the thread has met: what comes after it may be lost too."""
        if self._problem is not None:
            raise self._problem

    def __enter__(self) -> Output:
        self._syncing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        try:
            self._synced.wait()  # not `join`: Python 3.11 takes a thread for ended once Ctrl-C has interrupted that
            self._sync(0.0)
            self._refuse_unsynced()
        finally:
            for file in (self._answers, self._errors):
                if file is not None and self._synced.is_set():  # else Ctrl-C came while the thread works on them
                    file.close()


def encoded(record: dict[str, Any]) -> bytes:
    """A record as a line."""
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def cannot_write(path: Path | str, problem: OSError) -> MagicpigError:
    """What a user is told of it."""
    hint = "free some space there; whole records are kept" if problem.errno == errno.ENOSPC else None
    return MagicpigError(f"cannot write {path}: {problem.strerror}", hint=hint)


def _opened(path: Path, mode: Mode) -> RecordFile:
    try:
        is_new = not path.exists()
        file = cast(BinaryIO, path.open(_OPEN_MODES[mode], buffering=0))
        if is_new:
            sync_directory(path.resolve().parent)
    except FileExistsError:
        raise UsageError(f"{path} exists", hint=_WAYS_OUT) from None
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror}", hint="-o names another place") from None
    return RecordFile(file, str(path), on_disk=True)


def write_manifest(paths: OutputPaths, content: dict[str, Any]) -> None:
    """Replace the manifest in one step. Raises MagicpigError."""
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        with replacement(paths.manifest, paths.temporary(paths.manifest)) as file:
            file.write(text.encode("utf-8", errors="replace"))
    except OSError as problem:
        raise cannot_write(paths.manifest, problem) from problem
