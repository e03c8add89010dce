"""What a model thinks before it answers, told apart from the answer however it is cut into tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.engine.conversation import Conversation
from magicpig_cli.engine.text import TextStream
from magicpig_cli.engine.thinking import TAGS, Tags, ThinkingStream, opened_by, split_thinking
from tests.text.test_conversation import make_codec
from tests.text.vocabularies import CHATML, THINKING, byte_level

THINK = TAGS[0]


def sort(text: str, opened: Tags | None = None, seed: int | None = None) -> tuple[str, str]:
    """(thought, answer) of a text that comes a few characters at a time."""
    stream = ThinkingStream(opened)
    draw = random.Random(seed)
    parts = []
    while text:
        count = len(text) if seed is None else draw.randint(1, 7)
        parts += stream.feed(text[:count])
        text = text[count:]
    parts += stream.finish()
    return "".join(t for thinking, t in parts if thinking), "".join(t for thinking, t in parts if not thinking)


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags.opening)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_tags_and_blank_lines_are_left_out(tags, seed):
    text = f"{tags.opening}\nI see <b> and\n\n[x].\n{tags.closing}\n\nIt is {tags.opening}\n\nhere. "
    assert sort(text, None, seed) == ("I see <b> and\n\n[x].", f"It is {tags.opening}\n\nhere. ")
    assert sort(text.removeprefix(tags.opening), tags, seed)[0] == "I see <b> and\n\n[x]."


@given(st.text(alphabet="<>/think [THINK]\n", max_size=60), st.integers(0, 1000), st.booleans())
def test_how_it_comes_changes_nothing(text, seed, opened):
    tags = THINK if opened else None
    assert sort(text, tags, seed) == sort(text, tags)


@given(st.text(alphabet="ab<>/think\n", max_size=40))
def test_an_answer_without_thinking_is_unchanged(text):
    if not text.lstrip().startswith(tuple(tags.opening for tags in TAGS)):
        assert sort(text, None, 1) == ("", text)
        assert split_thinking(text) == (None, text)


def test_an_interrupted_thought_has_no_answer():
    assert split_thinking("<think>hm") == (THINK, "")
    assert split_thinking("hm", THINK) == (THINK, "")


def test_what_the_prompt_has_opened():
    assert opened_by("<|assistant|>\n<think>\n") == THINK
    assert opened_by("<think>\n\n</think>\n\n") is None
    assert opened_by("hello") is None


def test_tags_that_are_special_tokens_are_text():
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "<|other|>"]})
    stream = TextStream(tokenizer)
    ids = tokenizer("[THINK]a[/THINK]b<|other|>c", add_special_tokens=False)["input_ids"]
    assert "".join(map(stream.push, ids)) + stream.finish() == "[THINK]a[/THINK]bc"


@pytest.mark.parametrize("template", [CHATML, THINKING, None], ids=["chatml", "mentions the tags", "no template"])
@pytest.mark.parametrize("answer", ["<think>\nsecret\n</think>\n\nyes", "<think>\nsecret"])
def test_a_thought_is_not_fed_back(answer, template):
    codec = make_codec(byte_level(), template)
    conversation = Conversation(codec)
    conversation.add_user("one")
    conversation.prompt_ids()
    conversation.add_assistant(answer)
    conversation.add_user("two")
    assert "secret" not in codec.decode(conversation.prompt_ids())


def test_a_template_that_knows_the_tags_decides_itself():
    knows = "{% for m in messages %}{{ m.content.replace('</think>', '!') }}{% endfor %}"
    conversation = Conversation(make_codec(byte_level(), knows))
    conversation.add_user("one")
    conversation.prompt_ids()
    conversation.add_assistant("<think>seen")
    assert conversation.messages[-1]["content"] == "<think>seen</think>"
