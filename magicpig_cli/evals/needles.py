"""Tasks that hide facts in a text: one needle, one of many, pass keys, a chain of variables (RULER's NIAH and VT)."""

from __future__ import annotations

import random
import string

from magicpig_cli.evals.tasks import Draft, Question
from magicpig_cli.evals.texts import Text, with_inserted

KEYS = 10  # hidden in one text, all asked for
_KEY_EVERY, _FEWEST_KEYS, _MOST_KEYS = 128, 4, 64  # tokens of context per needle of `multikey`
_CHAIN = 5  # variables of one value
_NAME_LETTERS = 5
_NAMES = (
    "anchor", "apple", "basket", "beacon", "blanket", "bottle", "bridge", "butter", "button", "camera", "candle",
    "carpet", "castle", "cellar", "chimney", "cinema", "clover", "coffee", "copper", "cotton", "curtain", "desert",
    "dinner", "dragon", "engine", "falcon", "feather", "ferry", "forest", "garden", "garlic", "ginger", "glacier",
    "guitar", "hammer", "harbor", "helmet", "honey", "island", "jacket", "jungle", "kettle", "ladder", "lantern",
    "lemon", "library", "magnet", "marble", "meadow", "mirror", "monkey", "mountain", "needle", "ocean", "orange",
    "oyster", "paper", "parrot", "pepper", "piano", "pillow", "pirate", "planet", "pocket", "pumpkin", "rabbit",
    "ribbon", "river", "rocket", "saddle", "salmon", "school", "shadow", "silver", "spider", "spoon", "summer",
    "sunset", "temple", "thunder", "ticket", "tiger", "tomato", "tractor", "tunnel", "turtle", "velvet", "village",
    "violin", "wagon", "walnut", "whale", "willow", "window", "winter", "wizard", "yacht", "zebra",
)  # fmt: skip


def single(rng: random.Random, text: Text, context: int) -> Draft:
    """One number somewhere in the text."""
    return _numbers(rng, text, 1)


def many(rng: random.Random, text: Text, context: int) -> Draft:
    """Many numbers of the same form, one of which is asked for."""
    return _numbers(rng, text, max(_FEWEST_KEYS, min(_MOST_KEYS, context // _KEY_EVERY)))


def _numbers(rng: random.Random, text: Text, count: int) -> Draft:
    names = rng.sample(_NAMES, _MOST_KEYS)
    values = [_digits(rng, 7) for _ in names]
    lines = [
        (rng.random(), f"The number that belongs to the word {name} is {value}.")
        for name, value in zip(names, values, strict=True)
    ][:count]
    intro = "A text follows in which numbers are given to words. Read it, and remember which number belongs to which."
    asked = (
        f"Question: Which number does the text give to the word {names[0]}?\n"
        f"Answer: The number that belongs to the word {names[0]} is"
    )
    return _hidden(rng, text, intro, lines, [Question(asked, f" {values[0]}", (values[0],))])


def passkey(rng: random.Random, text: Text, context: int) -> Draft:
    """One short key, told twice in one place, and no instruction: what the smallest models can do."""
    value = _digits(rng, 5)
    line = f"The pass key is {value}. Remember it. {value} is the pass key."
    return _hidden(rng, text, "", [(rng.random(), line)], [Question("The pass key is", f" {value}", (value,))])


def ten_keys(rng: random.Random, text: Text, context: int) -> Draft:
    """Ten short keys, each told twice in one place; all are asked for, one at a time."""
    names = rng.sample(_NAMES, KEYS)
    values = [_digits(rng, 5) for _ in names]
    lines = [
        (rng.random(), f"The pass key of the {name} is {value}. Remember it. {value} is the pass key of the {name}.")
        for name, value in zip(names, values, strict=True)
    ]
    questions = [
        Question(f"The pass key of the {name} is", f" {value}", (value,))
        for name, value in zip(names, values, strict=True)
    ]
    return _hidden(rng, text, "", lines, questions)


def variables(rng: random.Random, text: Text, context: int) -> Draft:
    """A variable is set to a number and copied from name to name; all names with that number are asked for."""
    names = _variable_names(rng)
    value = _digits(rng, 5)
    assigned = [value, *(f"VAR {name}" for name in names[:-1])]
    places = sorted(rng.random() for _ in names)
    lines = [(place, f"VAR {name} = {source}") for place, name, source in zip(places, names, assigned, strict=True)]
    intro = "A text follows in which variables are set to numbers or to other variables. Keep track of their values."
    asked = (
        f"Question: Which variables have the value {value}, directly or through others?\n"
        f"Answer: The {_CHAIN} variables that have the value {value} are"
    )
    return _hidden(rng, text, intro, lines, [Question(asked, " " + ", ".join(names), tuple(names))])


def _hidden(
    rng: random.Random, text: Text, intro: str, lines: list[tuple[float, str]], questions: list[Question]
) -> Draft:
    """Lines at their places in an excerpt of the text, intro before and questions after it."""
    start = rng.randrange(len(text.words))
    before = f"{intro}\n\n" if intro else ""

    def body(count: int) -> str:
        return f"{before}{with_inserted(text.excerpt(start, count), lines).rstrip()}\n\n"

    return Draft(body, tuple(questions), least=0)


def _digits(rng: random.Random, count: int) -> str:
    return str(rng.randrange(10 ** (count - 1), 10**count))


def _variable_names(rng: random.Random) -> list[str]:
    """Distinct names of capital letters."""
    names: list[str] = []
    while len(names) < _CHAIN:
        name = "".join(rng.choices(string.ascii_uppercase, k=_NAME_LETTERS))
        if name not in names:
            names.append(name)
    return names
