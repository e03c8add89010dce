"""Signals that end a run: the first one asks it to, the second one does not wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import FrameType

from magicpig_cli.signals import handled

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")  # a key, a supervisor, a terminal that is closed


class Signals:
    """A context manager that takes these signals, unless whoever started this process wants them ignored (`nohup`).

    While answers are written (`gently`) the first one only sets `asked`; otherwise, and from the second one on,
    KeyboardInterrupt is raised, though not in the middle of a record (`held`) before the third.
    """

    def __init__(self) -> None:
        self.asked = False
        self._gently = False
        self._held = False
        self._pending = False
        self._handled = contextlib.ExitStack()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._gently and not self.asked:
            self.asked = True
        elif self._held and not self._pending:
            self._pending = True
        else:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def gently(self) -> Iterator[None]:
        self._gently = True
        try:
            yield
        finally:
            self._gently = False

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What happens inside happens whole."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> Signals:
        self._handled.enter_context(handled(_NAMES, self._on_signal))
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.close()
