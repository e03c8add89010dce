"""What a line asks for, in every form; and for every kind of bad line a message that names what is wrong (CASES 11)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.batch.line import _KINDS, Line, LineError, parse_line
from magicpig_cli.batch.reader import RawLine
from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine.sampling import TokenSampler, resolve_sampling

# As vLLM's example file of OpenAI Batch requests has it.
OPENAI = {
    "custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions",
    "body": {
        "model": "meta-llama/Meta-Llama-3-8B-Instruct",
        "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hi"}],
        "max_completion_tokens": 1000,
    },
}  # fmt: skip


def parse(line: Any, number: int = 7) -> Line | LineError:
    data = line if isinstance(line, bytes) else json.dumps(line).encode()
    return parse_line(RawLine(number, 0, data))


def good(line: Any) -> Line:
    parsed = parse(line)
    assert isinstance(parsed, Line), parsed
    return parsed


def test_openai_batch_request():
    line = good(OPENAI)
    assert (line.custom_id, line.number) == ("request-1", 7)
    assert line.messages == OPENAI["body"]["messages"]
    assert line.options == GenerationOptions(max_tokens=1000)
    assert line.model == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert line.ignored == ()


def test_order_of_detection():
    inside = {"prompt": "inner"}
    assert good({"body": inside, "messages": [{"role": "user", "content": "outer"}]}).messages is not None
    assert good({"body": inside, "prompt": "outer"}).prompt == "inner"
    both = good({"messages": [{"role": "user", "content": "x"}], "prompt": "y"})
    assert both.prompt is None
    assert both.ignored == ("prompt",)


def test_every_parameter_in_every_form():
    given = {
        "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2,
        "seed": 2**64 - 1, "stop": ["a", "b"],
    }  # fmt: skip
    wanted = GenerationOptions(**{**given, "stop": ("a", "b")})
    about = {"file": "a.txt", "system": "Be brief."}
    for line in (
        {"prompt": "x", **given, **about},
        {"messages": [{"role": "user", "content": "x"}], **given, **about},
        {"body": {"prompt": "x", **given, **about}},
        {"body": {"prompt": "x"}, **given, **about},
        {"body": {"prompt": "x", "seed": None, **about}, **given, "file": "overruled"},
    ):
        parsed = good(line)
        assert parsed.options == wanted
        assert (parsed.file, parsed.system) == ("a.txt", "Be brief.")
    assert good({"prompt": "x", "stop": "one"}).options.stop == ("one",)
    assert good({"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}).options.max_tokens == 6


@pytest.mark.parametrize(
    ("ids", "custom_id"),
    [
        ({}, "line-7"), ({"id": None}, "line-7"), ({"id": "a"}, "a"), ({"custom_id": "b"}, "b"),
        ({"id": "a", "custom_id": "b"}, "b"),
    ],
)  # fmt: skip
def test_ids(ids, custom_id):
    assert good({"prompt": "x", **ids}).custom_id == custom_id
    failed = parse({"prompt": 1, **ids})
    assert isinstance(failed, LineError)
    assert (failed.custom_id, failed.number) == (custom_id, 7)


def test_null_is_as_good_as_absent_and_unknown_keys_are_named():
    nothing = dict.fromkeys(("temperature", "stop", "seed", "file", "system", "n", "body", "messages", "model"))
    line = good({**nothing, "prompt": "x", "max_token": 5, "stream": True, "n": 1})
    assert line.options == GenerationOptions()
    assert line.ignored == ("max_token",)


MESSAGE = {"role": "user", "content": "x"}
WRONG_TYPES = [
    ({"prompt": 5}, "prompt", "a string", "an integer"),
    ({"prompt": ["x"]}, "prompt", "a string", "an array"),
    ({"messages": "x"}, "messages", "an array", "a string"),
    ({"messages": {}}, "messages", "an array", "an object"),
    ({"messages": []}, "messages", "at least one", "[]"),
    ({"messages": ["x"]}, "messages: message 1", "an object", "a string"),
    (
        {"messages": [MESSAGE, {"role": "user", "content": None}]},
        "content of message 2",
        "a string or an array",
        "null",
    ),
    ({"messages": [{"role": "user"}]}, "content of message 1", "a string or an array", "nothing"),
    ({"messages": [{"content": "x"}]}, "role of message 1", "a string", "nothing"),
    ({"messages": [{"role": 1, "content": "x"}]}, "role of message 1", "a string", "an integer"),
    ({"body": "x"}, "body", "an object", "a string"),
    ({"prompt": "x", "max_tokens": "7"}, "max_tokens", "an integer", 'a string: "7"'),
    ({"prompt": "x", "max_tokens": 7.5}, "max_tokens", "an integer", "a number: 7.5"),
    ({"prompt": "x", "max_completion_tokens": True}, "max_completion_tokens", "an integer", "a boolean"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1", "0"),
    ({"prompt": "x", "temperature": "warm"}, "temperature", "a number", "a string"),
    ({"prompt": "x", "temperature": -1}, "temperature", "at least 0", "-1"),
    ({"prompt": "x", "top_p": 1.5}, "top_p", "from 0 to 1", "1.5"),
    ({"prompt": "x", "min_p": [0.1]}, "min_p", "a number", "an array"),
    ({"prompt": "x", "top_k": -2}, "top_k", "at least -1", "-2"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100", "0"),
    ({"prompt": "x", "repetition_penalty": 1e-40}, "repetition_penalty", "from 0.01 to 100", "1e-40"),
    ({"prompt": "x", "max_tokens": 2**31}, "max_tokens", "up to 2,147,483,647", "2147483648"),
    ({"prompt": "x", "seed": -1}, "seed", "0 to 2^64 - 1", "-1"),
    ({"prompt": "x", "seed": 2**64}, "seed", "0 to 2^64 - 1", "18446744073709551616"),
    ({"prompt": "x", "stop": 3}, "stop", "a string or an array of strings", "an integer"),
    ({"prompt": "x", "stop": ["a", 3]}, "stop", "a string or an array of strings", 'an array: ["a", 3]'),
    ({"prompt": "x", "stop": ["a", ""]}, "stop", "none of them empty", '""'),
    ({"prompt": "x", "file": ["a"]}, "file", "a string", "an array"),
    ({"prompt": "x", "file": ""}, "file", "not empty", '""'),
    ({"prompt": "x", "system": {}}, "system", "a string", "an object"),
    ({"prompt": "x", "custom_id": 7}, "custom_id", "a string", "an integer: 7"),
    ({"prompt": "x", "id": ["a"]}, "id", "a string", "an array"),
    ({"prompt": "x", "model": 1}, "model", "a string", "an integer"),
    ({"prompt": "x", "n": 2}, "n", "1: a line has one answer", "2"),
    ({"body": {"input": "x"}, "url": "/v1/embeddings"}, "url", "/v1/chat/completions", "/v1/embeddings"),
    ({"prompt": "x", "method": "GET"}, "method", "POST", "GET"),
    ([1], "the line", "an object", "an array"),
    (None, "the line", "an object", "null"),
]


@pytest.mark.parametrize(("line", "key", "wanted", "got"), WRONG_TYPES)
def test_wrong_values_name_key_wanted_and_got(line, key, wanted, got):
    failed = parse(line)
    assert isinstance(failed, LineError)
    assert failed.code == "invalid_request"
    named, _, rest = failed.message.partition(": want ")
    before, _, after = rest.partition(", got ")
    assert key in named
    assert wanted in before
    assert got in after


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (b'{"prompt": "x"', "invalid_json", "column 15"),
        (b'{"prompt": "x"}{"prompt": "y"}', "invalid_json", "second value begins at column 16"),
        (b'{"prompt": "x"} trailing', "invalid_json", "column 17"),
        (b"hello", "invalid_json", "column 1"),
        (b'{"prompt": "caf\xe9"}', "invalid_utf8", "0xe9 at offset 15"),
        (b'{"prompt": "\xff"}', "invalid_utf8", "0xff at offset 12"),
        (b'{"prompt": "\\ud83d"}', "invalid_json", "\\ud83d"),
        (b'{"prompt": "x", "top_p": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json", "digits"),
        (b"[" * 100_000, "invalid_json", "nested"),
        (b'{"prompt": "x", "metadata": ' + b"[" * 100 + b"]" * 100 + b"}", "invalid_json", "nested too deeply"),
        (b'{"question": "x"}', "invalid_request", "question"),
        (b"{}", "invalid_request", "none"),
        (b'{"prompt": " "}', "invalid_request", "empty"),
        (b'{"prompt": "x", "temperature": 1e999}', "invalid_request", "temperature"),
    ],
)
def test_lines_that_are_no_request(data, code, says):
    failed = parse(data)
    assert isinstance(failed, LineError)
    assert failed.code == code
    assert says in failed.message
    assert len(failed.message) < 200


def test_nesting_up_to_the_limit_is_read():
    deep = b'{"prompt": "x", "metadata": ' + b"[" * 99 + b"9" + b"]" * 99 + b"}"
    assert isinstance(parse(deep), Line)
    assert isinstance(parse(deep.replace(b"9", b"[]")), LineError)


def test_escaped_characters_beyond_the_basic_plane_are_text():
    assert good(b'{"prompt": "\\ud83d\\udc37"}').prompt == "\N{PIG FACE}"


EXTREME_VALUES = {
    "400 nines": b"9" * 400, "-400 nines": b"-" + b"9" * 400, "all digits": b"9" * 4300, "more digits": b"9" * 5000,
    "huge fraction": b"1e999", "largest": b"1.7976931348623157e308", "smallest": b"5e-324", "zero": b"-0.0",
    "nan": b"NaN", "infinity": b"Infinity", "-infinity": b"-Infinity", "2^64": b"18446744073709551616",
    "half": b'"\\ud800"', "zero byte": b'"\\u0000"', "long": b'"' + b"x" * 100_000 + b'"',
    "deep": b"[" * 500 + b"]" * 500, "deeper": b"[" * 90_000 + b"]" * 90_000,
    "deep objects": b'{"a":' * 500 + b"1" + b"}" * 500, "list": b'["a", ' + b"9" * 400 + b"]", "true": b"true",
}  # fmt: skip
PLACES = (
    b'{"prompt":"x","%s":%s}', b'{"body":{"prompt":"x"},"%s":%s}', b'{"body":{"prompt":"x","%s":%s}}', b'{"%s":%s}',
    b'{"messages":[{"role":"user","content":"x","%s":%s}]}', b'{"pig\\ud83d":1,"%s":%s}',
)  # fmt: skip


@pytest.mark.parametrize("name", EXTREME_VALUES)
def test_any_extreme_value_anywhere_becomes_a_line_that_can_be_sampled_or_a_short_error(name):
    for key in (*_KINDS, "role", "content", "metadata", "unknown"):
        for place in PLACES:
            parsed = parse(place % (key.encode(), EXTREME_VALUES[name]))
            if isinstance(parsed, LineError):
                assert len(parsed.message) < 300
            else:
                sampler = TokenSampler(resolve_sampling(parsed.options, None), [1])
                assert sampler.pick(torch.tensor([3e4, -3e4, float("-inf"), 2.0])) in (0, 1, 3)


@given(st.binary(max_size=60))
def test_any_bytes_become_a_line_or_an_error(data):
    assert isinstance(parse(data), (Line, LineError))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(["body", "messages", "prompt", "stop", "seed", "id", "file", "n"]), _JSON))
def test_any_values_become_a_line_or_an_error(content):
    parsed = parse(content)
    assert isinstance(parsed, (Line, LineError))
    for text in ("prompt", "file"):
        if isinstance(parsed, Line):
            assert isinstance(getattr(parsed, text), (str, type(None)))
