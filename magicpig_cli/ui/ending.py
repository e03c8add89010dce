"""SIGTERM and SIGHUP while there is something to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType

from magicpig_cli.signals import handled

_ENDING = ("SIGTERM", "SIGHUP")


@contextlib.contextmanager
def ending_by_signal(leave_prompt: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise `Ended`, and what is to be kept is kept; KeyboardInterrupt comes out.

    leave_prompt: has a prompt that waits for a line raise `Ended` instead; whether there is one.
    A second one does nothing: a terminal that is closed may send two, and the first one's work is under way.
    """
    ended = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        if ended:
            return
        ended = True
        if not leave_prompt():
            raise Ended

    try:
        with handled(_ENDING, end):
            yield
    except Ended:
        raise KeyboardInterrupt from None


class Ended(SystemExit):
    """Somebody else has ended the program."""
