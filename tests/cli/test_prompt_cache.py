"""`chat --prompt-cache`: documents that are read once, however a process ends; the model is tiny and random."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.prompt_cache import check_path
from tests import warm
from tests.cli.keeping import BOOK, ask, load, turn


def test_documents_are_read_once(said, tmp_path, tiny_directory):
    engine = load(tiny_directory, mode="exact")
    path = tmp_path / "book.cache"
    first = ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    assert first.reused_tokens == 0
    assert path.exists()
    assert not list(tmp_path.glob(".book*"))
    assert any("written to" in line and "MiB" in line for line in said)
    written = path.stat().st_mtime_ns
    second = ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    assert second.text == first.text
    assert second.reused_tokens > len(BOOK)
    other = ask(turn(engine), "Another question?", [("book.txt", BOOK)], said.cache(path, engine))
    assert other.reused_tokens == second.reused_tokens
    assert other.text == ask(turn(engine), "Another question?", [("book.txt", BOOK)]).text
    assert path.stat().st_mtime_ns == written  # the question differs, the documents do not


def test_an_edited_document_reuses_what_comes_before(engine, said, tmp_path):
    path = tmp_path / "book.cache"
    ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    edited = BOOK[:1200] + "X" + BOOK[1201:]
    before = path.stat().st_mtime_ns
    finished = ask(turn(engine), "Where to?", [("book.txt", edited)], said.cache(path, engine))
    assert 1100 < finished.reused_tokens < 1250
    assert any("the text is another than in the file" in line for line in said)
    assert path.stat().st_mtime_ns > before
    assert ask(turn(engine), "?", [("book.txt", edited)], said.cache(path, engine)).reused_tokens > len(BOOK)
    before = path.stat().st_mtime_ns
    shorter = ask(turn(engine), "Where to?", [("book.txt", edited[:2000])], said.cache(path, engine))
    assert shorter.reused_tokens > 1900
    assert path.stat().st_mtime_ns == before  # the file has all of it


def test_a_question_alone_does_not_take_the_place_of_documents(engine, said, tmp_path):
    """As where -f was forgotten, or the conversation was cleared."""
    path = tmp_path / "book.cache"
    ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    before = path.read_bytes()
    ask(turn(engine), "A long question. " * 30, cache=said.cache(path, engine))
    assert path.read_bytes() == before
    ask(turn(engine), "A long question. " * 30, cache=said.cache(tmp_path / "new", engine))
    assert (tmp_path / "new").exists()


def test_what_is_in_memory_is_not_read_from_the_file(engine, said, tmp_path, monkeypatch):
    cache = said.cache(tmp_path / "book.cache", engine)
    one = turn(engine)
    ask(one, "Where to?", [("book.txt", BOOK)], cache)
    one.conversation.clear()
    monkeypatch.setattr(engine, "restore", lambda *_: pytest.fail("it was read"))
    assert ask(one, "Where to?", [("book.txt", BOOK)], cache).reused_tokens > len(BOOK)


def test_ctrl_c_once_the_answer_is_complete_gives_up_the_file_alone(engine, said, tmp_path, monkeypatch):
    def slowly(*_: object, go_on, **__: object) -> int:
        while True:
            go_on()
            time.sleep(0.01)

    monkeypatch.setattr(engine, "save", slowly)
    one, cache = turn(engine), said.cache(tmp_path / "book.cache", engine)
    with cache:
        finished = one.answer(
            [("book.txt", BOOK)], "Where to?", cache, show_text=False, quiet=True, live=False, markdown=False
        )
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert len(finished.token_ids) == 6
    assert [message["role"] for message in one.conversation.messages] == ["user", "assistant"]
    assert "no prompt cache: interrupted" in said


def test_a_signal_before_the_writing_has_begun_gives_it_up(engine, said, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    ask(turn(engine), "Where from?", [("other.txt", BOOK[::-1])])  # which starts all threads but that of the file
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(tmp_path / "book.cache", engine))
    assert "no prompt cache: interrupted" in said


def test_another_sampler_makes_the_index_anew_and_says_so(engine, said, tmp_path, tiny_directory):
    path = tmp_path / "book.cache"
    ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    other = load(tiny_directory, K=8, L=75)
    finished = ask(turn(other), "Where to?", [("book.txt", BOOK)], said.cache(path, other))
    assert finished.reused_tokens > len(BOOK)
    assert any("K 8 here, 10 in the file; L 75 here, 150 in the file" in line for line in said)


def test_a_file_of_another_kind_is_refused_and_stays(engine, said, tmp_path, tiny_directory):
    path = tmp_path / "book.cache"
    ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    with pytest.raises(MagicpigError, match="number type of K/V bfloat16 here, float32 in the file"):
        said.cache(path, load(tiny_directory, kv_dtype="bfloat16"))
    path.write_text("my novel")
    with pytest.raises(MagicpigError, match="not a cache"):
        said.cache(path, engine)
    assert path.read_text() == "my novel"


def test_a_failed_write_is_a_warning(engine, said, tmp_path, monkeypatch):
    path = tmp_path / "book.cache"

    def broken(*_: object, **__: object) -> int:
        raise MagicpigError("cannot write book.cache: Input/output error")

    monkeypatch.setattr(engine, "save", broken)
    finished = ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(path, engine))
    assert len(finished.token_ids) == 6
    assert any("no prompt cache: cannot write" in line for line in said)
    assert not path.exists()


def test_without_room_nothing_is_written_and_the_answer_is_there(engine, said, tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    finished = ask(turn(engine), "Where to?", [("book.txt", BOOK)], said.cache(tmp_path / "b", engine))
    assert finished.token_ids
    assert any("no prompt cache" in line and "1000 B are free" in line for line in said)
    assert not (tmp_path / "b").exists()


def test_places_where_no_cache_can_be_are_refused_early(tmp_path):
    with pytest.raises(UsageError, match="is a directory"):
        check_path(tmp_path)
    with pytest.raises(UsageError, match="cannot write"):
        check_path(tmp_path / "no" / "such" / "place")
    with pytest.raises(UsageError, match="no regular file"):
        check_path(Path("/dev/null"))


def test_killed_while_it_answers_the_file_is_there(tiny_directory, tmp_path):
    """The cache is written from the first token on, not when the answer is done."""
    (tmp_path / "book.txt").write_text(BOOK)
    arguments = (
        "chat", "-m", str(tiny_directory), "-f", str(tmp_path / "book.txt"), "--prompt-cache",
        str(tmp_path / "b.cache"), "--json",
    )  # fmt: skip
    child = warm.Program(*arguments, "-n", "4000", "?", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (tmp_path / "b.cache").exists() and time.monotonic() < until and child.poll() is None:
        time.sleep(0.05)
    assert child.poll() is None
    child.kill()
    child.wait()
    done = warm.run(*arguments, "-n", "2", "again?")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["reused_tokens"] > len(BOOK)
    assert "prompt cache" in done.stderr


# Signals

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
