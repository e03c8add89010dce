"""Programs that a test starts as `subprocess.Popen` does, without waiting for what they import.

Each is a process of its own, but forked from a server that has imported torch and transformers, four seconds of a core
otherwise. What depends on a shell, or on the environment at import (MAGICPIG_ISA, HF_HOME), is started in full; so is
what tests how a program begins.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any

_PRELOADED = (
    "magicpig_cli.engine.engine", "transformers.models.llama.modeling_llama", "magicpig_cli.ui.chat.loop",
    "tests.conftest", "magicpig_cli.cli.app", "magicpig_cli.ui.live_panel", "magicpig_cli.model.loader",
    "magicpig_cli.batch.command", "magicpig_cli.evals.run", "magicpig_cli.tuning.tune",
)  # fmt: skip


def server() -> ForkServerContext:
    """Forks processes; `tests/cli/scripted.py` has some of another kind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def take_terminal() -> None:
    """In a new process: the terminal that stdin is becomes its own."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def open_streams(*descriptors: int) -> None:
    """In a new process: stdin, stdout and stderr are these."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = _writer(1)
    sys.stderr = _writer(2)


def _writer(descriptor: int) -> IO[str]:
    return open(
        descriptor, "w", encoding="utf-8", errors="backslashreplace" if descriptor == 2 else "strict",
        buffering=1 if descriptor == 2 or os.isatty(descriptor) else -1, closefd=False,
    )  # fmt: skip


class _Descriptor:
    """One that a process gets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (reduction.DupFd(self.number),)


def _detached(given: Any) -> int:
    return int(given.detach())


@dataclass(frozen=True)
class _Order:
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    own_terminal: bool
    hangups_count: bool


def _run(order: _Order, *descriptors: int) -> None:
    """In the new process."""
    open_streams(*descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    if order.own_terminal:
        take_terminal()
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.folder)
    signal.signal(signal.SIGHUP, signal.SIG_DFL if order.hangups_count else signal.SIG_IGN)
    from magicpig_cli import __main__ as entry

    sys.argv = [str(entry.__file__), *order.arguments]
    entry.main()


class Program:
    """`magicpig ARGUMENTS…`, with what tests use of a Popen."""

    stdout: IO[Any] | None
    stderr: IO[Any] | None

    def __init__(
        self, *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None, text: bool = False,
        stdin: int = subprocess.DEVNULL, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE,
        own_terminal: bool = False,
    ) -> None:  # fmt: skip
        """Streams: PIPE (but for stdin), DEVNULL or a descriptor. own_terminal: that of stdin."""
        self.args = [sys.executable, "-m", "magicpig_cli", *arguments]
        hangups_count = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        order = _Order(arguments, dict(env or os.environ), cwd or Path.cwd(), own_terminal, hangups_count)
        opened: list[int] = []

        def connected(stream: int, name: str | None = None) -> _Descriptor:
            if stream == subprocess.DEVNULL:
                opened.append(os.open(os.devnull, os.O_RDWR))
            elif stream == subprocess.PIPE and name is not None:
                read, write = os.pipe()
                setattr(self, name, os.fdopen(read, "r" if text else "rb", encoding="utf-8" if text else None))
                opened.append(write)
            else:
                return _Descriptor(stream)
            return _Descriptor(opened[-1])

        self.stdout = self.stderr = None
        streams = connected(stdin), connected(stdout, "stdout"), connected(stderr, "stderr")
        self._process = server().Process(target=_run, args=(order, *streams))
        self._process.start()
        for descriptor in opened:
            os.close(descriptor)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """All of stdout and stderr, None for what is no pipe."""
        with ThreadPoolExecutor(2) as readers:
            found = [readers.submit(_all_of, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return found[0].result(), found[1].result()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _all_of(stream: IO[Any] | None) -> Any:
    if stream is None or stream.closed:
        return None
    with stream:
        return stream.read()


def run(
    *arguments: str, input: str | None = None, timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """As `subprocess.run`, with text from pipes. input: as much as a pipe holds; None: nothing, and no pipe."""
    read, write = os.pipe()
    os.write(write, (input or "").encode())
    os.close(write)
    stdin = {} if input is None else {"stdin": read}
    program = Program(*arguments, text=True, **stdin, **options)
    os.close(read)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(program.args, program.wait(), out, err)
