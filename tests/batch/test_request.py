"""From lines to token ids and parameters: precedence, documents, seeds, templates, lengths."""

from __future__ import annotations

import json
import os

import pytest
from transformers import GenerationConfig

from magicpig_cli.batch.line import BadLine, Line, parse_line
from magicpig_cli.batch.reader import RawLine
from magicpig_cli.config import GenerationOptions
from magicpig_cli.planner.memory import sequence_parts, written_out
from magicpig_cli.units import format_bytes
from tests.text.vocabularies import STRICT


def line(content: dict, number: int = 1) -> Line:
    parsed = parse_line(RawLine(number, 0, json.dumps(content).encode()))
    assert isinstance(parsed, Line), parsed
    return parsed


def text(maker, content: dict) -> str:
    """The prompt as text, special tokens left out."""
    return maker.codec.decode(maker.read(line(content)).ids)


def refusal(maker, content: dict) -> BadLine:
    asked = line(content)
    with pytest.raises(BadLine) as caught:
        maker.sequence_tokens(asked, len(maker.read(asked).ids))
    return caught.value


USER = {"role": "user", "content": "Why?"}


def test_prompts_go_through_the_template_unless_raw(maker):
    assert text(maker(), {"prompt": "Why?"}) == "user\nWhy?\nassistant\n"
    assert text(maker(), {"messages": [USER]}) == "user\nWhy?\nassistant\n"
    assert text(maker(raw=True), {"prompt": "Why?"}) == "Why?"
    assert text(maker(raw=True), {"messages": [USER]}) == "user\nWhy?\nassistant\n"


def test_exactly_one_opening_token_either_way(maker):
    for raw in (False, True):
        chosen = maker(raw=raw, adds_bos=True)
        ids = chosen.read(line({"prompt": "Why?"})).ids
        bos = chosen.codec.encode_raw("x")[0]
        assert ids.count(bos) == 1
        assert ids[0] == bos


def test_system_text_of_the_line_comes_before_the_command_lines(maker):
    chosen = maker(system="Default.")
    assert text(chosen, {"prompt": "Why?"}).startswith("system\nDefault.\n")
    assert text(chosen, {"prompt": "Why?", "system": "Own."}).startswith("system\nOwn.\n")
    assert text(chosen, {"prompt": "Why?", "system": ""}).startswith("user\n")
    own = [{"role": "system", "content": "Mine."}, USER]
    assert text(chosen, {"messages": own}).startswith("system\nMine.\nuser")
    assert "system" in refusal(chosen, {"messages": own, "system": "Twice."}).message
    assert "--raw" in refusal(maker(raw=True), {"prompt": "x", "system": "y"}).message


