"""Tasks over lists of words without a text: the common ones, the frequent ones (RULER's CWE and FWE)."""

from __future__ import annotations

import math
import random
import re
import string
from functools import cache

from magicpig_cli.corpus import natural_text
from magicpig_cli.evals.tasks import Draft, Question
from magicpig_cli.evals.texts import Text

COMMON = 10  # words that are asked for
_COMMON_TIMES = 30  # each of them stands in the list, where it is long enough
_RARE_SHARE = 10  # a rare word stands there one part in so many
_COMMON_PART = 3  # the common words take at most one part in so many of the list
FREQUENT = 3  # words that are asked for
_EXPONENT = 2.0  # the word of rank r stands there in proportion to r^−2; rank 1 is filler
_ZETA = math.pi**2 / 6  # Σ r^−2
_FILLER = "..."
_CODED_LETTERS = 6
_WORD = re.compile(r"\b[a-z]{4,9}\b")


@cache
def _vocabulary() -> tuple[str, ...]:
    return tuple(sorted(set(_WORD.findall(natural_text()))))


def common(rng: random.Random, text: Text, context: int) -> Draft:
    """A numbered list in which ten words stand often and all others seldom."""
    vocabulary = rng.sample(_vocabulary(), len(_vocabulary()))
    often, others = vocabulary[:COMMON], vocabulary[COMMON:]
    order = random.Random(rng.random())
    state = order.getstate()

    def words(count: int) -> list[str]:
        times = max(2, min(_COMMON_TIMES, count // (_COMMON_PART * COMMON)))
        seldom = max(1, times // _RARE_SHARE)
        rare = [_rare(others, i // seldom) for i in range(max(0, count - times * COMMON))]
        listed = often * times + rare
        order.setstate(state)
        order.shuffle(listed)
        return listed

    def body(count: int) -> str:
        listed = " ".join(f"{number}. {word}" for number, word in enumerate(words(count), start=1))
        return f"Below is a numbered list of words. Some of them stand in it often, most only seldom.\n\n{listed}\n\n"

    asked = (
        f"Question: Which {COMMON} words stand most often in the list?\n"
        f"Answer: The {COMMON} words that stand most often in the list are"
    )
    question = Question(asked, " " + ", ".join(often), tuple(often))
    return Draft(body, (question,), least=2 * COMMON * _COMMON_PART)


def _rare(words: list[str], number: int) -> str:
    """The number-th rare word; pairs, where a long list needs more than there are."""
    turn, place = divmod(number, len(words))
    return words[place] if not turn else f"{words[place]}-{words[(place + turn) % len(words)]}"


def frequent(rng: random.Random, text: Text, context: int) -> Draft:
    """Words of random letters in Zipf's proportions between rows of dots; the three most frequent are asked for."""
    coded: list[str] = []
    order = random.Random(rng.random())
    state = order.getstate()

    def coded_word(rank: int) -> str:
        while len(coded) < rank - 1:
            word = "".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))
            if word not in coded:
                coded.append(word)
        return coded[rank - 2]

    def body(count: int) -> str:
        listed: list[str] = []
        rank = 1
        while times := round(count * rank**-_EXPONENT / _ZETA):
            listed += [_FILLER if rank == 1 else coded_word(rank)] * times
            rank += 1
        order.setstate(state)
        order.shuffle(listed)
        return (
            "Below is a text of coded words, in which some words stand more often than others. Pass over the dots.\n\n"
            f"{' '.join(listed)}\n\n"
        )

    names = [coded_word(rank) for rank in range(2, 2 + FREQUENT)]
    asked = (
        f"Question: Which {FREQUENT} coded words stand most often in the text?\n"
        f"Answer: The {FREQUENT} coded words that stand most often in the text are"
    )
    return Draft(body, (Question(asked, " " + ", ".join(names), tuple(names)),), least=60)
