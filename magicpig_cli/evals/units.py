"""Finished pieces of work, one JSON line each, so that a run that was ended can go on where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from magicpig_cli.errors import MagicpigError
from magicpig_cli.evals.modes import Mode
from magicpig_cli.lock import locked

Record = dict[str, Any]  # what was measured; `run` says what is in it


@dataclass(frozen=True, slots=True)
class Unit:
    """One sample of a task in one mode with one hash seed."""

    task: str
    text: str
    context: int
    sample: int
    mode: Mode
    hash_seed: int

    def key(self, about: Mapping[str, Any]) -> str:
        """A digest of this and of everything else that decides the outcome."""
        whole = json.dumps([asdict(self), about], sort_keys=True, default=str)
        return hashlib.sha256(whole.encode()).hexdigest()[:24]


class Kept:
    """Records by key, in memory and in a file that grows line by line. Made by `open_kept`."""

    def __init__(self, path: Path, file: FileIO, records: dict[str, Record]) -> None:
        self.path = path
        self._file = file
        self._records = records

    def get(self, key: str) -> Record | None:
        return self._records.get(key)

    def add(self, key: str, unit: Unit, record: Record) -> None:
        """Keep a record: one write, on disk when this returns. Raises MagicpigError."""
        line = (json.dumps({"key": key, "unit": asdict(unit), "record": record}) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise MagicpigError(f"cannot write {self.path}: {problem.strerror}") from problem
        self._records[key] = record


@contextmanager
def open_kept(path: Path, *, fresh: bool = False) -> Iterator[Kept]:
    """The records at a path, which is made if it is not there; fresh: without those that are. Raises MagicpigError.

    Lines that are no records, as a kill leaves them, are passed over. One process at a time.
    """
    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror}") from problem
    doing, hint = "is evaluating into the same file", "wait for it, or give another --output"
    with locked(lock, doing, hint, "--output names another place"):
        records = {} if fresh else _read(path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if fresh else 0), 0o600)
        except OSError as problem:
            raise MagicpigError(f"cannot write {path}: {problem.strerror}") from problem
        with open(descriptor, "r+b", buffering=0) as raw:
            _end_line(raw)
            yield Kept(path, raw, records)


def _read(path: Path) -> dict[str, Record]:
    records: dict[str, Record] = {}
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return records
    except OSError as problem:
        raise MagicpigError(f"cannot read {path}: {problem.strerror}") from problem
    for line in lines:
        try:
            found = json.loads(line)
            records[found["key"]] = dict(found["record"])
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill
    return records


def _end_line(file: FileIO) -> None:
    """Go to the end, and begin a new line where the last one is torn."""
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")
