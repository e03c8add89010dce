"""The live view of `chat`, `batch` and `bench`: a panel below the text where it can move, plain progress elsewhere.

    with open_view(engine, wanted=not no_live, quiet=quiet) as view:
        for event in engine.generate(requests):
            view.show(event)

It is drawn between the engine's events, at most REFRESHES_PER_S times a second; there is no thread, so nothing is
drawn while a step is timed (scripts/bench_live.py measures what it costs).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from magicpig_cli.events import Event, PrefillProgress, TokenEvent
from magicpig_cli.ui import console
from magicpig_cli.ui.live_state import LiveState, Setup, Work
from magicpig_cli.ui.styles import Piece, styled
from magicpig_cli.ui.terminal import in_front, undropped_output

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.ui.screen import Frame

_EVERY_S = 1 / console.REFRESHES_PER_S
_SHARE = 0.005  # of the time is spent on drawing at most: a machine on which a frame takes longer sees fewer of them,
_RARELY_S = 1.0  # but one a second
_SPARE_ROWS = 3  # of the terminal that stay for the text


def open_view(
    engine: Engine | None, *, wanted: bool, quiet: bool, what: str, unit: str = "", slots: int = 1,
    text_shown: bool = False,
) -> View:  # fmt: skip
    """The view for this run: a panel if it is wanted and stderr is a terminal, else progress called `what`.

    text_shown: the answer's text goes to stdout while the view is open, so a reader of a pipe may print it anywhere.
    """
    if engine is None or quiet or not wanted or not console.is_live():
        return PlainView(what, unit, quiet=quiet)
    shares = text_shown and _same_terminal(sys.stdout, sys.stderr)
    ends_with_reading = text_shown and not shares and console.may_reach_a_terminal(sys.stdout)
    return PanelView(LiveState(setup(engine, slots)), engine.memory, shares=shares, ends_with_reading=ends_with_reading)


def setup(engine: Engine, slots: int) -> Setup:
    """What the panel says of the model and its plan."""
    plan = engine.plan
    mode = "exact attention" if plan.sampler is None else plan.title
    layers = tuple(
        "window" if window is not None else "dense" if number in plan.dense_layers else "sampled"
        for number, window in enumerate(engine.shape.layer_windows)
    )
    return Setup(f"{engine.model_name} · {mode} · {engine.device}", layers, slots, engine.context)  # type: ignore[arg-type]


def _same_terminal(one: TextIO, other: TextIO) -> bool:
    try:
        return one.isatty() and other.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    except (OSError, ValueError):
        return False


class View:
    """Shows how a run goes on. A context manager; closing twice is fine."""

    def __enter__(self) -> View:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def show(self, event: Event | None = None, work: Work | None = None) -> None:
        """Take in what the engine has just said, and how far the run is."""

    @property
    def counts_tokens(self) -> bool:
        """Whether something is seen to move while no text comes."""
        return False

    def forget_steps(self) -> None:
        """Steps to come are not to be mixed with those so far."""

    def write(self, text: str) -> None:
        """Text of an answer, to stdout: as it is into files and pipes, but it must not drive a terminal."""
        self.write_styled([(text, "")] if text else [])

    def write_styled(self, pieces: list[Piece]) -> None:
        """The same for pieces of text, which have their styles on a terminal only."""
        if pieces:
            terminal = sys.stdout.isatty()
            texts = (styled(console.printable(text), style) if terminal else text for text, style in pieces)
            sys.stdout.write("".join(texts))
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the terminal as it was, the text aside."""


class PlainView(View):
    """A bar until the first token, or for the parts of a run; in a log a line every ten seconds."""

    def __init__(self, what: str, unit: str, *, quiet: bool) -> None:
        self._track = console.Track(what, unit=unit, quiet=quiet)

    def __enter__(self) -> View:
        self._track.__enter__()
        return self

    def show(self, event: Event | None = None, work: Work | None = None) -> None:
        if work is not None:
            what = f"{work.what}, {work.detail}" if work.detail else work.what
            self._track.update(work.done, work.total, what)
        elif isinstance(event, PrefillProgress):
            self._track.update(event.done, event.total)
        elif isinstance(event, TokenEvent):
            self._track.close()

    def close(self) -> None:
        self._track.close()


