"""A conversation on a terminal as people have it: keys, Ctrl-C and signals. The model is real and tiny; what it
answers, each test says.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import termios
import time

import pytest

from tests.cli.scripted import statistics, tokens

# Keys


def test_alt_enter_and_ctrl_j_begin_a_new_line(scripted):
    chat = scripted("yes")
    chat.type("x\x1b\ry\x0az\r")
    chat.sees("yes")
    assert statistics(chat.at_prompt())[0][0] == tokens("x\ny\nz")


def test_a_paste_of_three_lines_is_one_message_and_comes_back_as_one(scripted):
    chat = scripted("first", "second")
    chat.paste("one\ntwo\nthree")
    chat.sees("three")
    chat.type("\r")
    assert statistics(chat.at_prompt())[0][0] == tokens("one\ntwo\nthree")
    chat.say("/clear")
    chat.type("\x1b[A\x1b[A")  # over /clear
    chat.terminal.wait_until(lambda rows: sum(row.rstrip() == "  three" for row in rows) == 2)
    chat.type("\r")
    rows = chat.at_prompt()
    assert "second" in rows
    assert statistics(rows)[1][0] == tokens("one\ntwo\nthree")


def test_a_pasted_block_that_begins_like_a_command_is_a_message(scripted):
    chat = scripted("a path")
    chat.paste("/tmp/some/path is a path\nwhat is it?")
    chat.type("\r")
    chat.sees("a path")
    assert statistics(chat.at_prompt())[0][0] == tokens("/tmp/some/path is a path\nwhat is it?")


def test_three_quotes_open_and_close_a_block(scripted):
    chat = scripted("fine")
    chat.type('"""a\r')
    chat.type('b"""\r')
    chat.sees("fine")
    assert statistics(chat.at_prompt())[0][0] == tokens("a\nb")
    chat.say('""" """')  # nothing in it: nothing is sent
    assert len(statistics(chat.at_prompt())) == 1


def test_the_history_is_private_and_outlives_the_chat(scripted):
    chat = scripted("fine")
    chat.say("remember me")
    chat.type("\x04")
    chat.ends_with(0)
    assert stat.S_IMODE(chat.history.stat().st_mode) == 0o600
    again = scripted("fine")
    again.type("\x1b[A")
    again.sees("> remember me")


def test_bytes_that_are_no_text_are_replaced(scripted):
    chat = scripted("fine")
    chat.type("abc \udcff\udcfe def\r")
    chat.sees("fine")
    assert statistics(chat.at_prompt())[0][0] == tokens("abc  def") + 2 * len("\ufffd".encode())


def test_keys_typed_during_an_answer_wait_for_the_prompt(scripted):
    chat = scripted("a b c d e f g h i j k l m n o p q r s t u v w x y z", pause_s=0.02)
    chat.type("go\r")
    chat.sees("a b")
    chat.type("next")
    chat.sees("> next")
    assert "a b c d e f g h i j k l m n o p q r s t u v w x y z" in chat.terminal.everything()


# Ctrl-C, Ctrl-D, signals


def test_ctrl_c_keeps_the_partial_answer_and_the_next_turn_works(scripted):
    chat = scripted("word " * 400, "the second answer", pause_s=0.01)
    chat.type("go\r")
    chat.sees("word word")
    chat.type("\x03")
    rows = chat.at_prompt()
    assert "interrupted" in rows[-1]
    prompt, completion, _ = statistics(rows)[0]
    assert prompt == tokens("go")
    assert 0 < completion < len("word " * 400)
    rows = chat.say("more")
    assert "the second answer" in rows
    # What was kept is part of the conversation, and was not read again.
    again = statistics(rows)[1]
    assert again[0] == prompt + completion + tokens("more")
    assert again[2] == prompt + completion - 1  # the last token of an answer is not run


def test_ctrl_c_while_reading_gives_text_and_documents_back(scripted, tmp_path):
    (tmp_path / "book.txt").write_text("a long book " * 550, encoding="utf-8")
    chat = scripted("unused", "the answer")
    chat.say("/file book.txt")
    chat.type("what is in it?\r")
    chat.sees("reading the prompt")
    chat.type("\x03")
    rows = chat.terminal.wait_until(lambda rows: sum("what is in it?" in row for row in rows) == 2)
    assert "interrupted before there was an answer" in rows
    chat.type("\r")
    chat.sees("the answer")
    prompt, _, reused = statistics(chat.at_prompt())[0]
    assert prompt == tokens(("a long book " * 550) + "\n\nwhat is in it?")
    assert 0 < reused < prompt  # what had been read was not read again