def test_documents_come_before_the_question(maker, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("\ufeffFacts.\r\n", encoding="utf-8")
    assert text(maker(raw=True), {"prompt": "Why?", "file": "sub/a.txt"}) == "Facts.\n\nWhy?"
    assert text(maker(raw=True), {"prompt": "", "file": "sub/a.txt"}) == "Facts."
    messages = [{"role": "assistant", "content": "Hello."}, USER, {"role": "user", "content": "Well?"}]
    assert "Hello.\nuser\nFacts.\n\nWhy?\nuser\nWell?" in text(maker(), {"messages": messages, "file": "sub/a.txt"})
    parts = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    assert "user\nFacts.\n\nWhy?\n" in text(maker(), {"messages": parts, "file": "sub/a.txt"})
    assert messages[1] == USER  # the line's own messages are left alone
    assert "user message" in refusal(maker(), {"messages": messages[:1], "file": "sub/a.txt"}).message


def test_documents_stay_below_the_inputs_directory(maker, tmp_path):
    inside = tmp_path / "in"
    inside.mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (inside / "link.txt").symlink_to(secret)
    (inside / "loop").symlink_to(inside / "loop")
    for path in ("../secret.txt", str(secret), "link.txt", "x/../../secret.txt", "../in-other/a.txt"):
        refused = refusal(maker(directory=inside), {"prompt": "x", "file": path})
        assert refused.code == "invalid_file"
        assert "outside" in refused.message
        if path != "../in-other/a.txt" and not path.startswith("x/"):
            chosen = maker(directory=inside, raw=True, allow_outside_files=True)
            assert text(chosen, {"prompt": "x", "file": path}) == "secret\n\nx"
    (inside / "~").mkdir()
    (inside / "~" / "a.txt").write_text("not at home")
    assert text(maker(directory=inside, raw=True), {"prompt": "x", "file": "~/a.txt"}) == "not at home\n\nx"


@pytest.mark.parametrize("path", ["none.txt", ".", "bytes.txt", "empty.txt", "pipe", "loop", "a\0b", "n" * 5000])
def test_documents_that_cannot_be_read_fail_their_line(maker, tmp_path, path):
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    refused = refusal(maker(), {"prompt": "x", "file": path})
    assert refused.code == "invalid_file"
    assert refused.message.startswith("file: ")


def test_parameters_of_the_line_come_before_the_command_lines(maker):
    defaults = GenerationOptions(max_tokens=5, temperature=0.5, stop=("a",), top_k=7)
    chosen = maker(defaults=defaults)
    asked = line({"prompt": "x", "temperature": 0, "stop": ["b", "c"]})
    options = chosen.options(asked, chosen.read(asked), 0)
    assert (options.max_tokens, options.temperature, options.stop, options.top_k) == (5, 0, ("b", "c"), 7)


def seed(maker, base: int | None, number: int = 3, twin: int = 0, **content) -> int:
    chosen, asked = maker(defaults=GenerationOptions(seed=base)), line({"prompt": "x", **content}, number)
    found = chosen.options(asked, chosen.read(asked), twin).seed
    assert found is not None
    return found


def test_seeds_depend_on_the_line_alone_and_on_the_seed_option(maker):
    assert seed(maker, None, id="a") == seed(maker, 0, id="a") == seed(maker, None, custom_id="a", prompt="other")
    assert seed(maker, None, id="a") != seed(maker, None, id="b")
    assert seed(maker, None, seed=7) == 7  # as `chat --seed 7`
    assert seed(maker, None, seed=7, id="a") == seed(maker, None, seed=7, id="b")
    assert len({seed(maker, base, id="a") for base in range(50)}) == 50
    assert len({seed(maker, base, seed=7) for base in range(50)}) == 50
    assert 0 <= seed(maker, 5, seed=2**64 - 1) < 2**64
    assert seed(maker, None, id="a") == 3391310933  # the same in every version


def test_seeds_of_lines_without_an_id_depend_on_what_they_ask(maker):
    assert seed(maker, None, number=3) == seed(maker, None, number=9) != seed(maker, None, id="line-3")
    assert len({seed(maker, None, twin=twin) for twin in range(50)}) == 50
    assert len({seed(maker, None, prompt=f"{n}") for n in range(50)}) == 50


def key(maker, content: dict, number: int = 1, twin: int = 0, **changes) -> bytes:
    chosen, asked = maker(**changes), line(content, number)
    return chosen.key(asked, chosen.read(asked), twin)


def test_a_key_does_not_see_where_and_how_a_line_is_written(maker):
    asked = {"prompt": "Why?", "max_tokens": 5}
    same = [
        {"max_tokens": 5, "prompt": "Why?"}, {"messages": [USER], "max_tokens": 5}, {**asked, "model": "other"},
        {"body": {"messages": [USER], "max_completion_tokens": 5}, "method": "POST", "url": "/v1/chat/completions"},
    ]  # fmt: skip
    assert {key(maker, content, number) for number, content in enumerate(same)} == {key(maker, asked)}
    assert len(key(maker, asked)) == 16


def test_a_key_changes_with_everything_that_decides_the_answer(maker, tmp_path):
    asked = {"id": "a", "prompt": "Why?"}
    (tmp_path / "d.txt").write_text("one")
    (tmp_path / "e.txt").write_text("one")
    keys = [key(maker, {**asked, **change}) for change in (
        {}, {"id": "b"}, {"prompt": "Why"}, {"file": "d.txt"}, {"system": "s"}, {"max_tokens": 5},
        {"temperature": 0.25}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}, {"repetition_penalty": 1.5},
        {"stop": "x"}, {"seed": 5},
    )]  # fmt: skip
    keys += [key(maker, asked, **change) for change in (
        {"raw": True}, {"system": "s2"}, {"identity": "another model"}, {"context": 100},
        {"defaults": GenerationOptions(seed=1)},
        {"defaults": GenerationOptions(temperature=0.125)},
        {"generation_config": GenerationConfig(do_sample=True, top_k=7)},
    )]  # fmt: skip
    keys += [key(maker, {"prompt": "Why?"}), key(maker, {"prompt": "Why?"}, twin=1)]
    assert key(maker, {**asked, "file": "d.txt"}) == key(maker, {**asked, "file": "e.txt"})  # the text alone counts
    (tmp_path / "d.txt").write_text("two")
    keys.append(key(maker, {**asked, "file": "d.txt"}))
    assert len(set(keys)) == len(keys), [keys.index(one) for one in keys]
    assert key(maker, asked, system="s") == key(maker, {**asked, "system": "s"})


