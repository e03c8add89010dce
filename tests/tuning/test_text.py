"""Two parts of one text that share nothing."""

from __future__ import annotations

import pytest

from magicpig_cli.errors import UsageError
from magicpig_cli.tuning.text import split_text


class Codec:
    """One token per word, and what opens every text."""

    def __init__(self, opening: tuple[int, ...]) -> None:
        self._opening = list(opening)

    def encode_raw(self, text: str) -> list[int]:
        return self._opening + [int(word) for word in text.split()]


def words(count: int) -> str:
    return " ".join(map(str, range(100, 100 + count)))


@pytest.mark.parametrize("opening", [(), (1,), (1, 2)])
def test_a_long_text_gives_two_neighbours(opening):
    texts = split_text(Codec(opening), words(5000), "t", 50)
    length = 50 - len(opening)
    assert texts.tuning == [*opening, *range(100, 100 + length)]
    assert texts.held_out == [*opening, *range(100 + length, 100 + 2 * length)]
    assert not texts.repeated


def test_a_shorter_one_is_halved_and_each_half_repeated():
    texts = split_text(Codec((1,)), words(70), "t", 50)
    assert texts.tuning == [1, *range(100, 135), *range(100, 114)]
    assert texts.held_out == [1, *range(135, 170), *range(135, 149)]
    assert texts.repeated


@pytest.mark.parametrize("count", range(49, 53))
def test_the_parts_never_meet_and_are_full(count):
    texts = split_text(Codec((1,)), words(count), "t", 50)
    assert len(texts.tuning) == len(texts.held_out) == 50
    assert set(texts.tuning) & set(texts.held_out) == {1}


def test_too_short_a_text_is_refused_with_numbers():
    with pytest.raises(UsageError, match=r"notes.txt has 40 tokens.*context of 50") as caught:
        split_text(Codec((1,)), words(40), "notes.txt", 50)
    assert caught.value.hint == "a longer --text, or -c 41"
    with pytest.raises(UsageError, match="has 0 tokens"):
        split_text(Codec((1,)), " ", "empty.txt", 50)
