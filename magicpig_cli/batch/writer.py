"""Records into files: one write each, on disk within seconds; a manifest beside them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import replace_file

SYNC_EVERY_S = 5.0


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
                raise UsageError(f"{path} exists", hint="--overwrite replaces it, -o gives another place")


class RecordFile:
    """One JSONL file or stream. A record is a single write, so that what is there is always whole lines."""

    def __init__(self, file: BinaryIO, name: str, *, on_disk: bool) -> None:
        self._file = file
        self._name = name
        self._on_disk = on_disk
        self._unsynced_since: float | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Append one record. Raises MagicpigError (a full disk), BrokenPipeError."""
        left = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", errors="replace"))
        whole = self._file.tell() if self._on_disk else 0
        try:
            while left:
                left = left[self._file.write(left) :]
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as problem:
            if self._on_disk:
                with contextlib.suppress(OSError):
                    self._file.seek(whole)
                    self._file.truncate()
            raise _cannot_write(self._name, problem) from problem
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def sync(self, older_than_s: float = 0.0) -> None:
        """Bring to disk what was written more than that long ago."""
        since = self._unsynced_since
        if not self._on_disk or since is None or time.monotonic() - since < older_than_s:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise _cannot_write(self._name, problem) from problem
        self._unsynced_since = None

    def close(self) -> None:
        if self._on_disk:
            self._file.close()


class Output:
    """Answers and failures of one run. Failures go to a file of their own, opened with the first one."""

    def __init__(self, answers: RecordFile, open_errors: Callable[[], RecordFile]) -> None:
        self._answers = answers
        self._open_errors = open_errors
        self._errors: RecordFile | None = None

    @classmethod
    def to_stream(cls, stream: BinaryIO) -> Output:
        """Everything into one stream, which stays open."""
        answers = RecordFile(stream, "stdout", on_disk=False)
        return cls(answers, lambda: answers)

    @classmethod
    def to_files(cls, paths: OutputPaths, *, overwrite: bool) -> Output:
        """New files; with overwrite the old ones go. Raises UsageError, MagicpigError."""
        if overwrite:
            paths.errors.unlink(missing_ok=True)
        return cls(_created(paths.answers, overwrite), lambda: _created(paths.errors, overwrite))

    def answer(self, record: dict[str, Any]) -> None:
        self._answers.write(record)

    def error(self, record: dict[str, Any]) -> None:
        if self._errors is None:
            self._errors = self._open_errors()
        self._errors.write(record)

    def tick(self) -> None:
        """To be called often: what has waited long enough is brought to disk."""
        self._sync(SYNC_EVERY_S)

    def _sync(self, older_than_s: float) -> None:
        for file in (self._answers, self._errors):
            if file is not None:
                file.sync(older_than_s)

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._sync(0.0)
        finally:
            for file in (self._answers, self._errors):
                if file is not None:
                    file.close()


def _cannot_write(path: Path | str, problem: OSError) -> MagicpigError:
    hint = "free some space there; whole records are kept" if problem.errno == errno.ENOSPC else None
    return MagicpigError(f"cannot write {path}: {problem.strerror}", hint=hint)


def _created(path: Path, overwrite: bool) -> RecordFile:
    try:
        file = path.open("wb" if overwrite else "xb", buffering=0)
    except FileExistsError:
        raise UsageError(f"{path} exists", hint="--overwrite replaces it, -o gives another place") from None
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror}", hint="-o names another place") from None
    return RecordFile(file, str(path), on_disk=True)


def write_manifest(path: Path, content: dict[str, Any]) -> None:
    """Replace the manifest in one step. Raises MagicpigError."""
    text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    try:
        replace_file(path, text.encode("utf-8", errors="replace"))
    except OSError as problem:
        raise _cannot_write(path, problem) from problem
