"""Conversations and documents that are there again in another process; the model is tiny and random."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from magicpig_cli import session_files
from magicpig_cli.cli.one_turn import OneTurn
from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.errors import ContextError, MagicpigError, UsageError
from magicpig_cli.prompt_cache import PromptCache, check_path
from magicpig_cli.sessions import Sessions
from tests import warm

GREEDY = GenerationOptions(max_tokens=6, temperature=0.0)
BOOK = "".join(f"{n}: the ferry number {n * 7} leaves from pier {n % 5}.\n" for n in range(60))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A data directory of this test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "magicpig-cli" / "sessions"


def load(directory: Path, **attention) -> Engine:
    options = AttentionOptions(**{"mode": "lsh", "kv_dtype": "float32", **attention})
    model = ModelOptions(str(directory), device="cpu", dtype="float32")
    return Engine.load(Settings(model, options, GREEDY, threads=1))


@pytest.fixture(scope="module")
def engine(tiny_directory) -> Engine:
    return load(tiny_directory)


class Said(list):
    """What was said and warned of."""

    def sessions(self, **how) -> Sessions:
        return Sessions(self.append, self.append, **how)

    def cache(self, path: Path, engine: Engine) -> PromptCache:
        return PromptCache(path, engine, self.append, self.append)


@pytest.fixture
def said() -> Said:
    return Said()


def turn(engine: Engine) -> OneTurn:
    return OneTurn(engine, Settings(generation=GREEDY))


def ask(one: OneTurn, text: str, documents=(), cache: PromptCache | None = None):
    with contextlib.nullcontext() if cache is None else cache:
        return one.answer(list(documents), text, cache, show_text=False, quiet=True, live=False, markdown=False)


# Sessions


def held(engine: Engine, said: Said, name: str = "work", turns: int = 2, **how) -> OneTurn:
    """A conversation that was kept and left."""
    one, keeper = turn(engine), said.sessions(**how)
    keeper.open(name, one)
    for number in range(turns):
        ask(one, f"question {number} " + BOOK[:900])
        keeper.after_turn(one)
    keeper.leave(one)
    return one


def test_a_session_goes_on_where_it_was_left(engine, said, home):
    before = held(engine, said)
    assert sorted(path.name for path in home.iterdir()) == ["work.json", "work.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in home.iterdir()} == {0o600}
    content = json.loads((home / "work.json").read_text())
    assert content["messages"] == before.conversation.messages
    assert content["turns"] == 2
    assert content["tokens"] == before.sequence.length
    assert (home / "work.safetensors").stat().st_size > before.sequence.kv_bytes // 4
    assert any("keeping keys, values and index" in line and "MiB" in line for line in said)

    after, keeper = turn(engine), said.sessions()
    after.open(keeper, "work", quiet=True)
    assert after.conversation.messages == before.conversation.messages
    length = before.sequence.length
    resumed, never_left = ask(after, "and then?"), ask(before, "and then?")
    assert resumed.reused_tokens == never_left.reused_tokens >= length - 6  # the random answer may be no UTF-8
    assert resumed.token_ids == never_left.token_ids
    keeper.leave(after)


def test_a_question_that_does_not_fit_is_no_part_of_a_session(engine, said):
    one = held(engine, said, turns=1)
    before = list(one.conversation.messages)
    with pytest.raises(ContextError):
        ask(one, BOOK * 5)
    assert one.conversation.messages == before


def test_text_alone_is_read_again(engine, said, home):
    before = held(engine, said, with_cache=False)
    assert [path.name for path in home.iterdir()] == ["work.json"]
    after, keeper = turn(engine), said.sessions()
    after.open(keeper, "work", quiet=True)
    assert after.conversation.messages == before.conversation.messages
    assert after.sequence.length == 0
    keeper.leave(after)


def test_text_is_there_after_every_turn_though_the_process_is_killed(tiny_directory, home):
    """kill -9 while the second answer is made: the first turn is there, and another process can go on with it."""
    arguments = ("chat", "-m", str(tiny_directory), "--temperature", "0")
    first = warm.run(*arguments, "-n", "4", "--session", "a", "one")
    assert first.returncode == 0, first.stderr
    child = warm.Program(*arguments, "-n", "7000", "--session", "a", "two")
    assert child.stdout is not None
    child.stdout.read(1)
    taken = warm.run(*arguments, "--session", "a", "x")
    assert taken.returncode == 1
    assert f"process {child.pid} has session a open" in taken.stderr
    child.kill()
    child.communicate()
    done = warm.run(*arguments, "-n", "4", "--continue", "--json", "three")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["reused_tokens"] > 0
    content = json.loads((home / "a.json").read_text())
    assert [m["content"] for m in content["messages"] if m["role"] == "user"] == ["one", "three"]
    assert not list(home.glob(".*"))


def test_save_load_and_list(engine, said, home):
    one, keeper = turn(engine), said.sessions()
    ask(one, "first")
    keeper.after_turn(one)
    assert not home.exists()  # nothing is kept of what has no name
    assert "kept as" in keeper.save("first", one)[0]
    with pytest.raises(MagicpigError, match="there is a session first already"):
        said.sessions().save("first", one)
    keeper.save("second", one)
    assert keeper.name == "second"
    assert keeper.names() == ["second", "first"]
    columns, rows = keeper.table()
    assert len(columns) == len(rows[0])
    assert rows[0][0] == "second *"
    loaded = keeper.load("first", one)
    assert loaded.messages == one.conversation.messages
    assert loaded.sequence is not None
    with pytest.raises(MagicpigError, match="no session third"):
        keeper.load("third", one)
    assert keeper.name == "first"
    assert keeper.save(None, one)[0].startswith("kept as first")
    keeper.leave(one)
    assert session_files.most_recent() == "first"
    nameless = said.sessions()
    nameless.save(None, one)
    assert nameless.name is not None
    assert nameless.name[:2] == "20"
    nameless.leave(one)


@pytest.mark.parametrize(
    "name", ["", " ", "..", ".", ".hidden", "a/b", "/etc/passwd", "..\\x", "a\0b", "a\nb", "x" * 65, "-n"]
)
def test_names_lead_nowhere_else(name):
    with pytest.raises(UsageError, match="no name for a session"):
        session_files.checked_name(name)


@pytest.mark.parametrize("name", ["a", "Über uns 2", "2026-11-30-1", "本", "x.y_z+1"])
def test_names_that_people_give(name):
    assert session_files.checked_name(name) == name


def test_another_model_keeps_the_messages(engine, said, home, tiny_directory, tmp_path):
    from magicpig_cli.model.loader import _byte_tokenizer
    from tests.tiny import tiny_model

    held(engine, said)
    tiny_model("qwen2", eos_token_id=None).save_pretrained(tmp_path / "other")
    _byte_tokenizer().save_pretrained(tmp_path / "other")
    other = turn(load(tmp_path / "other"))
    loaded = said.sessions().open("work", other)
    assert loaded is not None
    assert len(loaded.messages) == 4
    assert loaded.sequence is None
    assert any("was held with" in line for line in loaded.notices)
    assert any("read again" in line and "model" in line and "in the file" in line for line in loaded.notices)


def test_a_damaged_session_says_so(engine, said, home):
    held(engine, said)
    (home / "work.safetensors").write_bytes(b"x" * 100)
    one, keeper = turn(engine), said.sessions()
    loaded = keeper.open("work", one)
    assert loaded is not None
    assert loaded.sequence is None
    assert any("not a cache" in line for line in loaded.notices)
    keeper.leave(one)
    for text in ("", "{}", "[1]", '{"format": "magicpig-session", "version": 1}', '{"format": "magicpig-session"'):
        (home / "work.json").write_text(text)
        with pytest.raises(MagicpigError, match="is no session"):
            said.sessions().open("work", turn(engine))
    (home / "work.json").write_text('{"format": "magicpig-session", "version": 9}')
    with pytest.raises(MagicpigError, match="newer version"):
        said.sessions().open("work", turn(engine))
    assert session_files.kept() == []


def test_the_command_line_outranks_what_was_kept(engine, said):
    held(engine, said)
    loaded = said.sessions().open("work", OneTurn(engine, Settings()))
    assert loaded is not None
    assert loaded.generation == GREEDY
    other = OneTurn(engine, Settings(generation=GenerationOptions(temperature=0.5)))
    loaded = said.sessions().open("work", other)
    assert loaded is not None
    assert loaded.generation == GenerationOptions(max_tokens=6, temperature=0.5)


def test_the_system_text_of_the_command_line_replaces_what_was_kept(engine, said):
    held(engine, said)
    other = OneTurn(engine, Settings(generation=GREEDY, system="Be brief."))
    loaded = said.sessions().open("work", other)
    assert loaded is not None
    assert loaded.system == "Be brief."
    assert loaded.messages[0] == {"role": "system", "content": "Be brief."}
    assert [message["role"] for message in loaded.messages[1:]] == ["user", "assistant"] * 2


def test_what_is_only_looked_at_stays_as_it_is(engine, said, home, tiny_directory):
    """By another model too, to which its keys and values are of no use."""
    held(engine, said)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in home.iterdir()}
    for other in (engine, load(tiny_directory, kv_dtype="bfloat16")):
        one, keeper = turn(other), said.sessions()
        one.open(keeper, "work", quiet=True)
        keeper.leave(one)
        assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in home.iterdir()} == before


def test_a_conversation_that_was_cleared_is_forgotten_on_disk_too(engine, said, home):
    held(engine, said)
    one, keeper = turn(engine), said.sessions()
    one.open(keeper, "work", quiet=True)
    one.conversation.clear()
    one.sequence.truncate(0)
    keeper.leave(one)
    assert [path.name for path in home.iterdir()] == ["work.json"]
    assert json.loads((home / "work.json").read_text())["messages"] == []


def test_ctrl_c_while_one_is_loaded_leaves_the_present_one(engine, said, home, monkeypatch):
    held(engine, said, "other")
    one, keeper = turn(engine), said.sessions()
    keeper.open("work", one)
    ask(one, "mine")
    keeper.after_turn(one)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    other = (home / "other.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(engine, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.load("other", one)
    assert keeper.name == "work"
    ask(one, "and again")
    keeper.after_turn(one)
    keeper.leave(one)
    assert (home / "other.json").read_bytes() == other
    assert json.loads((home / "work.json").read_text())["turns"] == 2
    said.sessions().open("other", turn(engine))  # nobody holds it


def test_what_a_killed_process_has_left_is_removed(engine, said, home):
    held(engine, said)
    (home / ".work.new").write_bytes(b"half of it")
    one, keeper = turn(engine), said.sessions()
    one.open(keeper, "work", quiet=True)
    assert not (home / ".work.new").exists()
    keeper.leave(one)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("system", 5), ("settings", {"generation": {"temperature": "hot"}}), ("settings", []),
        ("settings", {"generation": {"stop": "x"}}), ("settings", {"generation": {"top_k": 1.5}}), ("messages", ["hi"]),
    ],
)  # fmt: skip
def test_slips_of_those_who_edit_a_session(engine, said, home, place, value):
    held(engine, said, turns=1)
    content = json.loads((home / "work.json").read_text())
    (home / "work.json").write_text(json.dumps(content | {place: value}))
    if value == []:
        assert said.sessions().open("work", turn(engine)) is not None  # nothing is said of settings
        return
    with pytest.raises(MagicpigError, match="is no session"):
        said.sessions().open("work", turn(engine))


def test_a_session_goes_on_with_its_own_model(tiny_directory, home, tmp_path):
    """From another directory, and whatever the environment says; -m outranks it."""

    def run(*arguments: str, folder: Path = tmp_path) -> tuple[dict, str]:
        done = warm.run(
            "chat", "--temperature", "0", "-n", "2", "--json", *arguments, "hi", cwd=folder,
            env=os.environ | {"MAGICPIG_MODEL": "no/such-model"},
        )  # fmt: skip
        return json.loads(done.stdout) if done.returncode == 0 else {}, done.stderr

    run("--session", "a", "-m", tiny_directory.name, folder=tiny_directory.parent)
    for wanted in (["--continue"], ["--session", "a"]):
        answered, said = run(*wanted)
        assert answered["model"] == tiny_directory.name, said
        assert answered["usage"]["reused_tokens"] > 0
    answered, said = run("--continue", "-m", "./nowhere")
    assert "there is no file or directory nowhere" in said


def test_a_full_disk_keeps_the_text_and_warns(engine, said, home, monkeypatch):
    from magicpig_cli.cache import snapshot

    def full(path: Path, size: int) -> None:
        raise MagicpigError(f"{path} would take {size}, and 3 MiB are free there")

    monkeypatch.setattr(snapshot, "require_space", full)
    held(engine, said)
    assert [path.name for path in home.iterdir()] == ["work.json"]
    assert any("3 MiB are free" in line for line in said)


# Prompt cache


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--continue", "hi"], "no conversation to continue"),
        (["--session", "../x", "hi"], "no name for a session"),
        (["--session", "a", "--continue", "hi"], "give one of them"),
        (["--prompt-cache", "/no/such/place/b", "hi"], "cannot write"),
    ],
)
def test_wrong_use_is_answered_before_a_model_is_loaded(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "magicpig_cli", "chat", "-m", "no/such-model", *arguments], capture_output=True,
        text=True, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert "hint: " in done.stderr
