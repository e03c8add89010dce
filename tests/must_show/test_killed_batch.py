"""A batch of the demo model that is killed ten times and gone on with gives what one run gives."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.batch.desk import as_bytes, comparable

LINES, KILLS, SEED = 60, 10, 20261130
FLAGS = ("-m", "demo", "--dtype", "float32", "--kv-dtype", "float32", "--quantize", "none", "--temperature", "0",
         "--batch-size", "4", "-q")  # fmt: skip


def lines() -> list[dict]:
    """Of mixed lengths; some without an id, two of them the same; three share a document, one is bad."""
    document = "The lighthouse keeper counts the ships that pass, and writes each one down. " * 20
    found: list[dict] = []
    for n in range(LINES):
        line: dict = {
            "prompt": f"{'Please. ' * (n % 9)}Tell me one fact about the number {n}.",
            "max_tokens": 12 + n % 20,
        }
        if n % 20 == 7:
            line["prompt"] = document + f"What does the keeper do? Answer in {n} words."
        if n % 10 == 9:
            line = {"prompt": "Name three colours of the rainbow.", "max_tokens": 16}
        elif n % 3:
            line["id"] = f"q-{n}"
        found.append(line)
    found[30] = {"id": "bad", "prompt": 1}
    return found


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(directory / "config")}
    return subprocess.Popen(
        [sys.executable, "-m", "magicpig_cli", "batch", "in.jsonl", *FLAGS, *arguments], cwd=directory, text=True,
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(running: subprocess.Popen[str]) -> None:
    _, err = running.communicate()
    assert running.returncode == 3, err  # one line is bad


def whole_lines(path: Path) -> list[bytes]:
    return (
        [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if path.exists() else []
    )


def result(directory: Path, stem: str) -> list[str]:
    """All records as text, without ids of their own, times and timings; each custom_id is there once."""
    records = [comparable(line) for name in (f"{stem}.jsonl", f"{stem}.errors.jsonl") for line in
               (directory / name).read_bytes().splitlines()]  # fmt: skip
    ids = [record["custom_id"] for record in records]
    assert len(ids) == len(set(ids)) == LINES
    return sorted(json.dumps(record, ensure_ascii=False) for record in records)


@pytest.fixture(scope="module")
def clean(demo_available, tmp_path_factory) -> Path:
    """A directory with the input and one uninterrupted run: `clean.jsonl`."""
    directory = tmp_path_factory.mktemp("killed")
    (directory / "in.jsonl").write_bytes(as_bytes(*lines()))
    finish(start(directory, "-o", "clean.jsonl"))
    return directory


@pytest.mark.slow
def test_killed_at_ten_random_moments(clean):
    chance = random.Random(SEED)
    print(f"seed of the moments: {SEED}")
    output, done = clean / "o.jsonl", 0
    for kill in range(KILLS):
        running = start(clean, "-o", "o.jsonl", "--resume")
        wanted = min(done + chance.randint(1, 2 * (LINES - done) // (KILLS - kill)), LINES - 4)
        while len(whole_lines(output)) < wanted and running.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        assert running.poll() is None, running.communicate()
        running.kill()
        running.communicate()
        now = whole_lines(output)
        assert len(now) >= done
        done = len(now)
        torn = output.stat().st_size - sum(map(len, now))
        print(f"kill {kill + 1}: {done} answers of {LINES - 1}, {torn} bytes torn")
    finish(start(clean, "-o", "o.jsonl", "--resume"))
    assert result(clean, "o") == result(clean, "clean")
    assert json.loads((clean / "o.meta.json").read_text())["state"] == "finished"


@pytest.mark.slow
def test_torn_lines(clean):
    """A few of the places at which tests/batch cuts everywhere."""
    for stem in ("clean", "torn"):
        (clean / f"{stem}.errors.jsonl").write_bytes((clean / "clean.errors.jsonl").read_bytes())
    (clean / "torn.meta.json").write_bytes((clean / "clean.meta.json").read_bytes())
    content = (clean / "clean.jsonl").read_bytes()
    last = content.rindex(b"\n", 0, -1) + 1
    before = content.rindex(b"\n", 0, last - 1) + 1
    for cut in ((before + last) // 2, last, len(content) - 2, len(content) - 1):
        (clean / "torn.jsonl").write_bytes(content[:cut])
        finish(start(clean, "-o", "torn.jsonl", "--resume"))
        assert result(clean, "torn") == result(clean, "clean")
