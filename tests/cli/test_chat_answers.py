"""Answers of a conversation as a terminal shows them: markup, characters, Markdown, thoughts."""

from __future__ import annotations

import pytest

from tests.cli.scripted import statistics, tokens


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
