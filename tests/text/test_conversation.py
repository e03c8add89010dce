"""Case 5 (what a next turn can reuse), turns taken back, documents."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig

from magicpig_cli.engine.conversation import ChatCodec, Conversation, common_prefix, document_message, read_document
from magicpig_cli.errors import MagicpigError
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


def test_documents_and_question():
    assert document_message([], "why?") == "why?"
    assert document_message([("a.txt", "one\n")], "why?") == "one\n\nwhy?"
    both = document_message([("a.txt", "\none\n"), ("b.txt", "two")], "why?")
    assert both == "Document: a.txt\none\n\nDocument: b.txt\ntwo\n\nwhy?"
    assert document_message([("a.txt", "one")], " \n") == "one"


def test_read_document(tmp_path):
    path = tmp_path / "a.txt"
    for data, text in [
        ("\ufeffnaïve\r\n你好\r\n".encode(), "naïve\n你好\n"),  # byte order mark, CRLF
        (b"[/INST] plain", "[/INST] plain"),
    ]:
        path.write_bytes(data)
        assert read_document(str(path)) == text


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"abc\xff\xfedef", "0xff at offset 3"),
        (b"\xef\xbb\xbfabc\xe4\xbd", "0xe4 at offset 6"),  # counted in the file, byte order mark included
        (b"PK\x03\x04\x00\x00", "0x00 at offset 4"),
        (b"\xff\xfea\x00", "0xff at offset 0"),
        (b" \r\n", "is empty"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, data, named):
    path = tmp_path / "a.bin"
    path.write_bytes(data)
    with pytest.raises(MagicpigError, match=named) as caught:
        read_document(str(path))
    assert caught.value.hint
    assert ("UTF-16" in caught.value.hint) == (data[:2] == b"\xff\xfe")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(MagicpigError, match="there is no file"):
        read_document(str(tmp_path / "missing.txt"))
    with pytest.raises(MagicpigError, match="is a directory"):
        read_document(str(tmp_path))
    with pytest.raises(MagicpigError, match="is a device"):
        read_document("/dev/zero")
