"""Keeps two writers of one output apart. The kernel drops the lock when the process ends, however it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from magicpig_cli.errors import MagicpigError

try:
    import fcntl
except ImportError:  # not on Windows, which is told so but not blocked
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def locked(path: Path, doing: str, hint: str, elsewhere: str) -> Iterator[None]:
    """Hold the lock file at `path`, removed at the end. Raises MagicpigError if another process holds it, or if it
    cannot be made.

    doing, hint: what to say then of the other process; elsewhere: how to have another place.
    """
    if fcntl is None:
        yield
        return
    descriptor = _acquire(path, doing, hint, elsewhere)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: nobody else can have taken this file
        os.close(descriptor)


def _acquire(path: Path, doing: str, hint: str, elsewhere: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise MagicpigError(f"cannot write {path}: {problem.strerror}", hint=elsewhere) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 32).decode("ascii", errors="replace").strip()
            os.close(descriptor)
            raise MagicpigError(
                f"process {owner or '?'} {doing} (it holds {path})",
                hint=hint,
            ) from None
        except OSError:
            pass  # a file system without locks: better no protection than no batch
        if _is_at(path, descriptor):
            with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
                os.truncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)  # its holder removed it between our open and our lock


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
