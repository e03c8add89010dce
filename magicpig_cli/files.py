"""Files that are there whole or not at all: written beside their place, then moved there in one step."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path


def refuse_unwritable(path: Path) -> None:
    """Raise the OSError that `replace_file` would raise, before there is anything to lose. Leaves nothing behind."""
    target, in_place = _target(path)
    if in_place:
        with target.open("ab"):
            pass
        return
    temporary = _beside(target)
    temporary.open("xb").close()
    temporary.unlink()


def replace_file(path: Path, content: bytes) -> None:
    """Make `content` all that the file holds; its permissions and a link to it stay. Raises OSError.

    Whoever reads meanwhile, or finds it after a crash, has the old content or the new. A device or a pipe is written
    to as it is.
    """
    target, in_place = _target(path)
    if in_place:
        target.write_bytes(content)
        return
    temporary = _beside(target)
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _target(path: Path) -> tuple[Path, bool]:
    """Where a path leads, and whether it can only be written in place. Raises IsADirectoryError."""
    target = path.resolve()
    if target.is_dir():
        raise IsADirectoryError(21, os.strerror(21), str(path))
    return target, target.exists() and not target.is_file()


def _beside(target: Path) -> Path:
    """A name that nobody else takes, nor a process that was killed has left: process numbers come again."""
    return target.with_name(f".magicpig-{secrets.token_hex(6)}.new")
