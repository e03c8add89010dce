"""The keyboard while an answer is written."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

_LOCAL_MODES = 3  # place in what tcgetattr returns


@contextlib.contextmanager
def unseen_keys() -> Iterator[None]:
    """While inside, keys typed on the terminal are not shown in the middle of the answer; the next prompt gets them."""
    try:
        import termios
    except ImportError:  # not POSIX
        yield
        return
    before: list[Any] | None = None
    terminal = -1
    with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):  # no terminal
        terminal = sys.stdin.fileno()
        modes = termios.tcgetattr(terminal)
        if os.tcgetpgrp(terminal) == os.getpgrp():  # from the background it would stop this process
            before = list(modes)
            modes[_LOCAL_MODES] &= ~termios.ECHO
            termios.tcsetattr(terminal, termios.TCSANOW, modes)
    try:
        yield
    finally:
        if before is not None:
            with contextlib.suppress(OSError, termios.error):  # it has gone
                termios.tcsetattr(terminal, termios.TCSANOW, before)
