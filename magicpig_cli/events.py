"""What the engine yields while it works. The edges (`cli`, `ui`, `batch`) render these; the engine never prints."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "interrupted"]
MEASURING = "measuring this machine: 2 s, kept for next time"  # stage of a LoadProgress
STAGES = ("dense", "hash", "retrieve", "attend", "merge", "window", "other")


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Loading or converting a model: `done` of `total` in the unit of that stage; total 0 = unknown."""

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Working:
    """A long piece of measuring or tuning: `done` of `total` tokens, layers, steps or rounds of `what`."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens of one sequence processed so far, reused ones included."""

    key: str
    done: int
    total: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class StepStats:
    """One decode step of all running sequences."""

    batch: int
    wall_ms: float
    stages_ms: dict[str, float]  # keys: STAGES; they add up to wall_ms
    sampled: dict[int, int] = field(default_factory=dict)  # layer → sampled keys, summed over query heads
    offloaded: dict[int, int] = field(default_factory=dict)  # layer → offloaded keys, summed over query heads
    squares: dict[int, float] = field(default_factory=dict)  # layer → mean over heads of the estimated error's square
    budget: float | None = None  # mean over sampled layers and heads, of a sampler that has one
    device_ms: dict[str, float] = field(default_factory=dict)  # stage → what a GPU took, by its clock, beside the host
    waited_ms: float = 0.0  # part of `other`: until a GPU had the queries of a layer; of both halves of a batch

    @property
    def sampled_ratio(self) -> float | None:
        """Σ sampled / Σ offloaded; None where no layer sampled (exact attention)."""
        offloaded = sum(self.offloaded.values())
        return sum(self.sampled.values()) / offloaded if offloaded else None

    @property
    def error_estimate(self) -> float | None:
        """Relative error of attention as the sampled keys tell it: RMS over heads, averaged over sampled layers."""
        return mean_of_roots(self.squares.values())


def mean_of_roots(squares: Iterable[float]) -> float | None:
    """Mean over layers of the root of each one's mean square; None where no layer was sampled."""
    roots = [math.sqrt(square) for square in squares]
    return sum(roots) / len(roots) if roots else None


def mean_budget(budgets: Iterable[float | None]) -> float | None:
    """Mean of those that are known, without the digits that float32 and summing add."""
    known = [budget for budget in budgets if budget is not None]
    return round(math.fsum(known) / len(known), 6) if known else None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token; `text` is what became safe to show (may be empty, may end a held-back character)."""

    key: str
    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one answer. `tpot_ms`: the model's share of each decode step, without token sampling and rendering."""

    prefill_s: float
    ttft_s: float
    tpot_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """End of one answer. `text` is the whole answer, stop string removed; `tail` what was not yet emitted of it."""

    key: str
    reason: FinishReason
    token_ids: tuple[int, ...]
    text: str
    tail: str
    prompt_tokens: int
    reused_tokens: int
    timing: Timing
    sampled: int  # Σ over its decode steps, sampled layers and query heads
    offloaded: int
    seed: int | None
    error_estimate: float | None = None  # relative error of attention: RMS over heads and steps, mean over layers
    budget: float | None = None  # mean over its steps, of a sampler that has one

    @property
    def dropped(self) -> bool:
        """Whether it was interrupted before there was an answer."""
        return self.reason == "interrupted" and not self.token_ids

    @property
    def sampled_ratio(self) -> float | None:
        return self.sampled / self.offloaded if self.offloaded else None


@dataclass(frozen=True, slots=True)
class Failed:
    """One request could not be run; the others go on."""

    key: str
    code: str
    message: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Requeued:
    """Memory ran out: this answer was taken back and starts anew later. Its tokens so far are void."""

    key: str
    batch_size: int  # sequences decoded together from now on


@dataclass(frozen=True, slots=True)
class WaitingForMemory:
    """Nothing runs, and the next request does not fit into the memory that others have left."""

    key: str
    need_bytes: int
    free_bytes: int


Event = PrefillProgress | StepStats | TokenEvent | Finished | Failed | Requeued | WaitingForMemory
