"""stderr for people, stdout for results. Nothing printed here is ever parsed as markup (CASES 7, 32).

Progress moves only where stderr is a terminal; in a log file it is one plain line every ten seconds.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from magicpig_cli.errors import INTERRUPTED, UNREAD, MagicpigError
from magicpig_cli.units import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESHES_PER_S = 4
PLAIN_EVERY_S = 10.0
_UNWRAPPED_COLUMNS = 1000  # tables that go into a file or a pipe are not cut at a terminal's width
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

_verbose = False
_debug = False


def set_verbose(on: bool) -> None:
    """Whether `detail` prints (-v)."""
    global _verbose
    _verbose = on


def set_debug(on: bool) -> None:
    """Whether errors come with tracebacks (--debug)."""
    global _debug
    _debug = on


def debugging() -> bool:
    return _debug


def is_live() -> bool:
    """Whether progress may move. Not Rich's `is_terminal`, which FORCE_COLOR turns on inside pipes."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def may_reach_a_terminal(stream: TextIO) -> bool:
    """Whether what is written there may come out on a terminal: it is one, or a pipe whose reader may print it."""
    try:
        kind = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return True
    return not stat.S_ISREG(kind) and (stream.isatty() or not stat.S_ISCHR(kind))  # /dev/null is no terminal


def _styled() -> bool:
    return is_live() and not os.environ.get("NO_COLOR")


def styles_text(stream: TextIO) -> bool:
    """Whether text that goes there may be styled, with bullets and lines: a terminal that has colours and UTF-8."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain and shows_utf8(stream)


def shows_utf8(stream: TextIO) -> bool:
    """Whether every character can be written there."""
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def printable(text: str) -> str:
    """Text from a model, file or exception with control characters made visible, so that it cannot drive a terminal."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def _write(text: str, sgr: str = "") -> None:
    text = printable(text)
    sys.stderr.write(f"\x1b[{sgr}m{text}\x1b[0m\n" if sgr and _styled() else text + "\n")
    sys.stderr.flush()


def say(text: str) -> None:
    """A dim notice on stderr."""
    _write(text, "2")


def detail(text: str) -> None:
    """A notice that only -v shows."""
    if _verbose:
        say(text)


def warn(text: str) -> None:
    """Something that the user should know, though the run goes on."""
    _write(f"warning: {text}", "33")


def error(problem: MagicpigError | str) -> None:
    """`error: cause`, each on one line, and `hint: what to type`."""
    message, hint = (problem, None) if isinstance(problem, str) else (problem.message, problem.hint)
    _write("error: " + _one_line(message), "31")
    if hint:
        _write("hint: " + _one_line(hint))


def exit_status(work: Callable[[], object]) -> int:
    """Do the work of a script: what goes wrong is told as the command tells it. Returns the exit status."""
    try:
        work()
        sys.stdout.flush()
    except MagicpigError as problem:
        error(problem)
        return problem.exit_code
    except KeyboardInterrupt:
        with lasting_stderr():
            say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return UNREAD
    finally:
        leave_streams()
    return 0


def print_last(text: str) -> None:
    """A result on stdout at the end of a run that ends early: if nobody can read it any more, so be it."""
    try:
        print(text, flush=True)
    except OSError:
        _silence(sys.stdout)


def leave_streams() -> None:
    """The last thing of a run. What cannot be written any more is lost; otherwise Python would complain of it while it
    shuts down, and end with a status of its own.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed from the beginning
        try:
            stream.flush()
        except (OSError, ValueError):
            _silence(stream)


def _silence(stream: TextIO) -> None:
    """Nothing more can be written there, and nothing more is."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def lasting_stderr() -> Iterator[None]:
    """While inside, what cannot be written to stderr is lost: its terminal may be closed long before a run ends."""
    with contextlib.redirect_stderr(_Lasting(sys.stderr)):
        yield


class InPlaceOf(io.TextIOBase):
    """Stands for another stream; subclasses say what becomes of what is written."""

    def __init__(self, real: TextIO) -> None:
        self._real = real

    def isatty(self) -> bool:
        return self._real.isatty()

    def fileno(self) -> int:
        return self._real.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._real.encoding


class _Lasting(InPlaceOf):
    """Loses what cannot be written."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._real.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._real.flush()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[str] = ()) -> None:
    """A plain aligned table on stdout; cells fold at a terminal's width and stay whole in files. `right`: columns."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    at_right = set(right)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for name in columns:
        table.add_column(Text(name), justify="right" if name in at_right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    terminal = sys.stdout.isatty()
    plain = not terminal or bool(os.environ.get("NO_COLOR"))
    console = Console(
        file=io.StringIO(), markup=False, highlight=False, emoji=False, force_terminal=not plain,
        color_system=None if plain else "standard", width=terminal_columns() if terminal else _UNWRAPPED_COLUMNS,
    )  # fmt: skip
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    print("\n".join(line.rstrip() for line in lines))


def terminal_columns() -> int:
    return shutil.get_terminal_size().columns  # COLUMNS first


class Track:
    """Progress of one piece of work, as a context manager: a bar where it can move, else a line every ten seconds.

    `unit` follows the counts (`1,024 / 9,000 tok`), with so many a second; a total of 0 means unknown.
    """

    def __init__(self, description: str, *, unit: str = "", quiet: bool = False) -> None:
        self.description = description
        self.unit = unit
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said = time.monotonic()
        self._begun: tuple[float, float] | None = None  # done at the first update, and when that was

    def __enter__(self) -> Track:
        if not self._quiet and is_live():
            self._bar = self._start_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def update(self, done: float, total: float = 0, description: str | None = None) -> None:
        """Show that `done` of `total` is done."""
        self.description = description or self.description
        counts = f"{done:,.0f}" + (f" / {total:,.0f}" if total else "") + (f" {self.unit}" if self.unit else "")
        rate = self._rate(done)
        if rate:
            counts += f", {rate:,.0f} {self.unit}/s"
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task, description=printable(self.description), completed=done, total=total or None, counts=counts
            )
        elif not self._quiet and time.monotonic() - self._said >= PLAIN_EVERY_S:
            self._said = time.monotonic()
            left = f", {format_seconds((total - done) / rate)} left" if total and rate else ""
            _write(f"{self.description}: {counts}" + (f" ({done / total:.0%}{left})" if total else ""))

    def _rate(self, done: float) -> float:
        """Units per second since the first update; 0 while there is none worth showing."""
        now = time.monotonic()
        if self._begun is None or done < self._begun[0]:
            self._begun = (done, now)
        fresh, seconds = done - self._begun[0], now - self._begun[1]
        return fresh / seconds if self.unit and fresh >= seconds > 0 else 0.0

    def note(self, text: str) -> None:
        """A notice that stays, above the bar if there is one."""
        if self._bar is not None:
            from rich.text import Text

            self._bar.console.print(Text(printable(text), style="dim" if _styled() else ""))
        elif not self._quiet:
            say(text)

    def close(self) -> None:
        """Remove the bar. Further updates show nothing; closing twice is fine."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._quiet = True

    def _start_bar(self) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(file=sys.stderr, markup=False, highlight=False, emoji=False),
            refresh_per_second=REFRESHES_PER_S,
            transient=True,
        )
        self._task = bar.add_task(printable(self.description), total=None, counts="")
        bar.start()
        return bar
