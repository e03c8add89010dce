"""One answer that is wanted, and what is known of it while it is read and generated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.engine.sampling import SamplingParams, TokenSampler
from magicpig_cli.engine.text import TextStream
from magicpig_cli.events import Finished, FinishReason, Timing, mean_budget, mean_of_roots

if TYPE_CHECKING:
    from magicpig_cli.engine.step import Step


@dataclass(frozen=True)
class Request:
    """One answer wanted. `sequence`: continue that cache, reusing the longest common prefix with `prompt_ids`.

    prefix: what it has in common with other requests; shorter than the prompt. Not together with `sequence`.
    """

    key: str
    prompt_ids: list[int]
    sampling: SamplingParams
    default_seed: int | None = None  # seed of token sampling where the request names none; None = drawn
    sequence: Sequence | None = None
    prefix: SharedPrefix | None = None


@dataclass
class Answer:
    """One request that has been opened."""

    request: Request
    limit: int  # tokens it may be given in all
    reused: int  # prompt tokens whose rows it does not make itself
    sampler: TokenSampler
    stream: TextStream
    started: float
    sequence: Sequence | None = None  # from when its prefix has been read
    reading: Iterator[tuple[int, torch.Tensor | None]] | None = None
    read_s: float = 0.0
    ttft_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    sampled: int = 0
    offloaded: int = 0
    squares: dict[int, float] = field(default_factory=dict)  # layer → Σ over sampled steps of the mean square error
    budgets: list[float | None] = field(default_factory=list)  # of each step
    sampled_steps: int = 0
    finish: FinishReason | None = None

    @property
    def key(self) -> str:
        return self.request.key

    @property
    def rows(self) -> Sequence:
        """The sequence of an answer whose prompt has been read."""
        assert self.sequence is not None
        return self.sequence

    @property
    def longest(self) -> int:
        """Tokens of the sequence at its end, at most."""
        return len(self.request.prompt_ids) + self.limit

    @property
    def read_before(self) -> int:
        """Prompt tokens whose rows somebody has made already."""
        prefix = self.request.prefix
        if prefix is None:
            return self.reused
        return next((part.tokens for part in prefix.chain() if part.sequence is not None), 0)

    def close(self) -> None:
        """Free what it holds, unless that is its caller's."""
        if self.reading is not None:
            self.reading.close()  # type: ignore[attr-defined]
        if self.request.sequence is None and self.sequence is not None:
            self.sequence.release()
        self.sequence = None

    def finished(self) -> Finished:
        assert self.finish is not None
        tail = self.stream.finish()
        return Finished(
            key=self.key,
            reason=self.finish,
            token_ids=tuple(self.tokens),
            text=self.stream.text,
            tail=tail,
            prompt_tokens=len(self.request.prompt_ids),
            reused_tokens=self.reused,
            timing=Timing(self.read_s, self.ttft_s, tuple(self.tpot_ms)),
            sampled=self.sampled,
            offloaded=self.offloaded,
            seed=self.sampler.seed,
            error_estimate=mean_of_roots(total / self.sampled_steps for total in self.squares.values()),
            budget=mean_budget(self.budgets),
        )

    def note(self, step: Step, row: int) -> None:
        """What a decode step took, and what it sampled for this answer, which is in this row of it."""
        self.tpot_ms.append(step.stats.wall_ms)
        self.sampled += step.sampled[row]
        self.offloaded += step.offloaded[row]
        self.sampled_steps += bool(step.squares[row])
        for layer, square in step.squares[row].items():
            self.squares[layer] = self.squares.get(layer, 0.0) + square
        self.budgets.append(step.budgets[row])
