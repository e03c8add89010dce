"""What an earlier run has left: which lines need not run again, and files in which only what still holds is left.

A record tells by its `id` what it answers (`records`), so nothing has to be written beside it, and a kill at any moment
leaves whole records, each with all that is known of it, and at most one torn line at the end. Everything here follows
from the two files and the checked input; nothing depends on how far the run before came:

1. `find` reads both files, line by line, and only counts: a record holds if a line of the input has its key. A record
   of a line without an id holds wherever that line has moved to, under the id that it has now. A failure of the check
   holds if the check says the same again; other failures hold until somebody asks to retry them.
2. `tidy` makes what holds all that is in the files. Where that takes more than cutting the torn line, a new file takes
   the old one's place in one step. Each file is right by itself, so a kill between the two is a state like any other.

Both take the first of several records of a line, an answer rather than a failure.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from magicpig_cli.batch.check import Checked
from magicpig_cli.batch.line import LineError
from magicpig_cli.batch.records import error_of, key_of
from magicpig_cli.batch.writer import OutputPaths, cannot_write, encoded
from magicpig_cli.errors import UsageError
from magicpig_cli.files import replacement, sync_directory

_ANSWERED, _FAILED = 1, 2
Judge = Callable[[bytes], "bytes | None"]  # a line of a file → how it stays; None = not at all


@dataclass(frozen=True, slots=True)
class _File:
    """What is to be done with one file."""

    stale: int = 0  # lines that go
    moved: int = 0  # records that get another id or line number, or a line end
    whole_bytes: int = 0  # up to a last line that is no record and has no end
    torn_bytes: int = 0  # of that


class Kept:
    """The lines of the input, by place, that an earlier run has answered or seen fail.

    stale: lines of the files that go; torn_bytes: of lines that a kill has left without an end.
    """

    def __init__(
        self, judged: _Judged | None = None, answers: _File | None = None, errors: _File | None = None
    ) -> None:
        self._judged = judged
        self._what = bytearray() if judged is None else judged.what
        self._answers = answers or _File()
        self._errors = errors or _File()
        self.answered = self._what.count(_ANSWERED)
        self.failed = self._what.count(_FAILED)
        self.stale = self._answers.stale + self._errors.stale
        self.torn_bytes = self._answers.torn_bytes + self._errors.torn_bytes

    def __contains__(self, place: int) -> bool:
        return place < len(self._what) and self._what[place] != 0

    def tidy(self, paths: OutputPaths) -> None:
        """Leave only what holds, once. Raises MagicpigError: a file cannot be written; it is as it was then."""
        judged, self._judged = self._judged, None  # which is large
        if judged is None:
            return
        answer, error = judged.again(answered=False).answer, judged.again(answered=True).error
        for path, file, judge in ((paths.answers, self._answers, answer), (paths.errors, self._errors, error)):
            try:
                _tidy(path, paths.temporary(path), file, judge)
            except OSError as problem:
                raise cannot_write(path, problem) from problem
        if paths.errors.exists() and not paths.errors.stat().st_size:
            paths.errors.unlink()  # as a run without failures leaves it
            sync_directory(paths.errors.resolve().parent)


NOTHING_KEPT = Kept()


def find(paths: OutputPaths, checked: Checked, *, retry_errors: bool) -> Kept:
    """What still holds of the files. retry_errors: failures of lines that are good do not.

    Raises UsageError if a file cannot be read.
    """
    judged = _Judged(
        what=bytearray(checked.total),
        places={**{entry.key: (entry.place, entry.number) for entry in checked.entries()}, **checked.too_large},
        bad={problem.custom_id: (place, problem) for place, problem in checked.errors.items()},
        numbers=checked.numbers,
        retry_errors=retry_errors,
    )
    answers, errors = _surveyed(paths.answers, judged.answer), _surveyed(paths.errors, judged.error)
    return Kept(judged, answers, errors)


def restore_order(paths: OutputPaths, checked: Checked) -> None:
    """Bring the records of each file into the order of the input: those of an earlier run come before later ones.

    All of them are records of lines of the input. Raises MagicpigError.
    """
    for path in (paths.answers, paths.errors):
        if path.exists():
            try:
                _sort(path, paths.temporary(path), checked)
            except OSError as problem:
                raise cannot_write(path, problem) from problem


@dataclass(frozen=True)
class _Judged:
    """One reading of both files, the answers first. `what`: by place, what has been found so far."""

    what: bytearray
    places: dict[bytes, tuple[int, int]]  # of good lines: key → (place, line number)
    bad: dict[str, tuple[int, LineError]]  # id → (place, what is wrong)
    numbers: dict[str, int]  # id → line number
    retry_errors: bool

    def again(self, *, answered: bool) -> _Judged:
        """For another reading; `answered`: only of the failures."""
        what = bytearray(_ANSWERED if answered and found == _ANSWERED else 0 for found in self.what)
        return replace(self, what=what)

    def answer(self, raw: bytes) -> bytes | None:
        """How a line of the answers stays."""
        record = _record(raw)
        if record is None or record.get("error") is not None or not isinstance(record.get("response"), dict):
            return None
        return self._held(raw, record, _ANSWERED)

    def error(self, raw: bytes) -> bytes | None:
        """How a line of the failures stays."""
        record = _record(raw)
        if record is None or record.get("response") is not None or not isinstance(record.get("error"), dict):
            return None
        if key_of(record) in self.places:
            return None if self.retry_errors else self._held(raw, record, _FAILED)
        place, problem = self.bad.get(record["custom_id"], (0, None))
        if problem is None or self.what[place] or record["error"] != error_of(problem):
            return None
        self.what[place] = _FAILED
        return raw if raw.endswith(b"\n") else encoded(record)

    def _held(self, raw: bytes, record: dict[str, Any], as_what: int) -> bytes | None:
        """The record of a line that could be read, under the line's present id and number."""
        found = self.places.get(key_of(record) or b"")
        if found is None or self.what[found[0]]:
            return None
        place, number = found
        self.what[place] = as_what
        renamed = self.numbers.get(record["custom_id"]) != number  # only lines without an id have moved
        renumbered = as_what == _FAILED and record["error"].get("line") != number
        if renamed:
            record["custom_id"] = f"line-{number}"
        if renumbered:
            record["error"]["line"] = number
        return raw if not renamed and not renumbered and raw.endswith(b"\n") else encoded(record)


