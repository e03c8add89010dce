"""The types of a profile. Which keys a file has for them stands in `schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from magicpig_cli.config import AUTO_SAMPLER, DEFAULT_K, DEFAULT_L, DEFAULT_LOCAL, DEFAULT_SINK


@dataclass(frozen=True, slots=True)
class Match:
    """Which machines (and which model) a profile is for. All that is given must hold; nothing given matches nothing."""

    device: str | None = None  # cpu | gpu: where the weights are
    gpu_name: str | None = None  # words that follow each other in the GPU's name, any case
    gpu_memory_min: int | None = None  # bytes of the GPU, inclusive
    gpu_memory_max: int | None = None  # bytes, exclusive
    cpu_model: str | None = None  # words that follow each other in the CPU's name, any case
    model: str | None = None  # name of the model it was tuned for, as `Engine.model_name`


@dataclass(frozen=True, slots=True)
class TableSize:
    """(K, L) for sequences of up to `up_to` tokens (inclusive; None = however long)."""

    K: int
    L: int
    up_to: int | None = None
    sampled_ratio: float | None = None  # of the offloaded keys, as expected of real text; None = unknown


@dataclass(frozen=True, slots=True)
class Profile:
    """Recommendations for one kind of machine."""

    name: str = "built-in"
    match: Match = field(default_factory=Match)
    sampler: str = AUTO_SAMPLER  # of `--attention auto`: lsh, rabitq, or auto: the better one by what is expected
    tables: tuple[TableSize, ...] = (TableSize(DEFAULT_K, DEFAULT_L),)  # of lsh, by context, ascending
    budget: float | None = None  # of rabitq; None here and below = the program's default
    bits: int | None = None  # of rabitq
    tail: float | None = None  # share of what is sampled that is drawn uniformly
    target_error: float | None = None  # of rabitq: by which each head's budget moves; None = it stays
    head_shares: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of rabitq, by layer: of the budget
    dense_layers: tuple[int, ...] = (0,)
    sink: int = DEFAULT_SINK
    local: int = DEFAULT_LOCAL
    auto_lsh_from: int = 4096  # `--attention auto`: shorter sequences are attended exactly
    chunk: int = 512  # prompt tokens per forward
    threads: int | None = None  # at most so many; None = the physical cores that this process may use
    max_batch: int | None = None  # sequences decoded together; None = the planner's own limit
    host_reserve: int = 1 << 30  # bytes of host memory left alone: Python, torch, activations, logits, projections
    device_reserve: int = 1 << 30  # bytes of the GPU left alone
    sources: Mapping[str, str] = field(default_factory=dict)  # key of the file → "paper, table 3", "measured: …", …
    path: Path | None = None  # the file it came from; None = BUILT_IN

    def table_size(self, tokens: int) -> TableSize:
        """(K, L) for a sequence of `tokens`."""
        return next((t for t in self.tables if t.up_to is None or tokens <= t.up_to), self.tables[-1])


BUILT_IN = Profile()  # where no file is read: what the planner chooses on any machine
