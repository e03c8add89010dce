"""A terminal emulator at the other end of a real pseudo-terminal, to ask what a person would see."""

from __future__ import annotations

import codecs
import fcntl
import itertools
import os
import pty
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

import pyte

WAIT_S = 20.0
_CUT = 16384


class _Screen(pyte.HistoryScreen):
    """Answers programs that ask where the cursor is, as terminals do."""

    answer: Callable[[str], None]

    def write_process_input(self, data: str) -> None:
        self.answer(data)


class Emulator:
    """Shows what is written to `path`. pyte cuts lines when it gets narrower: it does not wrap them anew."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.screen = _Screen(columns, lines, history=10_000, ratio=0.5)
        self.screen.answer = self.type
        self._stream = pyte.Stream(self.screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lock = threading.Lock()
        self._ours, self.theirs = pty.openpty()
        self._marks = itertools.count()
        self.bytes_seen = b""
        self.resize(columns, lines)
        threading.Thread(target=self._read, daemon=True).start()

    def open(self) -> TextIO:
        """A text stream on the terminal."""
        return open(os.dup(self.theirs), "w", encoding="utf-8")

    def type(self, keys: str) -> None:
        """As if typed by a person; a surrogate stands for a byte that is no UTF-8."""
        os.write(self._ours, keys.encode(errors="surrogateescape"))

    def start(self, arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """A program on this terminal, in front; `options` of Popen may send its streams elsewhere."""
        streams = {"stdin": self.theirs, "stdout": self.theirs, "stderr": self.theirs}
        return subprocess.Popen(
            arguments, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0),
            **(streams | options),
        )  # fmt: skip

    def resize(self, columns: int, lines: int) -> None:
        """Another size. A terminal takes it on before it tells: `take_size`, then `tell_size`."""
        self.take_size(columns, lines)
        self.tell_size(columns, lines)

    def take_size(self, columns: int, lines: int) -> None:
        with self._lock:
            self.screen.resize(lines, columns)

    def tell_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def settle(self) -> None:
        """Wait until everything that was written so far has been taken in."""
        mark = f"mark {next(self._marks)}"
        os.write(self.theirs, f"\x1b]2;{mark}\x07".encode())
        until = time.monotonic() + WAIT_S
        while self.screen.title != mark:
            assert time.monotonic() < until, "the terminal does not answer"
            time.sleep(0.001)

    def rows(self) -> list[str]:
        """The rows on the screen."""
        with self._lock:
            return [row.rstrip() for row in self.screen.display]

    def everything(self) -> list[str]:
        """What has scrolled out, and the screen up to its last row that is not blank."""
        with self._lock:
            width = self.screen.columns
            gone = ["".join(line[x].data for x in range(width)).rstrip() for line in self.screen.history.top]
            rows = gone + [row.rstrip() for row in self.screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def wait_for(self, text: str, seconds: float = WAIT_S * 3) -> list[str]:
        """Wait until some row holds the text; returns the rows then."""
        return self.wait_until(lambda rows: any(text in row for row in rows), seconds)

    def wait_until(self, condition: Callable[[list[str]], bool], seconds: float = WAIT_S * 3) -> list[str]:
        """Wait until the rows are so; returns them."""
        until = time.monotonic() + seconds
        while not condition(rows := self.rows()):
            assert time.monotonic() < until, "it did not come; there is\n" + "\n".join(rows)
            time.sleep(0.01)
        return rows

    def style_of(self, text: str) -> pyte.screens.Char:
        """How the first character of a text on the screen looks."""
        with self._lock:
            for y, row in enumerate(self.screen.display):
                if text in row:
                    return self.screen.buffer[y][row.index(text)]
        raise AssertionError(f"{text!r} is not on the screen")

    def close(self) -> None:
        os.close(self.theirs)

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._ours, _CUT)
            except OSError:  # nobody holds the other side any more
                part = b""
            if not part:
                os.close(self._ours)
                return
            with self._lock:
                self.bytes_seen += part
                # One by one: after a character without width pyte drops the rest of what it was given.
                for character in self._decoder.decode(part):
                    self._stream.feed(character)
