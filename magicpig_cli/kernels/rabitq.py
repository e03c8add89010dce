"""Attention estimated from rows that their signatures sample (RaBitQ; docs/method.md).

Per query head, a row is taken where its score, the estimate ŝ of its logit s by the bits alone plus a jitter with the
exponential distribution of mean 1, reaches the threshold τ, the upper quantile (budget − r)/(1 − r) of the scores of a
strided subset; and, independently, with probability r = tail·budget. So a share `budget` of the rows is expected. The
estimate has the standard deviation σ over rotations:

    σ² = (|q|² − (q·x)²/|x|²) · (B·f² − c·|x|²) / (D − 1) + rounding,    q times scale, x = k − μ, c: `rotation_share`

so a row is taken with probability π = 1 − (1−u)(1−r), u = E[min(1, exp(s − τ + σ·ε))] over normal ε, in closed form
Φ(z) + exp(s − τ + σ²/2)·Φ(−z − σ) with z = (s−τ)/σ, and its logit becomes s − ln π. Rounding is that of the look-up
tables, f²·(B/4)·step²/12, and of the scores, unit²/3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.attend import (
    Run,
    Sampled,
    as_sampled,
    want_key,
    want_matching,
    want_runs,
    want_tail,
    want_weights,
)
from magicpig_cli.kernels.checks import want_array, want_int, want_queries, want_scale
from magicpig_cli.kernels.jitter import jitter_pool, jitter_start
from magicpig_cli.kernels.rows import widen
from magicpig_cli.kernels.signature import SignatureBasis, SignedRows
from magicpig_cli.kernels.signature_shape import TOP_SCORE, threshold_subset


@dataclass(frozen=True, slots=True)
class Lookup:
    """What whoever has a copy of the signatures of one sequence makes their scores of: integers, so that it makes the
    same ones. With a signature's nibbles c_j and its factor's share f (see `factor_scale`) the score of row r is

        means[its cell] + ⌊⌊(lift · Σ_j tables[j, c_j] − centre) · f⌉ · share⌉ + ⌊pool[start + r] · jitter⌉

    with ⌊x·y⌉ = (x·y + 2^14) >> 15, and the place in the pool modulo its length (`jitter_pool`).
    """

    tables: np.ndarray  # uint8 [H, bits/4, 16]
    lines: np.ndarray  # int32 [H, 4]: lift, centre, share, jitter
    means: np.ndarray  # int16 [H, n/256]
    factor_scale: np.ndarray  # float32 [Hkv]: f is a factor times this, rounded to nearest even
    starts: np.ndarray  # int64 [Hkv]: where row 0 takes its jitter from
    subset: np.ndarray  # int64 [H, 3]: see `threshold_subset`


@dataclass(frozen=True, slots=True)
class Reached:
    """Rows of one sequence whose scores reach the threshold, where somebody else has compared."""

    bits: np.ndarray  # uint64 [H, n/64], lowest bit first
    bounds: np.ndarray  # int32 [H]: the threshold; −TOP_SCORE − 1: all rows, whatever the bits; TOP_SCORE + 1: none


def rabitq_attend(
    q: np.ndarray,
    basis: SignatureBasis,
    groups: Sequence[SignedRows],
    weights: np.ndarray,
    *,
    budget: np.ndarray,
    tail: float,
    key: tuple[int, int],
    scale: float,
    softcap: float | None = None,
    threads: int,
    exact: Sequence[Sequence[Run]] | None = None,
    with_error: bool = True,
    reached: Sequence[Reached | None] | None = None,
) -> Sampled:
    """Attention of q float32 [B, H, D] estimated from a share `budget` float32 [B, H] of the rows, in (0, 1] each.

    weights: −ln Φ(z) float32 [cells + 1] over uniform cells of z from Z_LOW to Z_HIGH (`estimator.log_normal_table`).
    tail: share of the budget that goes to the uniform tail; key: (hash seed, layer), which with kv head and row number
    determine jitter and tail. exact: for each sequence runs of other rows, which are attended exactly and merged with
    the estimate. A budget of 1, or a threshold below all scores, takes every row with π = 1. Angle and scores are those
    of scale·q·k also where a soft cap bounds the logit. with_error: also estimate the error: 9 to 18% of a call.
    reached: of sequences whose scores somebody else has made and compared (`rabitq_lookup`), which rows that are: they
    are not scanned here. The uniform tail, which depends on no score, is still drawn here.
    """
    want_weights(weights)
    want_scale(scale, softcap)
    _want_signed(q, basis, groups, threads)
    rates, shares = _want_budget(q, budget, tail, key)
    elsewhere = _want_reached(q, groups, reached)
    runs = [()] * len(groups) if exact is None else exact
    want_runs(q, runs, [group.table for group in groups])
    found = isa.backend().rabitq_attend(
        q, basis.packed(), basis.share, groups, jitter_pool(), weights, rates, shares, key, scale, softcap or 0.0,
        threads, runs, with_error, elsewhere,
    )  # fmt: skip
    return as_sampled(found, with_error)


def rabitq_lookup(
    q: np.ndarray, basis: SignatureBasis, groups: Sequence[SignedRows], *, budget: np.ndarray, tail: float,
    key: tuple[int, int], scale: float, threads: int,
) -> list[Lookup]:  # fmt: skip
    """What is needed of each sequence by whoever scans a copy of its signatures for these queries (see `Lookup`)."""
    want_scale(scale, None)
    _want_signed(q, basis, groups, threads)
    _, shares = _want_budget(q, budget, tail, key)
    made = isa.backend().rabitq_lookup(q, basis.packed(), groups, jitter_pool(), key, scale, threads)
    starts = _starts(key, groups[0].table.kv_heads if groups else 0)
    return [
        Lookup(tables, lines, means, _factor_scale(group), starts, _subsets(group.n, of_heads.tobytes()).copy())
        for group, (tables, lines, means), of_heads in zip(groups, made, shares, strict=True)
    ]


@lru_cache(maxsize=256)
def _starts(key: tuple[int, int], kv_heads: int) -> np.ndarray:
    """`Lookup.starts` of a layer, the same in every step."""
    starts = np.array([jitter_start(key, h) for h in range(kv_heads)], dtype=np.int64)
    starts.flags.writeable = False
    return starts


def _factor_scale(group: SignedRows) -> np.ndarray:
    largest = widen(group.largest)
    scale = np.zeros_like(largest)
    np.divide(np.float32(TOP_SCORE), largest, out=scale, where=largest > 0)
    return scale


@lru_cache(maxsize=256)
def _subsets(n: int, shares: bytes) -> np.ndarray:
    """Of n rows, by the shares float64 [H] in these bytes."""
    subsets = [threshold_subset(n, share) if n else (1, 0, 0) for share in np.frombuffer(shares, dtype=np.float64)]
    return np.array(subsets, dtype=np.int64).reshape(-1, 3)


def bounds_of(subset: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Thresholds int32 [H] from those int32 [H] that subsets int64 [H, 3] have given: none or all need no scores."""
    _, size, count = subset.T
    bounds: np.ndarray = np.where(count == 0, TOP_SCORE + 1, np.where(count == size, -TOP_SCORE - 1, found))
    return bounds.astype(np.int32)


