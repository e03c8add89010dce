"""Work that Ctrl-C can leave behind, though it is one long call that Python cannot interrupt."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def interruptible(work: Callable[[], Result]) -> Result:
    """What `work` returns or raises. On Ctrl-C, KeyboardInterrupt at once; the work ends unseen.

    For tokenizers: they take 4.6 s for a million tokens (demo model) in one call, other threads running meanwhile.
    """
    done: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as problem:
            done.put((None, problem))

    threading.Thread(target=run, daemon=True).start()
    result, problem = done.get()
    if problem is not None:
        raise problem
    return result  # type: ignore[return-value]  # there was no problem
