"""What a task is: a text of any length with an answer in it, and prompts that end in the beginning of that answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from magicpig_cli.engine.conversation import ChatCodec, common_prefix
from magicpig_cli.errors import ContextError
from magicpig_cli.evals.fit import largest_that_fits
from magicpig_cli.evals.texts import Text

_ROOM = 16  # tokens that an answer may be longer than the right one, or half as long again


@dataclass(frozen=True, slots=True)
class Question:
    """How a prompt ends, how the right answer goes on, and what must be found in a given one."""

    asked: str
    answer: str
    references: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """One text of a task, whose length is still open."""

    body: Callable[[int], str]  # with so many units of filler
    questions: tuple[Question, ...]
    least: int  # units below which it is no such task


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of text. `draw` takes a random generator, the text and the context in tokens."""

    name: str
    draw: Callable[[random.Random, Text, int], Draft]
    questions: int = 1  # that share one text
    uses_text: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, those of the right answer after it, and how many tokens an answer may have."""

    ids: list[int]
    gold: list[int]
    room: int
    references: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Prompts that begin with the same text."""

    prompts: tuple[Prompt, ...]

    @property
    def shared(self) -> list[int]:
        """Tokens that all prompts begin with, at least one less than the shortest has."""
        first, *others = (prompt.ids for prompt in self.prompts)
        length = min([len(first) - 1, *(min(common_prefix(first, ids), len(ids) - 1) for ids in others)])
        return first[:length]


def make_sample(codec: ChatCodec, task: Task, text: Text, context: int, seed: int, number: int) -> Sample:
    """The number-th sample: a function of the arguments alone. Prompt and answer together fill the context, almost.

    Raises ContextError if the context is too short for the task.
    """
    # Not of the context: what is hidden is the same at every length.
    rng = random.Random(f"{seed} {task.name} {text.name if task.uses_text else ''} {number}")
    draft = task.draw(rng, text, context)
    longest = max(draft.questions, key=lambda question: codec.count(question.asked + question.answer))

    def size(count: int) -> int:
        prompt = _prompt(codec, draft.body(count), longest)
        return len(prompt.ids) + prompt.room

    count = largest_that_fits(size, context, draft.least)
    while count is not None and count >= draft.least:
        prompts = tuple(_prompt(codec, draft.body(count), question) for question in draft.questions)
        if all(len(prompt.ids) + prompt.room <= context for prompt in prompts):
            return Sample(prompts)
        count -= 1  # after this text another question is a token longer
    least = size(draft.least)
    raise ContextError(
        f"{task.name} needs a context of {least:,} tokens or more, and {context:,} were asked for",
        hint=f"-c {least}, or --tasks without {task.name}",
    )


def _prompt(codec: ChatCodec, body: str, question: Question) -> Prompt:
    """What prompt and answer have in common with the prompt alone is the prompt: a token may span both."""
    prompt = body + question.asked
    alone, whole = codec.encode_raw(prompt), codec.encode_raw(prompt + question.answer)
    length = common_prefix(alone, whole)
    gold = whole[length:]
    return Prompt(whole[:length], gold, len(gold) + max(_ROOM, len(gold) // 2), question.references)
