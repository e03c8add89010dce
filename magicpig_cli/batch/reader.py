"""Physical lines of a JSONL file, readable again at an offset."""

from __future__ import annotations

import hashlib
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from magicpig_cli.errors import UsageError

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class RawLine:
    """One physical line. `number` counts from 1, blank lines included; `offset` is its first byte in the file."""

    number: int
    offset: int
    data: bytes  # without byte order mark, line end and spaces before it


class JsonlSource:
    """An open input. `directory` is where relative document paths start; `path` is None for stdin and pipes.

    What cannot be read twice is spooled to a temporary file without a name, so that nothing is left behind.
    """

    def __init__(self, file: BinaryIO, path: Path | None, directory: Path) -> None:
        self.path = path
        self.directory = directory
        self.sha256 = ""  # of the bytes that `lines` has read, once it has reached the end
        self._file = file
        self.size_bytes = file.seek(0, 2)
        if _first_bytes(file, 2) in _UTF16:
            name = path or "the input"
            raise UsageError(f"{name} is UTF-16, not UTF-8", hint=f"iconv -f UTF-16 -t UTF-8 {path or ''}".rstrip())

    @classmethod
    def open(cls, name: str, stdin: BinaryIO | None) -> JsonlSource:
        """Open a path, or `-` for stdin (None: this process has none). Raises UsageError."""
        if name == "-":
            if stdin is None:
                raise UsageError("stdin is closed", hint="magicpig batch INPUT.jsonl")
            return cls(_spooled(stdin), None, Path.cwd())
        path = Path(name).expanduser()
        try:
            file = path.open("rb")
        except FileNotFoundError:
            raise UsageError(f"there is no file {path}", hint="magicpig batch INPUT.jsonl, or - for stdin") from None
        except IsADirectoryError:
            raise UsageError(f"{path} is a directory", hint="name one JSONL file in it") from None
        except OSError as problem:
            raise UsageError(f"cannot read {path}: {problem.strerror}") from None
        if stat.S_ISREG(path.stat().st_mode):
            return cls(file, path, path.resolve().parent)
        with file:
            return cls(_spooled(file), None, Path.cwd())

    def close(self) -> None:
        self._file.close()

    def lines(self) -> Iterator[RawLine]:
        """All lines that are not blank, in order."""
        digest = hashlib.sha256()
        self._file.seek(0)
        offset = number = 0
        while data := self._file.readline():
            number += 1
            digest.update(data)
            line = RawLine(number, offset, _stripped(data, first=number == 1))
            offset += len(data)
            if line.data:
                yield line
                self._file.seek(offset)
        self.sha256 = digest.hexdigest()

    def line_at(self, number: int, offset: int) -> RawLine:
        """A line that `lines` has given before."""
        self._file.seek(offset)
        return RawLine(number, offset, _stripped(self._file.readline(), first=number == 1))


def _stripped(data: bytes, *, first: bool) -> bytes:
    return (data.removeprefix(_BOM) if first else data).rstrip(b" \t\r\n")


def _first_bytes(file: BinaryIO, count: int) -> bytes:
    file.seek(0)
    return file.read(count)


def _spooled(stream: BinaryIO) -> BinaryIO:
    spool = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the source
    spool.writelines(stream)  # by lines: on a terminal one Ctrl-D is the end, where larger reads want two
    return spool
