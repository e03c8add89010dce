"""A conversation on a terminal as people have it. The model is real and tiny; what it answers, each test says."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import stat
import termios
import time

import pytest


def statistics(rows: list[str]) -> list[tuple[int, int, int]]:
    """(prompt, completion, reused) tokens of each answer. A token is a byte."""
    found = re.findall(r"^(\d[\d,]*) \+ (\d[\d,]*) tokens(?: \((\d[\d,]*) reused\))?", "\n".join(rows), re.MULTILINE)
    return [tuple(int((count or "0").replace(",", "")) for count in counts) for counts in found]  # type: ignore[misc]


def tokens(*messages: str) -> int:
    """Of a prompt of these messages: the template puts three characters before each, and before the answer."""
    return sum(3 + len(message) for message in messages) + 3


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
    assert rows[-1] == "interrupted"  # not behind the text
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


# Answers


def test_markup_in_an_answer_is_text(scripted):
    chat = scripted("[/INST] [bold]x[/bold] [/'A', 1] :smile: \x1b[31mred")
    rows = chat.say("go")
    assert "[/INST] [bold]x[/bold] [/'A', 1] :smile: \\x1b[31mred" in rows


@pytest.mark.parametrize(
    "answer", ["渡轮早上七点开往岛上，中午返回。价格是四十元。", "It is ☀ and 🙂🎉 over 東京, naïve café."]
)
@pytest.mark.parametrize("columns", [100, 30])  # pyte loses a wide character that begins in the last column
def test_characters_of_several_bytes_come_whole(scripted, answer, columns):
    chat = scripted(answer, columns=columns)
    shown = "".join(chat.say("go"))
    assert answer.replace(" ", "") in shown.replace(" ", "")
    assert "�" not in chat.terminal.bytes_seen.decode()


def test_markdown_is_styled_and_its_text_is_whole(scripted):
    answer = "# Title\n\nA **bold word**, `code` and 2 ** 3.\n\n- one\n- two\n\n```python\nx = 1\n```\n\n"
    answer += "| a | b |\n|---|---|\n| 1 | twenty |\n\nThe end"
    chat = scripted(answer)
    rows = chat.say("go")
    for line in ("Title", "A bold word, code and 2 ** 3.", "• one", "• two", "```python", "x = 1", "The end"):
        assert line in rows
    assert any("1" in row and "twenty" in row and "|" not in row for row in rows)
    assert chat.terminal.style_of("bold word").bold
    assert not chat.terminal.style_of("2 ** 3").bold
    assert chat.terminal.style_of("Title").underscore


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [(("--no-markdown",), {}), ((), {"NO_COLOR": "1"})],
    ids=["--no-markdown", "NO_COLOR"],
)
def test_markdown_as_the_model_writes_it(scripted, arguments, environment):
    chat = scripted("A **bold word**\n- one", arguments=arguments, environment=environment)
    rows = chat.say("go")
    assert "A **bold word**" in rows
    assert "- one" in rows


def test_markdown_is_switched_off_in_between(scripted):
    chat = scripted("**one**", "**two**")
    chat.say("go")
    chat.say("/set markdown off")
    rows = chat.say("on")
    assert "one" in rows
    assert "**two**" in rows


@pytest.mark.parametrize("columns", [45, 120])
def test_a_resize_during_an_answer(scripted, columns):
    words = " ".join(f"word{n}" for n in range(120))
    chat = scripted(words, pause_s=0.004, arguments=("-n", "2000"))
    chat.type("go\r")
    chat.sees("word20")
    chat.terminal.resize(columns, 40)
    chat.sees("word119")
    rows = chat.at_prompt()
    assert not any(row[:1] in tuple("╭╰│") for row in rows)
    if columns > 100:  # pyte cuts what does not fit; it does not wrap it anew
        assert words.replace(" ", "") in "".join(rows).replace(" ", "")


THOUGHT = "<think>\nLet me see: **2** + 2.\n</think>\n\nIt is 4."


def test_thoughts_are_dim_and_go_not_back_to_the_model(scripted):
    chat = scripted(THOUGHT, "Again 4.")
    rows = chat.say("2 + 2?")
    assert rows[-3:-1] == ["Let me see: **2** + 2.", "It is 4."]
    assert "\x1b[2mL" in chat.terminal.bytes_seen.decode()
    assert statistics(chat.say("sure?"))[1][0] == tokens("2 + 2?", "It is 4.", "sure?")


def test_thoughts_can_be_hidden(scripted):
    chat = scripted(THOUGHT)
    chat.say("/set think off")
    rows = chat.say("2 + 2?")
    assert rows[-2] == "It is 4."
    assert not any("Let me see" in row for row in rows)


def test_a_template_that_opens_the_thought_itself(scripted, tmp_path):
    template = tmp_path / "think.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1].strip() }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>\n{% endif %}", encoding="utf-8",
    )  # fmt: skip
    chat = scripted("I wonder.\n</think>\n\nIt is 4.", "4", arguments=("--chat-template", str(template)))
    rows = chat.say("2 + 2?")
    assert rows[-3:-1] == ["I wonder.", "It is 4."]
    second = "user: 2 + 2?\nassistant: It is 4.\nuser: sure?\nassistant: <think>\n"
    assert statistics(chat.say("sure?"))[1][0] == len(second)


# Commands


def test_an_unknown_command_says_what_may_be_meant(scripted):
    chat = scripted()
    rows = chat.say("/regne")
    assert rows[-2:] == ["error: there is no command /regne", "hint: did you mean /regen?"]
    assert chat.say("/xyzzy")[-1] == "hint: /help lists them"
    assert chat.say("/UNDO")[-1] == "hint: did you mean /undo?"
    assert chat.say("/help fil")[-1] == "hint: did you mean /file?"
    assert chat.say("/")[-1] == "hint: /help lists them"


def test_a_path_that_was_meant_for_file(scripted, tmp_path):
    (tmp_path / "a report.txt").write_text("text", encoding="utf-8")
    chat = scripted(columns=200)
    for typed in (f"{tmp_path}/a report.txt", f"  {tmp_path}/a report.txt"):
        assert chat.say(typed)[-1] == f"hint: /file '{tmp_path}/a report.txt' puts it into your next message"


def test_words_after_a_command_that_takes_none(scripted):
    chat = scripted("first")
    chat.say("one")
    assert chat.say("/undo 2")[-2:] == ["error: nothing can follow /undo, but there is '2'", "hint: /undo"]
    assert chat.say("/context")[-1].startswith(f"{tokens('one') + len('first')} of")


def test_a_turn_taken_back_leaves_its_document_in_the_cache(scripted, tmp_path):
    """It is not read again where the next message begins with it; where it does not, nothing of it is left."""
    (tmp_path / "book.txt").write_text("a long book " * 50, encoding="utf-8")
    chat = scripted("first", "second", "third", "fourth")
    chat.say("/file book.txt")
    chat.say("what is in it?")
    chat.type("/retry\r")
    chat.terminal.wait_until(lambda rows: rows.count("> what is in it?") == 2)
    chat.sees(f"context {len('a long book ' * 50):,}/8,192")  # counted once: as the document that waits
    chat.type("!\r")
    chat.sees("second")
    prompt, _, reused = statistics(chat.at_prompt())[1]
    assert (prompt, reused) == (tokens("a long book " * 50 + "\n\nwhat is in it?!"), prompt - len("!<a>"))
    chat.say("/undo")
    assert chat.say("/context")[-2].startswith("0 of 8,192 tokens")
    assert statistics(chat.say("and who wrote it?"))[2][2] > 600
    chat.say("/undo")
    chat.say("/undo")  # the book
    assert statistics(chat.say("hello"))[3][2] == len("<u>")


def test_undo_regen_and_retry(scripted):
    chat = scripted("first", "second", "third", "fourth")
    chat.say("one")
    rows = chat.say("/regen")
    assert "second" in rows
    assert statistics(rows)[1] == (tokens("one"), len("second") + 1, tokens("one") - 1)
    assert statistics(chat.say("two"))[2][0] == tokens("one", "second", "two")
    chat.say("/undo")
    assert chat.say("/context")[-1].startswith(f"{tokens('one') + len('second<')} of 8,192 tokens")
    chat.type("/retry\r")
    chat.terminal.wait_until(lambda rows: rows.count("> one") == 2)
    chat.type("!\r")
    chat.sees("fourth")
    assert statistics(chat.at_prompt())[-1][0] == tokens("one!")
    chat.say("/undo")
    assert chat.say("/undo")[-1] == "error: there is no turn to take back"
    assert chat.say("/regen")[-1] == "error: there is no question to answer again"


def test_regen_says_when_the_answer_will_be_the_same(scripted):
    chat = scripted(*map(str, range(12)), arguments=("--seed", "5"))

    def said(*lines: str) -> int:
        """How often it was said, after these lines."""
        for line in lines:
            rows = chat.say(line)
        return "\n".join(rows).count("gives the same answer")

    assert said("go", "/regen") == 1
    assert "seed 5 is fixed" in "\n".join(chat.at_prompt())
    assert said("/set temperature 0", "/regen") == 1
    assert said("/regen") == 2
    assert "temperature 0 gives the same answer" in "\n".join(chat.at_prompt())
    for change in ("/set attention exact", "/set attention default", "/set max_tokens 9", "/system Be brief."):
        assert said(change, "/regen") == 2, change
    assert said("/set attention exact", "/set attention default", "/set think off", "/regen") == 3
    assert said("more", "/undo", "/regen") == 4  # the answer to `go` again


def test_regen_may_go_further_than_an_interrupted_answer(scripted):
    chat = scripted("x" * 500, "y", pause_s=0.02, arguments=("--temperature", "0"))
    chat.type("go\r")
    chat.sees("xxx")
    chat.type("\x03")
    assert "interrupted" in "\n".join(chat.at_prompt())
    assert "the same answer" not in "\n".join(chat.say("/regen"))


def test_documents(scripted, tmp_path):
    (tmp_path / "a [/INST] report.txt".replace("/", "∕")).write_text("words " * 30, encoding="utf-8")
    (tmp_path / "scan.pdf").write_bytes(b"%PDF-1.7\n\xff\xfe\0")
    (tmp_path / "long.txt").write_text("x" * 9000, encoding="utf-8")
    chat = scripted("yes", "no")
    rows = chat.say("/file a*.txt")
    assert "180 tokens, goes into your next message; context then 180 of 8,192 (2%)" in "".join(rows[-2:])
    assert statistics(chat.say("what?"))[0][0] == tokens("words " * 30 + "\n\nwhat?")
    rows = "\n".join(chat.say("/file long.txt"))
    assert "long.txt has 9,000 tokens, which do not fit beside the 196 in use: the context is 8,192" in rows
    assert "hint: pdftotext" in "\n".join(chat.say("/file scan.pdf"))
    assert "error: there is no file /nowhere" in "\n".join(chat.say("/file /nowhere"))
    assert "error: /dev/zero is a device" in "\n".join(chat.say("/file /dev/zero"))
    assert f"error: {tmp_path} is a directory" in "".join(chat.say(f"/file {tmp_path}"))
    (tmp_path / "huge.txt").write_text("x" * 200_000, encoding="utf-8")
    rows = "".join(chat.say("/file huge.txt"))
    assert "huge.txt has more than 131,072 tokens, which do not fit beside the 196 in use: the context is 8,192" in rows
    assert "error: /file it's.txt: " in "\n".join(chat.say("/file it's.txt"))
    rows = chat.say("/undo")
    assert "goes into your next message" in rows[-1]  # the report, as before the turn
    assert chat.say("/undo")[-1].startswith("took back a")
    assert statistics(chat.say("short"))[-1][0] == tokens("short")


def test_settings(scripted):
    chat = scripted("a long answer", arguments=("--seed", "5"))
    assert "budget: share of keys read" in chat.say("/help set")[-1]
    assert chat.say("/set temperature 0.25")[-1] == "temperature 0.25 (set)"
    assert chat.say("/set max-tokens 3")[-1] == "max_tokens 3 (set)"
    assert chat.say("/set top_p 2")[-2] == "error: top-p is 2.0, allowed is 0 to 1"
    assert chat.say("/set top_k many")[-2] == "error: top_k is a whole number, not 'many'"
    assert chat.say("/set temprature 1")[-1] == "hint: temperature"
    assert chat.say('/set stop "##" END')[-1] == "stop '##' 'END' (set)"
    assert chat.say("/set seed")[-1] == "seed 5 (set)"
    assert chat.say("/set seed default")[-1] == "seed drawn anew for each answer (default)"
    assert chat.say("/set think maybe")[-2] == "error: think is on or off, not 'maybe'"
    assert chat.say("/set attention exact")[-1] == "attention exact (set)"
    assert chat.say("/set attention lsh")[-2] == "error: attention is default or exact here, not 'lsh'"
    assert chat.say("/set attention default")[-1] == "attention auto (default)"
    assert chat.say("/set budget 0.05")[-1] == "budget 0.05 (set)"
    assert chat.say("/set budget 2")[-2] == "error: budget 2 is no share of the keys: want above 0, up to 1"
    assert chat.say("/set target-error")[-1] == "target_error off (default)"
    assert statistics(chat.say("go"))[0][1] == 3
    rows = "\n".join(chat.say("/show"))
    assert "sampler rabitq, budget 0.05" in rows
    assert chat.say("/set budget default")[-1] == "budget 0.02 (default)"
    assert "temperature 0.25 (set)" in rows
    rows = "\n".join(chat.say("/stats"))
    assert f"{tokens('go')} in the prompt, 0 of them reused, 3 generated" in rows


def test_another_system_prompt_keeps_the_conversation(scripted):
    chat = scripted("aye", "yes", arguments=("-s", "Be a pirate."))
    assert chat.say("/system")[-1] == "system prompt: Be a pirate."
    chat.say("hi")
    assert "reads the" in chat.say("/system Be brief.")[-1]
    assert statistics(chat.say("bye"))[1] == (tokens("Be brief.", "hi", "aye", "bye"), 4, len("<s>Be "))


def test_tab_completes_commands_paths_and_keys(scripted, tmp_path):
    (tmp_path / "a report.txt").write_text("text", encoding="utf-8")
    chat = scripted()
    for typed, offered, completed in (
        ("/con", "tokens used of the context", "/context"),
        ("/set tempe", "temperature", "/set temperature"),
        ("/file a", "a report.txt", "/file a\\ report.txt"),
    ):
        chat.type("\x15" + typed)
        chat.sees(offered)
        chat.type("\t")
        chat.sees(f"> {completed}")
    chat.type("\r")
    chat.sees("4 tokens, goes into your next message")


def test_the_toolbar(scripted):
    chat = scripted("fine")
    chat.say("hello")
    bar = [row for row in chat.terminal.rows() if row][-1]
    assert bar.startswith("tiny · context 15/8,192 (0%) · auto 2% · ")
    assert "tok/s" in bar
    chat.terminal.resize(25, 40)
    chat.type(" ")
    chat.terminal.wait_until(lambda rows: [row for row in rows if row][-1].startswith("context 15/8,192 (0%)"))


# Context


def test_warnings_of_the_context_come_once_each(scripted):
    chat = scripted("x" * 70, "y" * 6, "z" * 4, "w" * 20, arguments=("-c", "128"))
    rows = "\n".join(chat.say("a" * 20))
    assert "warning: 96 of 128 tokens of context are used (75%)" in rows
    assert "\n".join(chat.say("b")).count("warning") == 1
    rows = "\n".join(chat.say("c"))
    assert rows.count("warning") == 2
    assert "(9" in rows.split("warning")[2]
    chat.type("d" * 30 + "\r")
    chat.sees("error: 156 prompt tokens do not fit the context of 128 tokens")
    chat.terminal.wait_until(lambda rows: rows.count("> " + "d" * 30) == 2)  # to be edited
    chat.type("\x03")
    chat.at_prompt()
    chat.say("/clear")
    assert "\n".join(chat.say("e" * 95)).count("warning") == 3


def test_a_message_that_does_not_fit_is_refused_and_given_back(scripted):
    chat = scripted(arguments=("-c", "200", "-n", "2"))
    chat.paste("long " * 60)
    chat.type("\r")
    chat.sees("error: 306 prompt tokens + 2 answer tokens do not fit the context of 200 tokens")
    chat.terminal.wait_until(lambda rows: sum("long long" in row for row in rows) >= 6)  # in the next prompt again
