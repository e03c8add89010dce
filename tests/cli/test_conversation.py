"""A conversation in a real pseudo-terminal, with a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pytest

STARTED = r"/help lists commands"
PROMPT = r"\x1b\[0;1m>"  # only once it stands there does the terminal hand keys over unchanged
STATISTICS = r"(\d[\d,]*) \+ (\d[\d,]*) tokens(?: \((\d[\d,]*) reused\))?"


@pytest.fixture
def chat(tiny_directory: Path) -> Callable[..., pexpect.spawn]:
    """Starts `magicpig chat` and waits until it is ready."""
    children: list[pexpect.spawn] = []

    def start(*arguments: str) -> pexpect.spawn:
        child = pexpect.spawn(
            sys.executable, ["-m", "magicpig_cli", "chat", "-m", str(tiny_directory), "--temperature", "0", *arguments],
            encoding="utf-8", codec_errors="replace", timeout=60, dimensions=(40, 160),
            env={**os.environ, "PROMPT_TOOLKIT_NO_CPR": "1"},
        )  # fmt: skip
        children.append(child)
        child.expect(STARTED)
        child.expect(PROMPT)
        return child

    yield start
    for child in children:
        child.close(force=True)


def statistics(child: pexpect.spawn) -> tuple[int, int, int]:
    """(prompt, completion, reused) tokens of the next statistics line."""
    child.expect(STATISTICS)
    prompt, completion, reused = (int((group or "0").replace(",", "")) for group in child.match.groups())
    child.expect(PROMPT)
    return prompt, completion, reused


def says(child: pexpect.spawn, pattern: str) -> None:
    """Wait for a notice and for the prompt after it."""
    child.expect(pattern)
    child.expect(PROMPT)


def test_turns_reuse_what_was_read(chat):
    child = chat("-n", "5")
    child.send("first question\r")
    first = statistics(child)
    assert first[1:] == (5, 0)
    child.send("second question\r")
    prompt, completion, reused = statistics(child)
    assert completion == 5
    # A byte per token, but the random answer may not be UTF-8: at least the first message is the same text.
    assert reused >= len("first question")
    assert prompt > reused
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_interrupted_answer_is_kept_and_the_next_turn_works(chat):
    child = chat("-n", "4000")
    child.send("tell me\r")
    child.expect(r"reading the prompt.*\x1b\[\?25h.{300}")  # the bar is gone, the answer runs
    child.sendintr()
    says(child, "interrupted")
    child.send("/context\r")
    child.expect(r"(\d[\d,]*) of 8,192 tokens")
    assert int(child.match[1].replace(",", "")) >= len("tell me")
    child.send("/set_nothing\r")
    says(child, "there is no command /set_nothing")
    child.send("/clear\r")
    says(child, "forgotten")
    child.send("/exit\r")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


def test_interrupt_while_reading_gives_the_text_back(chat):
    child = chat("-n", "4")
    text = "a long question " * 400
    child.send(f"\x1b[200~{text}\x1b[201~\r")
    child.expect("/ 6,400 tok")
    child.sendintr()
    child.expect("a long question")  # it stands in the next prompt, to be edited


def test_interrupt_twice_leaves_with_130(chat):
    child = chat()
    child.sendintr()
    says(child, "Ctrl-C again")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_interrupt_twice_while_answering_leaves_with_130(chat):
    child = chat("-n", "7000")
    child.send("tell me\r")
    child.expect(r"reading the prompt.*\x1b\[\?25h.{300}")
    child.kill(signal.SIGINT)
    time.sleep(0.3)  # signals that are pending together arrive as one
    child.kill(signal.SIGINT)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130


def test_pasted_lines_and_blocks_are_one_message(chat):
    child = chat("-n", "2")
    pasted = "one\ntwo\nthree"
    child.send(f"\x1b[200~{pasted}\x1b[201~\r")
    assert statistics(child)[0] == len(pasted)
    child.send("/clear\r")
    says(child, "forgotten")
    child.send('"""a\rb"""\r')
    assert statistics(child)[0] == len("a\nb")
    child.send("/clear\r")
    says(child, "forgotten")
    child.send("x\x1b\ry\r")  # Alt-Enter
    assert statistics(child)[0] == len("x\ny")


def test_commands(chat, tmp_path):
    document = tmp_path / "report [/INST].txt".replace("/", "∕")
    document.write_text("words " * 30, encoding="utf-8")
    child = chat("-n", "2")
    child.send("/hepl\r")
    says(child, "hint: /help")
    child.send(f"/file '{document}'\r")
    says(child, "180 tokens, goes into your next message")
    child.send("what does it say?\r")
    assert statistics(child)[0] > 180
    child.send("/undo\r")
    says(child, "took back")
    child.send("short\r")
    assert statistics(child)[0] == len("short")
    child.send("/file /nowhere/at/all\r")
    says(child, "error: .*nowhere")
    child.send("/file it's.txt\r")
    says(child, "error: .*it's.txt")
    child.send("/file ~nobody-of-that-name/x\r")
    says(child, "error: .*nobody")
    child.send("/system\r")
    child.expect("no system prompt")


def test_a_message_that_does_not_fit_is_refused_and_given_back(chat):
    child = chat("-c", "200", "-n", "2")
    child.send("\x1b[200~" + "long " * 60 + "\x1b[201~\r")
    child.expect(r"error: 300 prompt tokens.*200 tokens")
    child.expect("hint: ")
    child.expect(re.escape("long long"))  # it stands in the next prompt again
    child.sendcontrol("u")
    child.sendcontrol("c")


def test_a_pasted_block_that_begins_like_a_command_is_a_message(chat):
    child = chat("-n", "2")
    pasted = "/tmp/some/path is a path\nwhat is it?"
    child.send(f"\x1b[200~{pasted}\x1b[201~\r")
    assert statistics(child)[0] == len(pasted)
    child.send('""" """\r')  # nothing in it: nothing is sent
    child.send("/context\r")
    child.expect(rf"{len(pasted) + 1} of 8,192 tokens")
