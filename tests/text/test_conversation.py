"""Case 5 (what a next turn can reuse), turns taken back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig

from magicpig_cli.engine.conversation import ChatCodec, Conversation, common_prefix
from tests.text.vocabularies import CHATML, THINKING, byte_level


def make_codec(tokenizer, template: str | None) -> ChatCodec:
    return ChatCodec(tokenizer, LlamaConfig(), GenerationConfig(), template)


def two_turns(codec: ChatCodec) -> tuple[list[int], list[int]]:
    """Ids in the cache after one answer, and the prompt of the next turn."""
    conversation = Conversation(codec, "be brief")
    conversation.add_user("hi")
    cached = conversation.prompt_ids() + codec.encode_raw("the end")[1:]
    conversation.add_assistant("the end")
    conversation.add_user("more")
    return cached, conversation.prompt_ids()


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_a_next_turn_reuses_prompt_and_answer():
    cached, following = two_turns(make_codec(byte_level(), CHATML))
    assert common_prefix(cached, following) == len(cached)
    assert len(following) > len(cached)


def test_a_template_that_rewrites_the_last_turn_costs_only_that_turn(tokenizer):
    codec = make_codec(tokenizer, THINKING)
    cached, following = two_turns(codec)
    turns = [("system", "be brief"), ("user", "hi")]
    before_the_thoughts = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    reused = common_prefix(cached, following)
    assert len(codec.encode_raw(before_the_thoughts)) < reused < len(cached)
    assert codec.decode(following[:reused]) in codec.decode(cached)


def test_turns(tokenizer):
    conversation = Conversation(make_codec(tokenizer, CHATML), "be brief")
    conversation.add_user("one")
    first = conversation.prompt_ids()
    conversation.add_assistant("1")
    conversation.add_user("two")
    conversation.add_assistant("2")
    assert conversation.undo() == "two"
    assert conversation.messages[-1] == {"role": "assistant", "content": "1"}
    conversation.add_user("dropped before it was answered")
    assert conversation.undo() == "dropped before it was answered"
    assert conversation.undo() == "one"
    assert conversation.undo() is None
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    conversation.add_user("one")
    assert conversation.prompt_ids() == first
    conversation.clear()
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert Conversation(make_codec(tokenizer, CHATML)).messages == []
