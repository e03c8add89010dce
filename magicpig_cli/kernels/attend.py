"""Attention over stored rows: exactly, or over rows sampled by tables (paper section 4.1) or by signatures (rabitq.py).

Keys must be below 2**127 in size and values finite. A logit that overflows or is not a number counts as ±3e38.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magicpig_cli.config import MAX_SEED
from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import want_array, want_int, want_queries, want_scale
from magicpig_cli.kernels.rows import RowTable, want_run
from magicpig_cli.kernels.segment import Segment, Tail

Run = tuple[RowTable, int, int]  # rows [start, stop) of a table
STAGES = ("retrieve", "attend", "window", "merge")


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention over the rows of B sequences. No row at all: output 0, LSE −∞."""

    out: np.ndarray  # float32 [B, H, D], normalised
    lse: np.ndarray  # float32 [B, H], natural logarithm of Σ exp(logit)
    wall_ns: int = 0


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The offloaded rows of one sequence and their tables. Segments and tail follow each other without a gap."""

    table: RowTable
    mu: np.ndarray  # float32 [Hkv, D]: what the rows were centred by when they were hashed
    segments: Sequence[Segment] = ()
    tail: Tail | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Self-normalised estimate over the sampled rows, and the rows attended exactly. None at all: output 0, LSE −∞.

    With π the probability that a row is sampled and ŵ the softmax weights over all rows, sampled and exact, the
    estimated relative error of `out` is √(Σ_sampled ŵ²·(1−π)·‖v−out‖²) / ‖out‖.
    """

    out: np.ndarray  # float32 [B, H, D]
    lse: np.ndarray  # float32 [B, H], of logits − ln π
    error: np.ndarray | None  # float32 [B, H], of `out`; None where it was not asked for
    sampled: np.ndarray  # int64 [B, H], sampled rows
    stage_ns: dict[str, int] = field(default_factory=dict)  # of STAGES, summed over threads; window: the exact rows
    wall_ns: int = 0


def exact_attend(
    q: np.ndarray,
    runs: Sequence[Sequence[Run]],
    *,
    scale: float,
    softcap: float | None = None,
    threads: int,
) -> Attended:
    """Softmax attention of q float32 [B, H, D] over the runs of each sequence, in float32.

    Logits are scale·q·k, or softcap·tanh(scale·q·k / softcap). Work is cut by row counts, so no bit depends on threads.
    """
    want_queries(q, None, None)
    want_scale(scale, softcap)
    want_int("threads", threads, 1)
    want_runs(q, runs, [])
    return Attended(*isa.backend().exact_attend(q, runs, scale, softcap or 0.0, threads))


def lsh_attend(
    q: np.ndarray,
    codes: np.ndarray,
    groups: Sequence[SampledRows],
    weights: np.ndarray,
    *,
    tail: float = 0.0,
    key: tuple[int, int] = (0, 0),
    scale: float,
    softcap: float | None = None,
    threads: int,
    exact: Sequence[Sequence[Run]] | None = None,
    with_error: bool = True,
) -> Sampled:
    """Attention of q float32 [B, H, D] estimated from the rows that share ≥ 2 of L codes with it (paper section 4.1).

    exact: for each sequence runs of other rows, which are attended exactly and merged with the estimate.

    codes: uint16 [B, H, L]. The logit of a sampled row is that of `exact_attend` plus −ln π, π = 1 − (1−u)(1−tail).
    −ln u is read from `weights` float32 [cells + 1] by linear interpolation in sin(θ/2), θ the angle between q and
    k − μ (π/2 for a zero norm).

    tail: rate of the uniform tail: every row enters with this probability too, by a draw that `key` (hash seed, layer),
    kv head and row number determine. with_error: also estimate the error: 9 to 18% of a call.
    """
    want_scale(scale, softcap)
    want_tail("tail", tail, key)
    want_weights(weights)
    _want_groups(q, codes, groups, threads)
    runs = [()] * len(groups) if exact is None else exact
    want_runs(q, runs, [group.table for group in groups])
    found = isa.backend().lsh_attend(
        q, codes, groups, weights, float(tail), key, scale, softcap or 0.0, threads, runs, with_error
    )
    return as_sampled(found, with_error)


def want_weights(weights: np.ndarray) -> None:
    """A table over uniform cells: one cell at least."""
    want_array("weights", weights, np.float32, "cells + 1", (None,))
    if weights.shape[0] < 2:
        raise ValueError(f"weights: want at least 2 entries, got {weights.shape[0]}")


