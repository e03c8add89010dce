"""Answers to the prompts of one sample, and how likely the right ones were."""

from __future__ import annotations

import torch

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.evals.forked import Usage, indexed
from magicpig_cli.evals.metrics import log_probabilities, share_found
from magicpig_cli.evals.tasks import Prompt, Sample
from magicpig_cli.evals.units import Record


def answer(codec: ChatCodec, runner: ModelRunner, mode: str, shared: Sequence, sample: Sample) -> Record:
    """All prompts in one mode. The record has lists by prompt.

    shared: has read what the prompts share. The rest of each is read exactly in every mode, as in a chat, so the first
    token of an answer is the same in all; its probability is left out where the right answer has more than one token.
    """
    with indexed(runner, shared, mode) as (trunk, usage):
        first: list[torch.Tensor] = []
        asked: list[Sequence] = []
        try:
            for prompt in sample.prompts:
                asked.append(runner.fork(trunk))
                *_, (_, logits) = runner.prefill(asked[-1], prompt.ids[trunk.length :], mode)
                first.append(logits)
            gold = _gold(runner, mode, asked, first, sample.prompts, usage)
            texts = _greedy(codec, runner, mode, asked, first, sample.prompts, usage)
        finally:
            for sequence in asked:
                sequence.release()
    return {
        "scores": [
            share_found(text, prompt.references) for text, prompt in zip(texts, sample.prompts, strict=True)
        ],
        "gold_logprobs": gold,
        "answers": texts,
        "references": [list(prompt.references) for prompt in sample.prompts],
        "prompt_tokens": [len(prompt.ids) for prompt in sample.prompts],
        "sampled": usage.sampled,
        "offloaded": usage.offloaded,
        "index_bytes_per_token": usage.index_bytes_per_token,
    }  # fmt: skip


def _gold(
    runner: ModelRunner, mode: str, asked: list[Sequence], first: list[torch.Tensor], prompts: tuple[Prompt, ...],
    usage: Usage,
) -> list[float]:  # fmt: skip
    """Mean log-probability per token of each right answer, fed token by token; the sequences stay as they are."""
    found = [[float(log_probabilities(x)[prompt.gold[0]])] for x, prompt in zip(first, prompts, strict=True)]
    forks = [runner.fork(sequence) for sequence in asked]
    try:
        for place in range(1, max(len(prompt.gold) for prompt in prompts)):
            active = [i for i, prompt in enumerate(prompts) if place < len(prompt.gold)]
            step = runner.decode([forks[i] for i in active], [prompts[i].gold[place - 1] for i in active], mode)
            usage.count(step)
            for i, logits in zip(active, step.logits, strict=True):
                found[i].append(float(log_probabilities(logits)[prompts[i].gold[place]]))
    finally:
        for fork in forks:
            fork.release()
    rest = [values[1:] or values for values in found]
    return [sum(values) / len(values) for values in rest]


def _greedy(
    codec: ChatCodec, runner: ModelRunner, mode: str, asked: list[Sequence], first: list[torch.Tensor],
    prompts: tuple[Prompt, ...], usage: Usage,
) -> list[str]:  # fmt: skip
    """The likeliest tokens until the answer ends, has no room left, or has everything that is looked for."""
    answers = [[int(logits.argmax())] for logits in first]

    def goes_on(i: int) -> bool:
        tokens, prompt = answers[i], prompts[i]
        open_ended = len(tokens) < prompt.room and tokens[-1] not in codec.stop_ids
        return open_ended and share_found(codec.decode(tokens), prompt.references) < 1

    while active := [i for i in range(len(prompts)) if goes_on(i)]:
        step = runner.decode([asked[i] for i in active], [answers[i][-1] for i in active], mode)
        usage.count(step)
        for i, token in zip(active, step.logits.argmax(dim=-1).tolist(), strict=True):
            answers[i].append(token)
    return [codec.decode(tokens) for tokens in answers]
