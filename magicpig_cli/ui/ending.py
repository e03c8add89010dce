"""SIGTERM and SIGHUP while there is something to keep."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_ENDING = ("SIGTERM", "SIGHUP")  # by name: not every system has them


@contextlib.contextmanager
def ending_by_signal(leave_prompt: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While inside, SIGTERM and SIGHUP raise `Ended`, and what is to be kept is kept; KeyboardInterrupt comes out.

    leave_prompt: has a prompt that waits for a line raise `Ended` instead; whether there is one.
    Not one that whoever started this process wants ignored (`nohup`), and not a second one: a terminal that is closed
    may send two, and the first one's work is under way.
    """
    ended = False

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal ended
        if ended:
            return
        ended = True
        if not leave_prompt():
            raise Ended

    numbers: list[Any] = [number for name in _ENDING if (number := getattr(signal, name, None)) is not None]
    # None: a handler that Python cannot put back
    numbers = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except Ended:
        raise KeyboardInterrupt from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Ended(SystemExit):
    """Somebody else has ended the program."""
