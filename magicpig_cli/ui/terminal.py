"""Modes of a terminal that hold while something is written to it, and hold again after Ctrl-Z and fg."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

_LOCAL_MODES = 3  # place in what tcgetattr returns


def unseen_keys() -> contextlib.AbstractContextManager[None]:
    """While inside, keys typed on the terminal are not shown in the middle of the answer; the next prompt gets them."""
    return _local_mode(sys.stdin, "ECHO", on=False)


def undropped_output(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    """While inside, Ctrl-C does not make the terminal drop what was written and not shown yet.

    A slow terminal would lose half a frame, the place of the cursor with it, and characters of the answer.
    """
    return _local_mode(stream, "NOFLSH", on=True)


def in_front(stream: TextIO) -> bool:
    """Whether this process may use the terminal of a stream: its job is not in the background."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:  # not the terminal that started this process: nobody else writes there
        return True


@contextlib.contextmanager
def _local_mode(stream: TextIO | None, name: str, *, on: bool) -> Iterator[None]:
    """While inside, a local mode of the stream's terminal is so; what is no terminal is left alone.

    A shell gives the terminal modes of its own while this process is stopped: they are set again when it goes on.
    """
    try:
        import termios
    except ImportError:  # not POSIX
        yield
        return
    flag = getattr(termios, name)

    def switch(on: bool) -> bool:
        """Returns what it was."""
        modes = termios.tcgetattr(stream)  # type: ignore[arg-type]
        before = bool(modes[_LOCAL_MODES] & flag)
        if before != on and in_front(stream):  # type: ignore[arg-type]  # from the background it would stop this process
            modes[_LOCAL_MODES] ^= flag
            termios.tcsetattr(stream, termios.TCSANOW, modes)  # type: ignore[arg-type]
        return before

    def switch_again() -> None:
        with contextlib.suppress(OSError, ValueError, termios.error):  # it has gone
            switch(on)

    try:
        before = switch(on)
    except (OSError, ValueError, TypeError, termios.error):  # no terminal, or no stream at all
        yield
        return
    with _when_continued(switch_again):
        try:
            yield
        finally:
            with contextlib.suppress(OSError, ValueError, termios.error):
                switch(before)


@contextlib.contextmanager
def _when_continued(work: Callable[[], None]) -> Iterator[None]:
    """While inside, `work` is done whenever this process goes on after it was stopped."""
    number: Any = getattr(signal, "SIGCONT", None)
    before = None if number is None else signal.getsignal(number)
    if before is None:  # no such signal, or a handler that Python cannot put back
        yield
        return

    def go_on(number: int, frame: FrameType | None) -> None:
        work()
        if callable(before):
            before(number, frame)

    try:
        signal.signal(number, go_on)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)