def _record(raw: bytes) -> dict[str, Any] | None:
    """A line as a record that somebody may have written; None for anything else."""
    with suppress(ValueError, RecursionError):
        record = json.loads(raw)
        if isinstance(record, dict) and isinstance(record.get("custom_id"), str):
            return record
    return None


def _surveyed(path: Path, judge: Judge) -> _File:
    """What is to be done with a file, if it is there. Raises UsageError."""
    stale = moved = whole = torn = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                stays = judge(raw)
                if stays is None and not raw.endswith(b"\n"):
                    torn = len(raw)
                    continue
                whole += len(raw)
                stale += stays is None
                moved += stays is not None and stays is not raw
    except FileNotFoundError:
        pass
    except OSError as problem:
        raise UsageError(f"cannot read {path}: {problem.strerror}") from None
    return _File(stale, moved, whole, torn)


def _tidy(path: Path, temporary_name: str, file: _File, judge: Judge) -> None:
    if file.stale or file.moved:
        with path.open("rb") as old, replacement(path, temporary_name) as new:
            for raw in _whole_lines(old, file.whole_bytes):
                if (stays := judge(raw)) is not None:
                    new.write(stays)
    elif file.torn_bytes:
        with path.open("rb+") as old:
            old.truncate(file.whole_bytes)
            os.fsync(old.fileno())


def _whole_lines(file: BinaryIO, up_to: int) -> Iterator[bytes]:
    """Lines of the first `up_to` bytes."""
    while file.tell() < up_to:
        yield file.readline()


def _sort(path: Path, temporary_name: str, checked: Checked) -> None:
    numbers, offsets = array("q"), array("q")
    with path.open("rb") as old:
        offset = 0
        for raw in old:
            record = _record(raw)
            assert record is not None
            numbers.append(checked.numbers[record["custom_id"]])
            offsets.append(offset)
            offset += len(raw)
        order = sorted(range(len(numbers)), key=numbers.__getitem__)
        if order == list(range(len(numbers))):
            return
        with replacement(path, temporary_name) as new:
            for row in order:
                old.seek(offsets[row])
                new.write(old.readline())
