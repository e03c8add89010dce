"""Cases 1 to 4: one BOS, models without a template, every token that ends an answer, templates that refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, LlamaConfig

from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.errors import MagicpigError
from tests.text.vocabularies import (
    CHATML,
    CHATML_WITH_BOS,
    CLOSE,
    DEAF,
    EOS,
    KINDS,
    OPEN,
    OPEN_ENDED,
    SPACED,
    STRICT,
    THINKING,
)  # fmt: skip

ASK = [{"role": "user", "content": "hi"}]
TALK = [*ASK, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "more"}]
TEMPLATES = {
    "chatml": CHATML, "chatml with bos": CHATML_WITH_BOS, "strict": STRICT, "deaf": DEAF, "thinking": THINKING,
    "open-ended": OPEN_ENDED,
}  # fmt: skip


def make_codec(tokenizer, template: str | None = CHATML, **eos) -> ChatCodec:
    """`eos`: ids that `config` or `generation_config` name."""
    config = LlamaConfig(eos_token_id=eos.get("config"), bos_token_id=None)
    return ChatCodec(tokenizer, config, GenerationConfig(eos_token_id=eos.get("generation_config")), template)


# Case 1


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("messages", [ASK, TALK], ids=["one turn", "three turns"])
def test_exactly_one_bos_in_a_chat(tokenizer, template, messages):
    ids = make_codec(tokenizer, template).encode_chat(messages)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1


def test_exactly_one_bos_in_a_raw_prompt(tokenizer):
    codec = make_codec(tokenizer)
    for text in ("the end", "<s>the end", ""):
        ids = codec.encode_raw(text)
        assert ids[0] == tokenizer.bos_token_id
        assert ids.count(tokenizer.bos_token_id) == 1
    assert codec.encode_raw("the end")[1:] == tokenizer("the end", add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_bos_where_the_tokenizer_adds_none(kind):
    tokenizer = KINDS[kind](adds_bos=False)
    codec = make_codec(tokenizer)
    assert tokenizer.bos_token_id not in codec.encode_raw("the end")
    assert tokenizer.bos_token_id not in codec.encode_chat(TALK)
    assert make_codec(tokenizer, CHATML_WITH_BOS).encode_chat(TALK).count(tokenizer.bos_token_id) == 1


def test_control_tokens_of_the_template_are_single_ids(tokenizer):
    ids = make_codec(tokenizer).encode_chat(TALK)
    assert ids.count(tokenizer.convert_tokens_to_ids(OPEN)) == 4
    assert ids.count(tokenizer.convert_tokens_to_ids(CLOSE)) == 3


# Case 2


def test_without_a_template_chat_is_plain_completion_with_one_notice(tokenizer):
    codec = make_codec(tokenizer, None)
    assert not codec.has_template
    assert codec.notices == []
    assert codec.render([{"role": "system", "content": "be brief"}, *ASK]) == "be brief\n\nhi"
    assert codec.encode_chat(ASK) == codec.encode_raw("hi")
    assert len(codec.notices) == 1
    assert "no chat template" in codec.notices[0]


def test_a_given_template_replaces_the_tokenizers(tokenizer):
    tokenizer.chat_template = STRICT
    assert "[INST] hi [/INST]" in make_codec(tokenizer, None).render(ASK)
    codec = make_codec(tokenizer, CHATML)
    assert codec.render(ASK) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert codec.render(ASK, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


# Case 3


def test_every_source_of_stop_tokens(tokenizer):
    close, eos = (tokenizer.convert_tokens_to_ids(text) for text in (CLOSE, EOS))
    assert make_codec(tokenizer, config=5, generation_config=[6, 7]).stop_ids == {5, 6, 7, eos, close}
    assert make_codec(tokenizer, config=[5, 8], generation_config=6).stop_ids == {5, 8, 6, eos, close}
    assert make_codec(tokenizer, None).stop_ids == {eos}


def test_the_text_part_of_a_nested_config_counts(tokenizer):
    nested = SimpleNamespace(eos_token_id=13, get_text_config=lambda: SimpleNamespace(eos_token_id=[11, 12]))
    assert {11, 12, 13} <= ChatCodec(tokenizer, nested, None, CHATML).stop_ids


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, CLOSE), (DEAF, CLOSE), (THINKING, CLOSE), (OPEN_ENDED, CLOSE), (SPACED, CLOSE), (STRICT, EOS)],
)
def test_the_templates_own_end_of_turn(tokenizer, template, end):
    own = make_codec(tokenizer, template).stop_ids - {tokenizer.eos_token_id}
    assert own == {tokenizer.convert_tokens_to_ids(end)} - {tokenizer.eos_token_id}


def test_a_token_that_only_begins_like_the_end_of_turn_is_no_stop(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": [CLOSE[:4]]})
    stop_ids = make_codec(tokenizer, CHATML).stop_ids
    assert tokenizer.convert_tokens_to_ids(CLOSE) in stop_ids
    assert tokenizer.convert_tokens_to_ids(CLOSE[:4]) not in stop_ids


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}", "{{ raise_exception('no') }}"],
)
def test_a_template_without_a_token_of_its_own_adds_no_stop(tokenizer, template):
    assert make_codec(tokenizer, template).stop_ids == {tokenizer.eos_token_id}


# Case 4


@pytest.mark.parametrize("template", [STRICT, DEAF])
def test_system_text_goes_into_the_first_user_turn_with_one_notice(tokenizer, template):
    codec = make_codec(tokenizer, template)
    folded = [{"role": "user", "content": "be brief\n\nhi"}, *TALK[1:]]
    expected = codec.render(folded)
    assert codec.notices == []
    for _ in range(2):
        assert codec.render([{"role": "system", "content": "be brief"}, *TALK]) == expected
    assert len(codec.notices) == 1
    assert "no system role" in codec.notices[0]


def test_a_template_with_a_system_role_keeps_it(tokenizer):
    codec = make_codec(tokenizer, CHATML)
    for role in ("system", "developer"):
        assert codec.render([{"role": role, "content": "be brief"}, *ASK]).startswith("<|im_start|>system\nbe brief<")
    assert codec.notices == []


def test_two_user_turns_in_a_row_are_merged_where_the_template_refuses_them(tokenizer):
    twice = [*ASK, {"role": "user", "content": "there"}]
    assert "[INST] hi\n\nthere [/INST]" in make_codec(tokenizer, STRICT).render(twice)
    assert make_codec(tokenizer, CHATML).render(twice).count("<|im_start|>user") == 2


def test_what_a_template_still_refuses_is_an_error_that_names_it(tokenizer):
    tokenizer.name_or_path = "/home/someone/models/tiny-chat"
    answer_first = [{"role": "assistant", "content": "hello"}]
    tokenizer.chat_template = STRICT
    with pytest.raises(MagicpigError, match=r"of models/tiny-chat refuses.*must alternate") as caught:
        make_codec(tokenizer, None).render(answer_first)
    assert "someone" not in caught.value.message
    with pytest.raises(MagicpigError, match=r"--chat-template.*must alternate"):
        make_codec(tokenizer, STRICT).render(answer_first)


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages[0].content + 1 }}", "{{ no.such.name }}"])
def test_broken_templates_are_one_line(tokenizer, template):
    with pytest.raises(MagicpigError) as caught:
        make_codec(tokenizer, template).render(ASK)
    assert "\n" not in caught.value.message
    assert caught.value.hint


# Messages as people send them


def test_content_in_parts(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "user\none\ntwo<" in make_codec(tokenizer).render([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "message 2"),
        ({"role": "user", "content": ["loose"]}, "str"),
        ({"role": "user", "content": None}, "NoneType"),
        ({"role": "user"}, "message 2"),
        ({"role": "tool", "content": "x"}, "tool"),
        ({"content": "x"}, "role"),
    ],
)
def test_what_cannot_be_meant_is_named(tokenizer, message, named):
    with pytest.raises(MagicpigError, match=named):
        make_codec(tokenizer).render([*ASK, message])


def test_no_messages(tokenizer):
    with pytest.raises(MagicpigError, match="no messages"):
        make_codec(tokenizer).render([])


def test_count_and_decode(tokenizer):
    codec = make_codec(tokenizer)
    ids = codec.encode_raw("the end , and ?")
    assert codec.count("the end , and ?") == len(ids) - 1
    assert codec.decode([*ids, tokenizer.eos_token_id]) == "the end , and ?"  # no clean-up of spaces


def test_demo_model(demo_tokenizer):
    codec = make_codec(demo_tokenizer, None)
    assert codec.has_template
    assert codec.stop_ids == {2}
    ids = codec.encode_chat(ASK)
    text = demo_tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True)
    assert ids == demo_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert codec.encode_raw("Once upon") == demo_tokenizer("Once upon")["input_ids"]