def as_sampled(found: tuple[Any, ...], with_error: bool) -> Sampled:
    """What a sampling kernel returns, by name."""
    out, lse, error, sampled, stages, wall_ns = found
    return Sampled(out, lse, error if with_error else None, sampled, dict(zip(STAGES, stages, strict=True)), wall_ns)


def lsh_sample(
    codes: np.ndarray, groups: Sequence[SampledRows], *, tail: float = 0.0, key: tuple[int, int] = (0, 0),
    threads: int = 1,
) -> list[list[np.ndarray]]:  # fmt: skip
    """The rows that `lsh_attend` samples, for every sequence and query head: int64, ascending."""
    want_tail("tail", tail, key)
    _want_groups(None, codes, groups, threads)
    rows: list[list[np.ndarray]] = isa.backend().lsh_sample(codes, groups, threads, float(tail), key)
    return rows


def want_tail(name: str, share: float, key: tuple[int, int]) -> None:
    """A share in [0, 1], and what determines its draw."""
    if not 0 <= share <= 1:
        raise ValueError(f"{name}: want 0 to 1, got {share}")
    want_key(key)


def want_key(key: tuple[int, int]) -> None:
    """Two integers that determine what is drawn."""
    seed, layer = key
    want_int("hash seed", seed, 0, MAX_SEED)
    want_int("layer", layer, 0, 2**31 - 1)


def want_runs(q: np.ndarray, runs: Sequence[Sequence[Run]], others: list[RowTable]) -> None:
    """Runs of rows of tables that match the queries and each other, and `others`."""
    if len(runs) != q.shape[0]:
        raise ValueError(f"runs: want one list for each of {q.shape[0]} sequences, got {len(runs)}")
    tables = list(others)
    for run in (run for of_sequence in runs for run in of_sequence):
        want_run("run", *run)
        tables.append(run[0])
    want_matching(q, tables)


def want_matching(q: np.ndarray, tables: list[RowTable]) -> None:
    """Tables that match each other and q, which is float32 [B, H, D].

    Checks run between two kernels that have the cache for themselves: one costs 2 to 5 µs, in every layer of a step.
    """
    for table in tables:
        if table.kv_heads != tables[0].kv_heads:
            raise ValueError(f"tables: want {tables[0].kv_heads} kv heads in all, got {table.kv_heads}")
        if table.head_dim != q.shape[2] or q.shape[1] % table.kv_heads:
            want_queries(q, table.kv_heads, table.head_dim)


def _want_groups(q: np.ndarray | None, codes: np.ndarray, groups: Sequence[SampledRows], threads: int) -> None:
    want_int("threads", threads, 1)
    if q is None:
        want_array("codes", codes, np.uint16, "B, H, L", (None, None, None))
    else:
        want_queries(q, None, None)
        want_array("codes", codes, np.uint16, "B, H, L", (*q.shape[:2], None))
        want_matching(q, [group.table for group in groups])
    if len(groups) != codes.shape[0]:
        raise ValueError(f"groups: want one for each of {codes.shape[0]} sequences, got {len(groups)}")
    segments = [segment for group in groups for segment in group.segments]
    K = segments[0].K if segments else 16
    for group in groups:
        _want_group(group, codes, K)
    if codes.size and int(codes.max()) >> K:
        raise ValueError(f"codes: want {K}-bit codes, got {int(codes.max())}")


def _want_group(group: SampledRows, codes: np.ndarray, K: int) -> None:
    table, heads, L = group.table, group.table.kv_heads, codes.shape[2]
    want_array("mu", group.mu, np.float32, "Hkv, D", (heads, table.head_dim))
    if codes.shape[1] == 0 or codes.shape[1] % heads:
        raise ValueError(f"codes: want query heads in multiples of {heads} kv heads, got {codes.shape[1]}")
    for segment in group.segments:
        got = (segment.K, segment.L, segment.kv_heads)
        if got != (K, L, heads):
            raise ValueError(f"segments: want K, L, Hkv = {(K, L, heads)}, got {got}")
        want_run("segment", table, segment.start, segment.start + segment.n)
    if group.tail is not None:
        want_array("tail codes", group.tail.codes, np.uint16, "Hkv, L, capacity", (heads, L, None))
        want_run("tail", table, group.tail.start, group.tail.start + group.tail.n)
