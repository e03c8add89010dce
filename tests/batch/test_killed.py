"""Killed at any moment, a run leaves a state from which the next one comes to the same result (CASES 13)."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable

import pytest

from magicpig_cli.errors import MagicpigError
from magicpig_cli.events import StepStats
from tests.batch.desk import CRASHED, FAILS, LINES, Desk, as_bytes, crash_at, ended, killed_after, stopped
from tests.batch.fakes import FakeEngine

FILES = ("batch/resume.py", "batch/writer.py", "batch/summary.py", "magicpig_cli/lock.py", "magicpig_cli/files.py")


def restore(desk: Desk, files: dict[str, bytes]) -> None:
    for path in desk.directory.iterdir():
        path.unlink()
    for name, content in files.items():
        (desk.directory / name).write_bytes(content)


CHANGED = (
    {"prompt": "new"},
    LINES[3],
    {"id": "bad", "prompt": 1},
    LINES[0],
    {"prompt": "!"},
    {"prompt": 3},
    LINES[1],
    *LINES[5:],
)


def killed_at_every_line(
    desk: Desk, files: dict[str, bytes], run: Callable[[], int], again: Callable[[], int], wanted: list[dict]
) -> int:
    """Kill `run` at every third line of the code that touches files, from those files on; `again` goes on each time.

    Returns at which line it was no longer killed.
    """
    for count in itertools.count(1, 3):
        restore(desk, files)
        code = ended(desk.forked(lambda: crash_at(count, FILES, run)))  # noqa: B023
        desk.engine = FakeEngine(fails=FAILS)
        assert again() == 3
        assert desk.result() == wanted, count
        assert desk.leftovers() == set()
        if code != CRASHED:
            assert code == 3
            return count
    raise AssertionError("it never ends")


def test_killed_at_every_line_of_the_code_that_touches_files(desk):
    """Each of these kills leaves a state from which a run goes on to the same result."""
    desk.write(*LINES)
    stopped(desk, 4)
    desk.answers.write_bytes(desk.answers.read_bytes() + b'{"id": "torn')
    desk.write(*CHANGED)
    files = {path.name: path.read_bytes() for path in desk.directory.iterdir()}
    wanted = desk.clean_result()
    assert wanted

    def run() -> int:
        return desk.run(resume=True, ordered=True)

    assert killed_at_every_line(desk, files, run, run, wanted) > 300


def test_killed_at_every_line_of_a_first_run(desk):
    desk.write(*LINES)
    wanted = desk.clean_result()
    files = {"in.jsonl": as_bytes(*LINES)}
    assert killed_at_every_line(desk, files, desk.run, lambda: desk.run(resume=True), wanted) > 100


class Slow(FakeEngine):
    """Takes two milliseconds for a step."""

    def generate(self, requests, batch_size, max_delay_s):
        for event in super().generate(requests, batch_size, max_delay_s):
            if isinstance(event, StepStats):
                time.sleep(0.002)
            yield event


def test_killed_at_random_moments_until_it_is_done(desk):
    """60 lines, SIGKILL from outside while it reads back, rewrites and writes; sometimes lines have moved."""
    chance = random.Random(5)
    lines = [{"id": str(n), "prompt": f"question {n % 50}"} if n % 3 else {"prompt": f"{n % 7}"} for n in range(60)]
    desk.write(*lines)
    desk.engine = Slow()
    kills = done = 0
    while kills < 40:
        if kills % 5 == 4:
            chance.shuffle(lines)
            desk.write(*lines)
        kills += killed_after(desk.forked(lambda: desk.run(resume=True)), chance.uniform(0.01, 0.08))
        before, done = done, desk.answers.read_bytes().count(b"\n") if desk.answers.exists() else 0
        assert done >= before  # none is lost
        if done == len(lines):  # something else to do
            lines, done = [{"id": f"{kills} {n}", "prompt": f"question {n}"} for n in range(60)], 0
            desk.write(*lines)
    assert desk.run(resume=True) == 0
    assert desk.result() == desk.clean_result()


def test_a_full_disk_while_files_are_rewritten(desk, monkeypatch):
    desk.write(*LINES)
    desk.run()
    desk.write(*CHANGED)
    before = desk.answers.read_bytes()
    import magicpig_cli.files as files

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(MagicpigError, match="No space left"):
            desk.run(resume=True)
    assert desk.answers.read_bytes() == before
    assert desk.leftovers() == set()
    desk.run(resume=True)
    assert desk.result() == desk.clean_result()
