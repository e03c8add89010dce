"""Conversations that are there again in another process; the model is tiny and random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from magicpig_cli import session_files
from magicpig_cli.cli.one_turn import OneTurn
from magicpig_cli.config import GenerationOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.errors import ContextError, MagicpigError, UsageError
from tests import warm
from tests.cli.keeping import BOOK, GREEDY, Said, ask, load, turn

pytestmark = pytest.mark.usefixtures("home")


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