def test_lengths_against_the_context_with_both_numbers(maker):
    chosen = maker(raw=True, context=100)
    assert len(chosen.read(line({"prompt": "x" * 99})).ids) == 99
    refused = refusal(chosen, {"prompt": "x" * 100})
    assert refused.code == "context_length_exceeded"
    assert "100 prompt tokens do not fit the context of 100 tokens" in refused.message
    assert len(chosen.read(line({"prompt": "x" * 60, "max_tokens": 40})).ids) == 60
    assert "60 prompt tokens + 41 answer tokens" in refusal(chosen, {"prompt": "x" * 60, "max_tokens": 41}).message
    asked = maker(raw=True, context=100, defaults=GenerationOptions(max_tokens=41))
    assert "41 answer tokens" in refusal(asked, {"prompt": "x" * 60}).message


def test_longest_sequence_of_a_line(maker):
    def longest(**changes) -> int:
        return maker(**changes).sequence_tokens(line({"prompt": "x", "max_tokens": None}), 60)

    assert longest() == 60 + 512
    assert longest(generation_config=GenerationConfig(max_new_tokens=20)) == 80
    assert longest(defaults=GenerationOptions(max_tokens=7)) == 67
    assert longest(context=100) == 100


def test_models_without_a_template(maker):
    chosen = maker(template=None)
    assert refusal(chosen, {"messages": [USER]}).code == "no_chat_template"
    assert text(chosen, {"prompt": "Why?"}) == "Why?"
    assert "no chat template" in chosen.codec.new_notices()[0]


def test_what_the_template_or_codec_refuses_fails_its_line(maker):
    assert "roles must alternate" in refusal(maker(STRICT), {"messages": [{**USER, "role": "assistant"}]}).message
    assert "robot" in refusal(maker(), {"messages": [{**USER, "role": "robot"}]}).message
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    assert "image_url" in refusal(maker(), {"messages": [image]}).message


def test_lines_that_memory_has_no_room_for_say_the_sum(maker, planned):
    """Within what the model can: too long for a context that memory has cut down, or for the budget by itself."""
    cut = maker(raw=True, context=100, longest=1000)
    refused = refusal(cut, {"prompt": "x" * 150})
    assert refused.code == "insufficient_memory"
    needed = f"a sequence of 151 tokens takes {written_out(sequence_parts(cut.plan, 151))}"
    assert refused.message.startswith(needed)
    assert f"but {format_bytes(cut.plan.budget_bytes)} of memory are free" in refused.message
    assert "keys and values + " in refused.message
    assert " = " in refused.message
    assert refusal(cut, {"prompt": "x", "max_tokens": 200}).code == "insufficient_memory"
    beyond = refusal(cut, {"prompt": "x" * 1000})
    assert beyond.code == "context_length_exceeded"
    assert "1,000 prompt tokens do not fit the context of 1,000 tokens" in beyond.message

    asked = line({"prompt": "x", "max_tokens": 100})
    enough = planned.sequence_bytes(700)
    assert maker(budget_bytes=enough).sequence_tokens(asked, 600) == 700
    with pytest.raises(BadLine) as caught:
        maker(budget_bytes=enough - 1).sequence_tokens(asked, 600)
    assert caught.value.code == "insufficient_memory"
    assert format_bytes(enough) in caught.value.message
