"""Signals that a part of the program handles for a while."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def handled(names: tuple[str, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While inside, these signals call `handler`; by name, as not every system has them all.

    Not those that whoever started this process wants ignored (`nohup`).
    """
    numbers: list[Any] = [number for name in names if (number := getattr(signal, name, None)) is not None]
    # None: a handler that Python cannot put back
    numbers = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
