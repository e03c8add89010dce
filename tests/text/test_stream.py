"""Case 6 and stop strings: what is shown is never taken back, and adds up to what the tokenizer decodes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from magicpig_cli.engine.text import TextStream, decode
from tests.text.vocabularies import CLOSE, KINDS, byte_fallback, byte_level

BROKEN = "\ufffd"
TEXTS = ["the 你好 world", "naïve — “quotes”", "👩‍💻 and 🏳️‍🌈!", "  two  spaces\n\n\tindented", "ends in 好", " leads"]
BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def encode(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def stream(tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """All pieces, the last one from `finish`."""
    out = TextStream(tokenizer, stop)
    pieces = [out.push(id_) for id_ in ids]
    return [*pieces, out.finish()], out


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_decoded_text(tokenizer, text):
    ids = encode(tokenizer, text)
    pieces, out = stream(tokenizer, ids)
    assert "".join(pieces) == out.text == decode(tokenizer, ids)
    assert BROKEN not in out.text


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_appears_with_its_last_byte(kind):
    tokenizer = KINDS[kind]()
    out = TextStream(tokenizer)
    ids = encode(tokenizer, "a你")
    pieces = [out.push(id_) for id_ in ids]
    assert pieces[-3:] == ["", "", "你"]


def test_tokens_that_cut_through_characters():
    """你好 as E4, BD, A0E5, A5, BD: one token ends a character and begins the next."""
    tokenizer = byte_level(extra=(b"\xa0\xe5",))
    ids = encode(tokenizer, "你好" * 40)
    pieces, out = stream(tokenizer, ids)
    assert out.text == "你好" * 40
    assert pieces[:5] == ["", "", "你", "", "好"]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.sampled_from([BYTE_LEVEL, BYTE_FALLBACK]))
def test_any_text(text, tokenizer):
    ids = encode(tokenizer, text)
    pieces, _ = stream(tokenizer, ids)
    assert "".join(pieces) == decode(tokenizer, ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*"你é👩a ".encode(), 0x80, 0xFF]), max_size=40))
@example(list(b"\xe4\xbd\xe4\xbd\xe4\xbd\xbd\xa0"))
@example(list(b"\x80\x80\xe4\xbd\xa0"))
def test_any_bytes(values):
    """Broken bytes are shown as such, and never at the cost of a whole character (id = byte value here)."""
    pieces, _ = stream(BYTE_LEVEL, values)
    assert "".join(pieces) == bytes(values).decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_broken_bytes_of_a_fallback_tokenizer_come_out(values):
    """This decoder breaks a whole run of bytes when one is bad; what was shown before stays."""
    first_byte = BYTE_FALLBACK.convert_tokens_to_ids("<0x00>")
    pieces, out = stream(BYTE_FALLBACK, [first_byte + value for value in values] + encode(BYTE_FALLBACK, "end"))
    assert "".join(pieces) == out.text
    assert out.text.endswith("end")


def test_an_answer_cut_inside_a_character_is_flushed():
    pieces, out = stream(BYTE_LEVEL, [*b"a", *"你".encode()[:2]])
    assert pieces == ["a", "", "", BROKEN]
    assert out.text == "a" + BROKEN
    assert out.finish() == ""


def test_cost_per_token_does_not_grow():
    class Counting:
        def __init__(self, tokenizer):
            self.decoded, self._tokenizer = 0, tokenizer
            self.added_tokens_decoder = tokenizer.added_tokens_decoder
            self.all_special_ids, self.all_special_tokens = tokenizer.all_special_ids, tokenizer.all_special_tokens

        def decode(self, ids, **options):
            self.decoded += len(ids)
            return self._tokenizer.decode(ids, **options)

    for text in ("the 你好 and 👩‍💻 ", "the end of an era in "):
        counting = Counting(BYTE_LEVEL)
        ids = encode(BYTE_LEVEL, text * 100)
        stream(counting, ids)
        assert counting.decoded < 10 * len(ids)
    counting = Counting(BYTE_LEVEL)
    stream(counting, [0x80] * 2000)  # nothing but broken bytes: the window is bounded
    assert counting.decoded < 100 * 2000


def test_special_tokens_are_not_text(tokenizer):
    close = tokenizer.convert_tokens_to_ids(CLOSE)
    ids = encode(tokenizer, "the end")
    middle = len(ids) // 2
    pieces, out = stream(tokenizer, [tokenizer.bos_token_id, *ids[:middle], close, *ids[middle:], close])
    assert out.text == "the end"
    assert not out.stopped
    assert pieces[0] == ""


def test_a_special_token_can_be_the_stop_string(tokenizer):
    close = tokenizer.convert_tokens_to_ids(CLOSE)
    _, out = stream(tokenizer, [*encode(tokenizer, "the end"), close, *encode(tokenizer, "more")], (CLOSE,))
    assert out.stopped
    assert out.text == "the end"


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one\n\nQuestion: two", ("\n\nQuestion:",), "one"),
        ("one STOP", ("STOP",), "one "),
        ("one STO", ("STOP",), "one STO"),  # a beginning that does not become one is text
        ("aaab", ("aab",), "a"),  # the beginning that counts starts late
        ("xabcx", ("abc", "b"), "xa"),  # complete first wins
        ("xan", ("xan", "a"), "x"),  # also where one token completes both
        ("xabcx", ("bc", "abc"), "x"),  # complete together: the longer one
        ("你好世界", ("世",), "你好"),
        ("STOP", ("STOP",), ""),
    ],
)
def test_stop_strings(tokenizer, text, stop, shown):
    pieces, out = stream(tokenizer, encode(tokenizer, text), stop)
    assert out.text == "".join(pieces) == shown
    assert out.stopped == any(word in text for word in stop)


def test_a_possible_stop_is_held_back_and_released():
    out = TextStream(BYTE_LEVEL, ("###",))
    assert [out.push(value) for value in b"a##b"] == ["a", "", "", "##b"]
    assert [out.push(value) for value in b"###c"] == ["", "", "", ""]
    assert out.stopped
    assert out.text == "a##b"


@settings(max_examples=100, deadline=None)
@given(st.text("ab ", max_size=30), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
def test_stopping_does_not_depend_on_how_text_is_cut_into_tokens(text, stops):
    _, bytes_out = stream(BYTE_LEVEL, list(text.encode()), tuple(stops))
    cut = min([text.index(stop) + len(stop) for stop in stops if stop in text], default=None)
    starts = [text.index(stop) for stop in stops if stop in text and text.index(stop) + len(stop) == cut]
    assert bytes_out.text == text[: min(starts, default=None)]


def test_demo_tokenizer(demo_tokenizer):
    for text in TEXTS:
        ids = encode(demo_tokenizer, text)
        pieces, _ = stream(demo_tokenizer, ids)
        assert "".join(pieces) == decode(demo_tokenizer, ids) == text