class PanelView(View):
    """The panel, on stderr, below the text if that goes to the same terminal (`shares`)."""

    def __init__(
        self, state: LiveState, memory: Callable[[], dict[str, int]], *, shares: bool = False,
        ends_with_reading: bool = False,
    ) -> None:  # fmt: skip
        from magicpig_cli.ui.screen import Below

        self.state = state
        self._memory = memory
        self._shares = shares
        self._ends_with_reading = ends_with_reading
        self._out = sys.stderr
        self._below = Below(self._out, _frame_maker(state, self._out))
        self._due_at = 0.0
        self._busy = False
        self._to_stop: int | None = None  # signal that waits until it is no longer busy
        self._open = False
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> View:
        self._open = True
        self._ending.enter_context(undropped_output(self._out))
        self._ending.enter_context(_handling("SIGWINCH", self._on_resize))
        self._ending.enter_context(_handling("SIGTSTP", self._on_stop))
        notices = _Notices(self._out, self._note)
        self._ending.callback(notices.finish)
        self._ending.enter_context(contextlib.redirect_stderr(notices))
        return self

    def show(self, event: Event | None = None, work: Work | None = None) -> None:
        if event is not None:
            self.state.update(event)
            if self._ends_with_reading and isinstance(event, TokenEvent):
                self.close()
        if work is not None:
            self.state.work = work
        if self._open and (now := time.monotonic()) >= self._due_at:
            self._draw()
            took = time.monotonic() - now
            self._due_at = now + max(_EVERY_S, min(took / _SHARE, _RARELY_S))

    @property
    def counts_tokens(self) -> bool:
        return self._shares

    def forget_steps(self) -> None:
        self.state.forget_steps()

    def write_styled(self, pieces: list[Piece]) -> None:
        if not (self._shares and self._open):
            super().write_styled(pieces)
        elif pieces:
            with self._alone():
                self._below.write_styled([(console.printable(text), style) for text, style in pieces], sys.stdout)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._below.close(sys.stdout)
            self._ending.close()

    def _draw(self) -> None:
        if not in_front(self._out):  # continued in the background: the terminal is somebody else's
            return
        self.state.memory = self._memory()
        with self._alone():
            self._below.draw()

    def _note(self, line: str) -> None:
        """A line that something else wrote to stderr, above the panel."""
        with self._alone():
            self._below.write_line(line, self._out)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Signal handlers do not draw meanwhile."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before
            # Lines come from other threads too, and only the main one may change what a signal does.
            if self._to_stop is not None and not before and threading.current_thread() is threading.main_thread():
                self._stop(self._to_stop)

    def _on_resize(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._busy and self._below.shown:
            self._draw()

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        """Ctrl-Z, which waits for the end of a frame; not so a second one, for a terminal may take no more."""
        if self._busy and self._to_stop is None:
            self._to_stop = number
        else:
            self._stop(number)

    def _stop(self, number: int) -> None:
        """The shell finds its terminal without a panel, and `fg` draws it again."""
        self._to_stop = None
        if not self._busy:
            with self._alone():
                self._below.erase()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # stands still here until it is continued
        signal.signal(number, self._on_stop)
        self._below.begin_line()
        self._due_at = 0.0


class _Notices(console.InPlaceOf):
    """Stands for stderr while a panel is there, and hands over whole lines."""

    def __init__(self, real: TextIO, note: Callable[[str], None]) -> None:
        super().__init__(real)
        self._note = note
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._note(line)
        return len(text)

    def finish(self) -> None:
        """Write a line that nobody ended."""
        begun, self._begun = self._begun, ""
        if begun:
            self._real.write(begun)
            self._real.flush()


def _frame_maker(state: LiveState, out: TextIO) -> Frame:
    """Rows of the panel for a terminal of so many columns and rows; none where it has no room."""
    from rich.console import Console

    from magicpig_cli.ui.live_panel import MAX_WIDTH, MIN_WIDTH, ROWS, Look, render

    colour = not os.environ.get("NO_COLOR")
    look = Look(colour, utf8=console.shows_utf8(out))
    rich = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard" if colour else None, legacy_windows=False,
        markup=False, highlight=False, emoji=False, width=MAX_WIDTH,
    )  # fmt: skip
    asked = os.environ.get("COLUMNS", "")

    def frame(columns: int, rows: int) -> list[str]:
        # A row that ends in the last column may or may not move the cursor on: one column stays free.
        width = min(columns - 1, MAX_WIDTH, int(asked) if asked.isdecimal() and int(asked) else MAX_WIDTH)
        if width < MIN_WIDTH or rows < ROWS + _SPARE_ROWS:
            return []
        with rich.capture() as captured:
            rich.print(render(state, width, look), width=width)
        return captured.get().splitlines()

    return frame


@contextlib.contextmanager
def _handling(name: str, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While inside, a signal goes there; where there is none, or it has a handler or is ignored, all stays."""
    number: Any = getattr(signal, name, None)
    if number is None or signal.getsignal(number) != signal.SIG_DFL:  # None: a handler that Python cannot put back
        yield
        return
    try:
        before = signal.signal(number, handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)
