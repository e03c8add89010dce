"""Exact decode steps over given tokens that keep what the layers asked for: queries for predictions and benchmarks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.model import hook


@dataclass
class Queries:
    """What decode steps attended with, by layer."""

    by_layer: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # one float32 [B, H, D] on the host per step
    rules: dict[int, LogitRule] = field(default_factory=dict)

    def stacked(self, layer: int) -> torch.Tensor:
        """float32 [steps · B, H, D] of one layer."""
        return torch.cat(self.by_layer[layer])


class _Recording(Attention):
    """Exact attention that keeps its queries as they are compared with the rows: rotated where these are."""

    def __init__(self, runner: ModelRunner, row_dtype: torch.dtype, queries: Queries) -> None:
        super().__init__(None, row_dtype, runner.plan.threads, runner.staging, runner.key_rotation)
        self._queries = queries

    def _asked(self, layer: int, queries: torch.Tensor | np.ndarray, rule: LogitRule) -> None:
        self._queries.by_layer.setdefault(layer, []).append(self._staging.to_host(torch.as_tensor(queries)).clone())
        self._queries.rules[layer] = rule


@dataclass(frozen=True, slots=True)
class ExactStep:
    """What one teacher-forced step took: all of it, and attention (every layer reads everything)."""

    wall_ms: float
    attention_ms: float


def teacher_force(
    runner: ModelRunner, sequence: Sequence, tokens: SequenceOf[int], queries: Queries
) -> Iterator[ExactStep]:
    """Feed these tokens one by one, exactly, whatever the model would have said; `queries` collects what was asked."""
    recording = _Recording(runner, sequence.layers[0].window.rows.dtype, queries)
    for token in tokens:
        begin = time.perf_counter_ns()
        forward = hook.Forward(recording, [sequence], [[False]] * len(sequence.layers))
        try:
            runner.forward(torch.tensor([[token]]), torch.tensor([[sequence.length]]), forward)
        except BaseException:
            sequence.rollback()
            raise
        sequence.commit([token])
        yield ExactStep((time.perf_counter_ns() - begin) / 1e6, sum(forward.record.ns.values()) / 1e6)
