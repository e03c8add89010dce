"""Commands of a conversation on a terminal, and what is said of its context."""

from __future__ import annotations

from tests.cli.scripted import statistics, tokens


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
