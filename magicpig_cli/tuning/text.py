"""Calibration text: one part to tune on, another one that the result is held to."""

from __future__ import annotations

from dataclasses import dataclass

from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.errors import UsageError

_CHARACTERS_PER_TOKEN = 8  # read of a long text at first; more where that gives too few tokens


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of two parts that share nothing but what the tokenizer opens every text with."""

    tuning: list[int]
    held_out: list[int]
    source: str  # name for people: a file, or what is used without one
    repeated: bool  # the text is shorter than both parts together: each starts again where it ends


def split_text(codec: ChatCodec, text: str, source: str, context: int) -> Texts:
    """Two parts of `context` tokens each, one after the other. Raises UsageError if the text is shorter than one.

    Where there is less than two of them each gets half and repeats it, at most once.
    """
    opening = codec.encode_raw("")
    length = context - len(opening)
    body = _first_tokens(codec, text, 2 * length, len(opening))
    if len(body) < length:
        raise UsageError(
            f"{source} has {len(body):,} tokens, and tuning for a context of {context:,} needs as many as that",
            hint=f"a longer --text, or -c {len(body) + len(opening)}" if body else "a --text FILE with text in it",
        )
    half = min(length, len(body) // 2)
    tuning, held_out = body[:half], body[half : half + length]
    return Texts(
        opening + (tuning * 3)[:length], opening + (held_out * 3)[:length], source, repeated=half < length
    )  # fmt: skip


def _first_tokens(codec: ChatCodec, text: str, count: int, opening: int) -> list[int]:
    """The first `count` tokens of a text, of which no more is tokenized than that takes."""
    characters = _CHARACTERS_PER_TOKEN * count
    while True:
        ids = codec.encode_raw(text[:characters])[opening:]
        if len(ids) > count or characters >= len(text):
            return ids[:count]
        characters *= 2