def rabitq_sample(
    q: np.ndarray,
    basis: SignatureBasis,
    groups: Sequence[SignedRows],
    *,
    budget: np.ndarray,
    tail: float,
    key: tuple[int, int],
    scale: float,
    threads: int = 1,
) -> list[list[np.ndarray]]:
    """The rows that `rabitq_attend` samples, for every sequence and query head: int64, ascending."""
    want_scale(scale, None)
    _want_signed(q, basis, groups, threads)
    rates, shares = _want_budget(q, budget, tail, key)
    rows: list[list[np.ndarray]] = isa.backend().rabitq_sample(
        q, basis.packed(), basis.share, groups, jitter_pool(), rates, shares, key, scale, threads
    )
    return rows


def rabitq_scores(
    q: np.ndarray, basis: SignatureBasis, groups: Sequence[SignedRows], *, key: tuple[int, int], scale: float,
    threads: int = 1,
) -> tuple[list[np.ndarray], np.ndarray]:  # fmt: skip
    """Scores int16 [H, n] of the rows of every sequence, and their units float32 [B, H]: ŝ and the jitter together are
    score · unit, about."""
    want_scale(scale, None)
    want_key(key)
    _want_signed(q, basis, groups, threads)
    scores, units = isa.backend().rabitq_scores(q, basis.packed(), groups, jitter_pool(), key, scale, threads)
    return scores, units


def _want_budget(q: np.ndarray, budget: np.ndarray, tail: float, key: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Rates of the uniform tail, and the shares that thresholds take, float64 [B, H], for queries that are in order."""
    want_array("budget", budget, np.float32, "B, H", q.shape[:2])
    want_tail("tail", tail, key)
    return _rates_and_shares(budget.tobytes(), budget.shape, tail)


@lru_cache(maxsize=256)
def _rates_and_shares(budget: bytes, shape: tuple[int, ...], tail: float) -> tuple[np.ndarray, np.ndarray]:
    """Of the float32 budgets in these bytes: most layers and steps have the same ones."""
    wanted = np.frombuffer(budget, dtype=np.float32).astype(np.float64).reshape(shape)
    most = float(wanted.max(initial=0))
    if wanted.size and not (wanted.min() > 0 and most <= 1):
        raise ValueError(f"budget: want more than 0, at most 1, got {wanted.min()} to {most}")
    rates = tail * wanted
    with np.errstate(invalid="ignore"):  # budget and tail both 1
        shares = (wanted - rates) / (1 - rates)
    if most == 1:
        rates[wanted == 1] = shares[wanted == 1] = 1
    rates.flags.writeable = shares.flags.writeable = False  # others will be given them
    return rates, shares


def _want_signed(q: np.ndarray, basis: SignatureBasis, groups: Sequence[SignedRows], threads: int) -> None:
    want_queries(q, None, basis.head_dim)
    want_int("threads", threads, 1)
    if len(groups) != q.shape[0]:
        raise ValueError(f"groups: want one for each of {q.shape[0]} sequences, got {len(groups)}")
    want_matching(q, [group.table for group in groups])
    for group in groups:
        if group.bits not in (None, basis.bits):
            raise ValueError(f"groups: want {basis.bits} bits, as the basis has, got {group.bits}")


def _want_reached(
    q: np.ndarray, groups: Sequence[SignedRows], reached: Sequence[Reached | None] | None
) -> list[tuple[np.ndarray, np.ndarray] | None]:
    """As the kernels take it: one for each sequence, or none at all."""
    if reached is None:
        return []
    if len(reached) != len(groups):
        raise ValueError(f"reached: want one for each of {len(groups)} sequences, got {len(reached)}")
    for group, found in zip(groups, reached, strict=True):
        if found is None:
            continue
        want_array("reached bits", found.bits, np.uint64, "H, n/64", (q.shape[1], group.n // 64))
        want_array("reached bounds", found.bounds, np.int32, "H", (q.shape[1],))
        low, high = int(found.bounds.min()), int(found.bounds.max())
        if low < -TOP_SCORE - 1 or high > TOP_SCORE + 1:
            raise ValueError(f"reached bounds: want {-TOP_SCORE - 1} to {TOP_SCORE + 1}, got {low} to {high}")
    return [None if found is None else (found.bits, found.bounds) for found in reached]
