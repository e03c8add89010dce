"""A place where batches run over a scripted engine, with everything else of the command: files, lock, manifest, resume.

Runs in this process, or in a fork that can be killed at any moment without the seconds that a new interpreter takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from magicpig_cli.batch import parameters, prepare
from magicpig_cli.batch.interrupt import Signals
from magicpig_cli.batch.request import RequestMaker
from magicpig_cli.cli import batch as command
from magicpig_cli.cli import batch_run
from magicpig_cli.config import Settings
from magicpig_cli.events import Finished
from magicpig_cli.model import loader
from magicpig_cli.planner import Plan
from tests import warm
from tests.batch.fakes import FakeEngine

CRASHED = 77  # exit status of a fork that ended itself


LINES: tuple[Any, ...] = (
    {"id": "a", "prompt": "a question", "max_tokens": 4},
    {"prompt": "the same"},
    {"id": "bad", "prompt": 1},
    {"prompt": "the same"},
    {"id": "fails", "prompt": "!"},
    {"prompt": "né", "temperature": 0.5},
    {"prompt": 2},
    {"id": "z", "prompt": "last one", "max_tokens": 3},
)
GOOD_LINES = 5
FAILS = frozenset({ord("!")})


def as_bytes(*lines: Any) -> bytes:
    """JSON values, or bytes as they are, one per line."""
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


@dataclass
class Desk:
    """One directory with `in.jsonl` and the output of its runs."""

    directory: Path
    maker: RequestMaker
    plan: Plan
    patch: pytest.MonkeyPatch
    engine: FakeEngine = field(default_factory=FakeEngine)
    loaded: int = 0  # how often the model was

    @property
    def answers(self) -> Path:
        return self.directory / "in.out.jsonl"

    @property
    def errors(self) -> Path:
        return self.directory / "in.out.errors.jsonl"

    @property
    def manifest(self) -> dict[str, Any]:
        return json.loads((self.directory / "in.out.meta.json").read_text())

    def write(self, *lines: Any) -> None:
        (self.directory / "in.jsonl").write_bytes(as_bytes(*lines))

    def run(self, *, settings: Settings | None = None, signals: Signals | None = None, **changes: Any) -> int:
        """Exit code of a run; `changes` are fields of its options. Raises what the command would tell of."""
        settings = settings or Settings()
        options = replace(_DEFAULTS, source=str(self.directory / "in.jsonl"), **changes)
        chosen = parameters.chosen(self.plan)
        identity = parameters.identity(settings, chosen, options.raw)
        maker = replace(self.maker, defaults=settings.generation, system=settings.system, identity=identity)
        self.patch.setattr(prepare, "without_weights", lambda *_: (maker, self.plan))
        self.patch.setattr(loader, "settled", lambda options: options)
        self.patch.setattr(batch_run, "load_engine", self._load)
        return command._run(settings, options, signals or Signals(), ["batch", "in.jsonl"])

    def _load(self, *_: Any, **__: Any) -> FakeEngine:
        self.loaded += 1
        return self.engine

    def forked(self, act: Callable[[], int]) -> int:
        """Process number of a fork that does this and ends with its result."""
        child = os.fork()
        if child:
            return child
        try:  # nothing of pytest may run in here
            devnull = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(devnull, descriptor)
            os._exit(act())
        except BaseException:
            os._exit(99)

    def records(self) -> list[dict[str, Any]]:
        """What is in both files, answers first, without what differs between runs. Ids are there once."""
        found = [comparable(line) for path in (self.answers, self.errors) if path.exists() for line in _lines(path)]
        ids = [record["custom_id"] for record in found]
        assert len(set(ids)) == len(ids), ids
        return found

    def result(self) -> list[dict[str, Any]]:
        """The records by id."""
        return sorted(self.records(), key=lambda record: record["custom_id"])

    def leftovers(self) -> set[str]:
        """Names that no finished run leaves."""
        kept = {"in.jsonl", "in.out.jsonl", "in.out.errors.jsonl", "in.out.meta.json"}
        return {path.name for path in self.directory.iterdir()} - kept

    @contextlib.contextmanager
    def elsewhere(self, name: str) -> Iterator[Desk]:
        """A desk beside it with the same input, empty otherwise."""
        directory = self.directory / name
        directory.mkdir()
        (directory / "in.jsonl").write_bytes((self.directory / "in.jsonl").read_bytes())
        yield Desk(
            directory, self.maker, self.plan, self.patch, replace(self.engine, pulled=[], finished=[], batches=[])
        )
        for path in directory.iterdir():
            path.unlink()
        directory.rmdir()

    def clean_result(self) -> list[dict[str, Any]]:
        """What one run over the present input gives."""
        with self.elsewhere("clean") as clean:
            clean.run(batch_size=1)
            return clean.result()


_DEFAULTS = command.Options(
    source="", output=None, batch_size=2, dry_run=False, strict=False, raw=True, overwrite=False, resume=False,
    retry_errors=False, force=False, ordered=False, allow_outside_files=False, share=True, max_delay_s=1.0,
    as_json=False, quiet=True, live=False,
)  # fmt: skip


def _lines(path: Path) -> list[bytes]:
    content = path.read_bytes()
    assert not content or content.endswith(b"\n"), content[-80:]
    return content.splitlines()


def comparable(line: bytes) -> dict[str, Any]:
    """A record without ids of its own, times and timings."""
    record = json.loads(line)
    del record["id"]
    if record["response"] is not None:
        body = record["response"]["body"]
        for holder, key in (
            (record["response"], "request_id"), (body, "id"), (body, "created"),
            (body["magicpig"], "ttft_ms"), (body["magicpig"], "tpot_ms"),
        ):  # fmt: skip
            del holder[key]
    return record


def killed_after(child: int, seconds: float) -> bool:
    """Kill a fork after that time; whether it was still there."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return not os.WIFEXITED(os.waitpid(child, 0)[1])


def ended(child: int) -> int:
    """Exit status of a fork."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def crash_at(count: int, files: tuple[str, ...], act: Callable[[], int]) -> int:
    """Run it until that many lines of these source files have been executed, then end as if killed."""
    left = count

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os._exit(CRASHED)
        return trace

    sys.settrace(trace)
    return act()


def wait_for_records(path: Path, count: int, running: warm.Program) -> None:
    """Until a process has written that many."""
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert running.poll() is None, running.communicate()
        time.sleep(0.01)


MANY = [{"id": str(n), "prompt": f"Question {n}", "max_tokens": 100} for n in range(2000)]


class Stopping(FakeEngine):
    """Asks for an end after so many answers, as a signal does."""

    after: int = 10**9
    signals: Signals | None = None

    def generate(self, requests, batch_size, max_delay_s):
        for event in super().generate(requests, batch_size, max_delay_s):
            yield event
            if isinstance(event, Finished) and len(self.finished) >= self.after and self.signals is not None:
                self.signals.asked = True


def stopped(desk: Desk, after: int, **changes: Any) -> int:
    """A run that ends after so many answers; the engine is a new one then."""
    signals, engine = Signals(), Stopping(fails=desk.engine.fails)
    engine.after, engine.signals = after, signals
    desk.engine = engine
    code = desk.run(signals=signals, **changes)
    desk.engine = FakeEngine(fails=engine.fails)
    return code
