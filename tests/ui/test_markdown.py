"""Markdown while it comes: however an answer is cut into tokens, the same is shown, and no character gets lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.ui.markdown import Markdown
from magicpig_cli.ui.styles import Piece, sgr, styled


def show(text: str, seed: int | None = None, *, hold_tables: bool = True) -> list[Piece]:
    """Pieces of the text, which comes at once or a few characters at a time."""
    markdown = Markdown(lambda: 80, hold_tables=hold_tables)
    pieces: list[Piece] = []
    draw = random.Random(seed)
    while text:
        count = len(text) if seed is None else draw.randint(1, 6)
        pieces += markdown.feed(text[:count])
        text = text[count:]
    return pieces + markdown.finish()


def characters(pieces: list[Piece]) -> list[Piece]:
    return [(character, style) for text, style in pieces for character in text]


def plain(pieces: list[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def style_of(pieces: list[Piece], text: str) -> str:
    """Style of the first character of a text."""
    return characters(pieces)[plain(pieces).index(text)][1]


PARTS = [
    "# Title\n", "### Small `x`\n", "Some **bold words** and *it* and `co*de`.\n", "snake_case 2 ** 3 **/*.py a*b*c\n",
    "- one\n", "* two **b**\n", "  - in it\n", "1. first\n", "12) last\n", "> a _quote_\n", "---\n", "\n",
    "3.5 and -5\n",
    "```python\ndef f(x):\n    return 'x'\n```\n", "~~~\na ``` b\n~~~\n", "```nolang\n<x>\n```\n", "[/INST] [a](http://b)\n",
    "| a | b |\n|---|--:|\n| **1** | 渡轮 |\n", "| no table\n", "***both*** ~~out~~ __init__ \\* \\( x_1 \\)\n",
    "🙂 naïve é\n",
    "unclosed **bold and `code\n", "```\nnever closed\n", "    indented\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=8), st.integers(0, 1000))
def test_how_it_comes_changes_nothing(parts, seed):
    text = "".join(parts)
    assert characters(show(text, seed)) == characters(show(text))
    assert characters(show(text.rstrip("\n"), seed)) == characters(show(text.rstrip("\n")))


@given(st.text(alphabet="ab *_`~#->|\\\n1.", max_size=60), st.integers(0, 1000))
def test_nor_does_it_of_anything_else(text, seed):
    assert characters(show(text, seed)) == characters(show(text))


@given(st.text(alphabet="ab*_`~ #->|\n.", max_size=60))
def test_letters_are_never_lost(text):
    assert [c for c in plain(show(text)) if c in "ab"] == [c for c in text if c in "ab"]


@pytest.mark.parametrize(
    "text",
    ["2 ** 3 * 4", "a snake_case_name and _x", "glob **/*.py and *.c", "f(**kw) and *args", "__init__.py",
     "[/INST] [/'A', 1] [link](http://x)", "C:\\dir \\( x \\)", "5 * 3 and 6 * 2", "~ about ~5",
     "-5 and #1 and 2024 was",
     "a `b", "**open"],
)  # fmt: skip
def test_what_is_no_markdown_stays(text):
    assert plain(show(text, 1)) == text
    assert {style for _, style in show(text, 1)} == {""}


def test_styles():
    pieces = show("# Head\n**bold *both* too** and *it* with `code`\n- **b**\n> quote\n", 3)
    assert plain(pieces) == "Head\nbold both too and it with code\n• b\n▌ quote\n"
    assert style_of(pieces, "Head") == "bold underline"
    assert style_of(pieces, "bold both") == "bold"
    assert style_of(pieces, "it with") == "italic"
    assert style_of(pieces, "code") == "cyan"
    assert style_of(pieces, "b\n▌") == "bold"
    assert style_of(pieces, "quote") == "italic"


def test_words_do_not_wait_for_the_end_of_their_paragraph():
    markdown = Markdown(lambda: 80)
    assert plain(markdown.feed("Words that ")) == "Words that "
    assert plain(markdown.feed("come **and")) == "come "
    assert markdown.feed(" wait**") == []  # the asterisks may be three
    assert markdown.feed(" go") == [("and wait", "bold"), (" go", "")]
    assert plain(markdown.feed("\n- it")) == "\n• it"


def test_a_marker_without_partner_is_not_waited_for_for_ever():
    markdown = Markdown(lambda: 80)
    shown = "".join(plain(markdown.feed("word ")) for _ in range(3))
    shown += plain(markdown.feed("*"))
    for _ in range(60):
        shown += plain(markdown.feed("word "))
    assert "*word word" in shown


@pytest.mark.parametrize("text", ["*a " * 300, "`" + "x" * 158 + "`", "`" + "x" * 159 + "`", "**" + "y " * 79 + "z**z"])
def test_how_far_a_partner_may_be_does_not_depend_on_the_pieces(text):
    for seed in range(5):
        assert characters(show(text, seed)) == characters(show(text))


def test_code_keeps_its_characters_and_is_coloured_line_by_line():
    markdown = Markdown(lambda: 80)
    pieces = markdown.feed('```python\n"""a\n')
    pieces += markdown.feed("return # [/INST]\n")
    assert pieces[-2] == ("return # [/INST]", "yellow")  # within a string that was opened a line before
    rest = markdown.feed('"""\nreturn\t1') + markdown.finish()
    assert plain(pieces + rest) == '```python\n"""a\nreturn # [/INST]\n"""\nreturn\t1'
    assert style_of(rest, "return") != ""


def test_a_very_long_line_of_code_does_not_wait():
    markdown = Markdown(lambda: 80)
    markdown.feed("```\n")
    shown = "".join(plain(markdown.feed("x" * 100)) for _ in range(50))
    assert len(shown) > 2000
    assert shown + plain(markdown.feed("\nend\n")) == "x" * 5000 + "\nend\n"


def test_a_table_comes_at_its_end():
    markdown = Markdown(lambda: 60)
    assert markdown.feed("| name | n |\n|:--|--:|\n| a `b` | 1 |\n| 渡轮 | 23") == []
    rows = plain(markdown.feed(" |\n\nAfter")).splitlines()
    assert [row.split() for row in rows if "─" not in row] == [
        ["name", "n"],
        ["a", "b", "1"],
        ["渡轮", "23"],
        [],
        ["After"],
    ]
    assert rows[0].index("n", 5) + 1 == len(rows[0])  # to the right


def test_a_table_is_no_wider_than_the_terminal():
    markdown = Markdown(lambda: 40)
    pieces = markdown.feed("| a | b |\n|--|--|\n| " + "long " * 20 + "| " + "x" * 90 + " |\n") + markdown.finish()
    assert max(map(len, plain(pieces).splitlines())) < 40
    assert plain(pieces).count("x") == 90


def test_rows_pass_where_nothing_else_moves():
    markdown = Markdown(lambda: 60, hold_tables=False)
    assert plain(markdown.feed("| name | n |\n")) == "| name | n |\n"


def test_style_codes():
    assert styled("x", "") == "x"
    assert styled("", "bold") == ""
    assert sgr("bold") == "\x1b[1m"
    assert styled("x", "italic bold") == styled("x", "bold italic")
