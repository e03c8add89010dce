"""Files that are there whole or not at all: written beside their place, then moved there in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def refuse_unwritable(path: Path) -> None:
    """Raise the OSError that `replace_file` would raise, before there is anything to lose. Leaves nothing behind."""
    if is_stream(path):
        if not os.access(path, os.W_OK):  # not opened: the reader of a pipe would take the closing for the end
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return
    temporary = _beside(_target(path))
    temporary.open("xb").close()
    temporary.unlink()


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Make `content` all that the file holds; its permissions and a link to it stay. Raises OSError.

    Whoever reads meanwhile, or finds it after a crash, has the old content or the new. A device or a pipe is written
    to as it is. mode: its permissions from now on, whatever they were.
    """
    if is_stream(path):
        path.write_bytes(content)
        return
    with replacement(path, mode=mode) as file:
        file.write(content)


@contextlib.contextmanager
def replacement(path: Path, temporary_name: str | None = None, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of the one at `path` once it is whole; not where that ends in an error.

    temporary_name: of that file until then, in the same directory, for callers whose lock keeps others away from it:
    what a killed process has left there is written over. mode: its permissions from the first byte on; None: those of
    the file that it replaces. Raises OSError.
    """
    target = _target(path)
    temporary = _beside(target) if temporary_name is None else target.with_name(temporary_name)
    try:
        with temporary.open("xb" if temporary_name is None else "wb") as file:
            if mode is not None:
                temporary.chmod(mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is None and target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
        sync_directory(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Bring to disk which files are in a directory: what has just been made, renamed or removed there."""
    with contextlib.suppress(OSError):  # systems and file systems that know no such thing
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_stream(path: Path) -> bool:
    """Whether a path leads to a device or a pipe: all that is written stays, nothing can be replaced.

    Asked of the path as it is: `/dev/stdout` leads to a pipe although no link says where that is.
    """
    return path.exists() and not path.is_file() and not path.is_dir()


def _target(path: Path) -> Path:
    """Where a path leads. Raises IsADirectoryError."""
    target = path.resolve()
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return target


def _beside(target: Path) -> Path:
    """A name that nobody else takes, nor a process that was killed has left: process numbers come again."""
    return target.with_name(f".magicpig-{secrets.token_hex(6)}.new")
