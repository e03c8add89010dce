"""Teacher forcing over the end of a text: how far the next-token distributions of a mode are from exact ones."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import numpy as np
import torch

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.evals.forked import indexed
from magicpig_cli.evals.metrics import divergence, log_probabilities
from magicpig_cli.evals.units import Record

BLOCK = 16  # positions that intervals take as one observation: neighbours depend on each other


class Continuation:
    """`tokens` after what was read: all but the last are fed, all but the first are predicted."""

    def __init__(self, runner: ModelRunner, read: Sequence, tokens: list[int]) -> None:
        self._runner, self._read, self._tokens = runner, read, tokens
        self._logits: list[torch.Tensor] = []  # of exact attention, float32 [V] per fed token

    def exact(self) -> Iterator[None]:
        """The reference; before anything else."""
        with indexed(self._runner, self._read, "exact") as (sequence, _):
            for token in self._tokens[:-1]:
                self._logits.append(self._runner.decode([sequence], [token], "exact").logits[0].cpu())
                yield

    def run(self, runner: ModelRunner, mode: str) -> Generator[None, None, Record]:
        """One mode, step by step. The record has lists by position, and squared errors by block and layer."""
        divergences, losses, layers = [], [], []
        squares: list[np.ndarray] = []  # mean over query heads of squared relative errors, [sampled layers] per step
        with indexed(runner, self._read, mode) as (sequence, usage):
            for reference, token, target in zip(self._logits, self._tokens[:-1], self._tokens[1:], strict=True):
                step = runner.decode([sequence], [token], mode, measure_error=mode != "exact")
                usage.count(step)
                found = log_probabilities(step.logits[0].cpu())
                divergences.append(divergence(log_probabilities(reference), found))
                losses.append(-float(found[target]))
                if step.errors is not None:
                    layers = list(step.stats.sampled)
                    squares.append(step.errors.double().square().view(len(layers), -1).mean(dim=1).numpy())
                yield
        return {
            "kl": divergences,
            "loss": losses,
            "layers": layers,
            "squared_errors": _by_block(squares),
            "sampled": usage.sampled,
            "offloaded": usage.offloaded,
            "index_bytes_per_token": usage.index_bytes_per_token,
        }


def _by_block(squares: list[np.ndarray]) -> list[list[float]]:
    """Means over BLOCK steps, [blocks][layers]."""
    return [
        np.mean(squares[start : start + BLOCK], axis=0).tolist() for start in range(0, len(squares), BLOCK)
    ]  # fmt: skip