def test_ctrl_c_at_the_prompt(scripted):
    chat = scripted()
    chat.type("half a line")
    chat.sees("> half a line")
    rows = chat.interrupt_prompt()  # it goes away, and there is nothing to explain
    assert "Ctrl-C again" not in "\n".join(rows)
    time.sleep(1.1)
    assert "Ctrl-C again, Ctrl-D or /exit leaves" in chat.interrupt_prompt()
    time.sleep(1.1)
    chat.interrupt_prompt()
    assert chat.process.exitcode is None
    chat.type("\x03")
    assert chat.ends_with(130)[-1] == "interrupted"


def test_ctrl_c_twice_during_an_answer(scripted):
    chat = scripted("word " * 400, pause_s=0.01)
    chat.type("go\r")
    chat.sees("word word")
    chat.type("\x03")
    time.sleep(0.05)  # signals that are pending together arrive as one
    chat.type("\x03")
    rows = chat.ends_with(130)
    assert rows[-1].removeprefix("^C") == "interrupted"  # not behind the text; ^C: an echo
    assert not any(row[:1] in tuple("╭╰│") for row in rows)
    assert not chat.terminal.screen.cursor.hidden


@pytest.mark.parametrize("signalled", [False, True], ids=["Ctrl-C twice", "SIGTERM"])
@pytest.mark.parametrize("one_turn", [False, True], ids=["in a chat", "one turn"])
def test_a_session_keeps_what_was_answered_when_it_is_ended(scripted, signalled, one_turn):
    question = ("go",) if one_turn else ()
    chat = scripted("word " * 40, pause_s=0.3, arguments=("--session", "work", *question), ready=not one_turn)
    if not one_turn:
        chat.type("go\r")
    chat.sees("word")
    if signalled:
        os.kill(chat.process.pid, signal.SIGTERM)
    else:
        chat.type("\x03")
        time.sleep(0.05)  # signals that are pending together arrive as one
        chat.type("\x03")  # before the step has ended that the first one waits for
    assert "Traceback" not in "\n".join(chat.ends_with(130))
    (path,) = chat.home.rglob("work.json")
    asked, answered = json.loads(path.read_text())["messages"]
    assert (asked["role"], asked["content"], answered["role"]) == ("user", "go", "assistant")
    assert answered["content"].startswith("word")


def test_ctrl_d_leaves_with_0(scripted):
    chat = scripted()
    chat.type("\x04")
    assert not any("interrupted" in row for row in chat.ends_with(0))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [False, True], ids=["at the prompt", "answering"])
def test_a_signal_ends_it_cleanly(scripted, number, answering):
    chat = scripted("word " * 400, pause_s=0.01)
    if answering:
        chat.type("go\r")
        chat.sees("word word")
    os.kill(chat.process.pid, number)
    rows = chat.ends_with(130)
    assert "Traceback" not in "\n".join(rows)
    assert not any(row[:1] in tuple("╭╰│") for row in rows)


@pytest.mark.parametrize("answered", [False, True], ids=["at once", "with something to keep"])
def test_the_end_of_its_terminal_ends_it(start_scripted, tmp_path, answered):
    """As if its window had been closed: nobody is left to be told, nothing runs on, and what is to be kept is kept."""
    ours, theirs = pty.openpty()
    process = start_scripted(
        os.ttyname(theirs), "an answer", arguments=("--session", "work"), environment={"PROMPT_TOOLKIT_NO_CPR": "1"}
    )
    said = b""
    while b"kept after every turn" not in said:
        said += os.read(ours, 4096)
    while answered and termios.tcgetattr(theirs)[3] & termios.ICANON:  # the prompt is not there yet
        time.sleep(0.01)
    os.write(ours, b"go\r" if answered else b"")
    while answered and b"TTFT" not in said:
        said += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    process.join(60)
    assert process.exitcode is not None
    kept = sorted(path.name for path in (tmp_path / "data" / "magicpig-cli" / "sessions").iterdir())
    assert kept == (["work.json", "work.safetensors"] if answered else [])
