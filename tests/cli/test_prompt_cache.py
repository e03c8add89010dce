"""`chat --prompt-cache` in a process that is ended while the file is written."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

BOOK = "".join(f"{n}: the ferry number {n * 7} leaves from pier {n % 5}.\n" for n in range(60))
ENDED = [signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder with a book."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    (folder / "book.txt").write_text(BOOK, encoding="utf-8")
    return folder


def with_cache(shelf: Path, *arguments: str) -> tuple[str, ...]:
    return ("-f", str(shelf / "book.txt"), "--prompt-cache", str(shelf / "b.cache"), *arguments)


def wait_until_writing(shelf: Path) -> None:
    until = time.monotonic() + 60
    while not (shelf / ".b.cache.new").exists():
        assert time.monotonic() < until, "it is not written"
        time.sleep(0.01)


@pytest.mark.parametrize("number", ENDED)
@pytest.mark.parametrize("one_turn", [False, True], ids=["in a chat", "one turn"])
def test_a_signal_during_an_answer_leaves_the_old_file_and_nothing_else(scripted, shelf, number, one_turn):
    (first := scripted("yes", arguments=with_cache(shelf, "where?"), ready=False)).ends_with(0)
    before = (shelf / "b.cache").read_bytes()
    (shelf / "book.txt").write_text("Another " + BOOK, encoding="utf-8")
    question = ("where?",) if one_turn else ()
    chat = scripted("word " * 40, pause_s=0.3, piece_s=0.5, arguments=with_cache(shelf, *question), ready=not one_turn)
    if not one_turn:
        chat.type("where?\r")
    wait_until_writing(shelf)
    os.kill(chat.process.pid, number)
    rows = chat.ends_with(130)
    assert "warning: no prompt cache: interrupted" in rows
    assert "Traceback" not in "\n".join(rows)
    assert sorted(path.name for path in shelf.iterdir()) == ["b.cache", "book.txt"]
    assert (shelf / "b.cache").read_bytes() == before
    assert first.process.exitcode == 0


@pytest.mark.parametrize("number", ENDED)
def test_a_signal_once_the_answer_is_complete_loses_the_file_alone(scripted, shelf, number):
    chat = scripted("yes", piece_s=0.5, arguments=with_cache(shelf, "--json", "where?"), ready=False, columns=2000)
    (line,) = [row for row in chat.sees('"finish_reason"') if row.startswith("{")]
    assert json.loads(line)["text"] == "yes"
    wait_until_writing(shelf)
    os.kill(chat.process.pid, number)
    chat.ends_with(130)
    assert [path.name for path in shelf.iterdir()] == ["book.txt"]


def test_a_session_keeps_all_of_a_turn_whose_file_is_given_up(scripted, shelf):
    """Its keys and values too, though the signal came before it was back at the prompt."""
    chat = scripted("yes", piece_s=0.1, arguments=with_cache(shelf, "--session", "work"))
    chat.type("where?\r")
    chat.sees("TTFT")
    wait_until_writing(shelf)
    os.kill(chat.process.pid, signal.SIGTERM)
    chat.ends_with(130)
    assert [path.name for path in shelf.iterdir()] == ["book.txt"]
    (kept,) = chat.home.rglob("work.json")
    content = json.loads(kept.read_text(encoding="utf-8"))
    assert content["messages"][-1]["content"] == "yes"
    assert content["tokens"] > len(BOOK)
    assert kept.with_name("work.safetensors").stat().st_size > 0
