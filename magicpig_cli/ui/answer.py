"""Rendering one answer while it is generated: progress on stderr, text on stdout, one line of statistics."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import numpy as np

from magicpig_cli.engine.engine import Engine, Request
from magicpig_cli.errors import MagicpigError
from magicpig_cli.events import Event, Failed, Finished, TokenEvent
from magicpig_cli.ui import console
from magicpig_cli.ui.answer_text import AnswerText, TextLook
from magicpig_cli.ui.live import open_view
from magicpig_cli.ui.terminal import unseen_keys
from magicpig_cli.units import format_seconds

TWICE_WITHIN_S = 1.0  # two Ctrl-C within this time end the program


class Interrupts:
    """Remembers when Ctrl-C was pressed, across answers and prompts of one run."""

    def __init__(self) -> None:
        self._last = -TWICE_WITHIN_S

    def is_second(self) -> bool:
        """To be asked at each Ctrl-C: whether the one before was just now."""
        now = time.monotonic()
        second = now - self._last < TWICE_WITHIN_S
        self._last = now
        return second


@contextmanager
def cancel_on_interrupt(engine: Engine, key: str, interrupts: Interrupts) -> Iterator[None]:
    """While inside, the first Ctrl-C ends the answer cleanly at its next step; a second one soon after ends all."""

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if interrupts.is_second():
            raise KeyboardInterrupt
        engine.cancel(key)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        engine.take_cancelled(key)


def stream_answer(
    engine: Engine, request: Request, interrupts: Interrupts, *, show_text: bool, quiet: bool, live: bool = True,
    look: TextLook | None = None, observe: Callable[[Event], None] | None = None, so_far: list[str] | None = None,
) -> Finished:  # fmt: skip
    """Run one request. Text goes to stdout as it becomes safe to show. Raises MagicpigError if it cannot run.

    look: how the text is shown on a terminal; observe: is told every event; so_far: takes the text, for whom
    KeyboardInterrupt ends this before there is a Finished.
    """
    finished: Finished | None = None
    view = open_view(engine, wanted=live, quiet=quiet, what="reading the prompt", unit="tok", text_shown=show_text)
    text = AnswerText(view, look or TextLook()) if show_text else None
    with cancel_on_interrupt(engine, request.key, interrupts), unseen_keys(), view, _whole_lines(text):
        for event in engine.generate([request]):
            view.show(event)
            if observe is not None:
                observe(event)
            if isinstance(event, TokenEvent):
                if so_far is not None and event.text:
                    so_far.append(event.text)
                if text is not None:
                    text.feed(event.text)
            elif isinstance(event, Failed):
                raise MagicpigError(event.message, event.hint)
            elif isinstance(event, Finished):
                finished = event
                if text is not None and not finished.dropped:
                    text.finish(event.tail)
    show_notices(engine, quiet=quiet)
    assert finished is not None, "a request ends with Finished or Failed"
    return finished


@contextmanager
def _whole_lines(text: AnswerText | None) -> Iterator[None]:
    """What ends the program in the middle of an answer leaves all of its text and the end of the line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if text is not None:
            with suppress(OSError):  # of a terminal that is gone
                text.finish("")
        raise


def show_notices(engine: Engine, *, quiet: bool) -> None:
    """What the engine had to do differently, each said once."""
    for notice in engine.new_notices():
        if not quiet:
            console.say(notice)


def statistics_line(finished: Finished) -> str:
    """`1,043 + 120 tokens (900 reused) · TTFT 2.1 s · 14.2 tok/s · p99 81 ms · sampled 4.3%, error about 3.1%`."""
    timing = finished.timing
    reused = f" ({finished.reused_tokens:,} reused)" if finished.reused_tokens else ""
    parts = [f"{finished.prompt_tokens:,} + {len(finished.token_ids):,} tokens{reused}"]
    if timing.ttft_s:
        parts.append(f"TTFT {format_seconds(timing.ttft_s)}")
    if timing.tpot_ms:
        parts.append(f"{1000 / np.mean(timing.tpot_ms):.1f} tok/s")
        parts.append(f"p99 {np.percentile(timing.tpot_ms, 99):.0f} ms")
    ratio = finished.sampled_ratio
    error = "" if finished.error_estimate is None else f", error about {finished.error_estimate:.1%}"
    parts.append("exact attention" if ratio is None else f"sampled {ratio:.1%}{error}")
    if finished.reason != "stop":
        parts.append({"length": "stopped at the token limit", "interrupted": "interrupted"}[finished.reason])
    return " · ".join(parts)
