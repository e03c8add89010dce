"""What was typed before, for the up arrow: a file that only its owner can read and that does not grow for ever."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import platformdirs
from prompt_toolkit.history import FileHistory

from magicpig_cli.config import APP_NAME
from magicpig_cli.files import replace_file

MAX_BYTES = 1 << 20
_KEEP_BYTES = MAX_BYTES // 2  # after a cut, so that not every entry cuts
_LONGEST_ENTRY = 64 * 1024  # bytes; a pasted book stays out of the file


def history_path() -> Path:
    """Where the history lies."""
    return platformdirs.user_state_path(APP_NAME) / "chat_history"


class CappedHistory(FileHistory):
    """prompt-toolkit's file of entries, 0600, at most MAX_BYTES long. Several chats may write to it at once.

    Nothing is raised if it cannot be written: what was typed is then recalled within this chat only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(str(path))

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        if len(string.encode(errors="replace")) > _LONGEST_ENTRY:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone_in(self._path.parent):
                os.close(os.open(self._path, os.O_CREAT | os.O_WRONLY, 0o600))
                self._path.chmod(0o600)
                super().store_string(string.encode(errors="replace").decode())
                if self._path.stat().st_size > MAX_BYTES:
                    self._cut()

    def _cut(self) -> None:
        """Keep the newest entries. Each begins with an empty line and a comment."""
        kept = self._path.read_bytes()[-_KEEP_BYTES:]
        replace_file(self._path, kept[kept.find(b"\n# ") :])


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While inside, no other chat writes there: one that cuts the file would lose what another adds."""
    try:
        import fcntl
    except ImportError:  # not on Windows, which is told so but not blocked
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
