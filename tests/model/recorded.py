"""Runners whose decode steps are recorded by the fake of graphs, and steps in lanes of a test's choice."""

from __future__ import annotations

import torch

from magicpig_cli.model import hook
from magicpig_cli.model.segments import Segments
from tests.model.fake_graphs import FakeGraphs
from tests.model.test_parity import prompts

STEPS = (((0, 1, 2), 0), ((1,), 1), ((2, 0), 0), ((2,), 1), ((0, 1, 2), 0), ((1, 2), 0))  # who, in which lane


class Recorded:
    """Segments, and the executors of their lanes in the order in which they were made.

    fail_at: the capture of the first lane, from 1, at which memory runs out.
    """

    def __init__(self, model, fail_at: int | None = None):
        self.executors: list[FakeGraphs] = []
        self._fail_at = fail_at
        self.segments = Segments(model, self._make)

    def _make(self) -> FakeGraphs:
        self.executors.append(FakeGraphs(None if self.executors else self._fail_at))
        return self.executors[-1]

    @property
    def captures(self) -> int:
        return sum(executor.begun for executor in self.executors)


def in_segments(runner, **how) -> Recorded:
    """Have the runner's decode steps recorded."""
    recorded = Recorded(runner.model, **how)
    runner.segments = recorded.segments
    return recorded


def started(runner, lengths: tuple[int, ...]):
    """Sequences after prompts of these lengths."""
    sequences = []
    for prompt in prompts(runner.model.config.vocab_size, lengths):
        sequences.append(runner.new_sequence())
        list(runner.prefill(sequences[-1], prompt))
    return sequences


def step(runner, sequences, tokens: list[int], lane: int = 0) -> torch.Tensor:
    """Logits [B, V] of one token for each sequence, as the runner decodes, in a lane of a test's choice."""
    exact = [[False] * len(sequences)] * runner.model.config.num_hidden_layers
    forward = hook.Forward(runner._attention(), sequences, exact, lane=lane)
    ids = torch.tensor([[token] for token in tokens])
    positions = torch.tensor([[sequence.length] for sequence in sequences])
    with torch.inference_mode():
        logits = runner.segments.run(ids, positions, forward)
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.commit([token])
    return logits


def steps(runner, sequences) -> list[torch.Tensor]:
    """Logits of STEPS, each token the likeliest of the step before."""
    tokens, found = [5, 6, 7], []
    for who, lane in STEPS:
        found.append(step(runner, [sequences[b] for b in who], [tokens[b] for b in who], lane))
        for b, row in zip(who, found[-1], strict=True):
            tokens[b] = int(row.argmax())
    return found


def all_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
