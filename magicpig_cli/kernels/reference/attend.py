"""Attention over stored rows: exactly, or over the rows that tables or signatures sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from magicpig_cli.kernels.reference.signature import Taken, tail_rows

if TYPE_CHECKING:
    from magicpig_cli.kernels.attend import Run, SampledRows
    from magicpig_cli.kernels.signature import SignedRows

MAX_LOGIT = 3e38
Elsewhere = Sequence[tuple[np.ndarray, np.ndarray] | None]  # bits uint64 [H, n/64] and thresholds int32 [H]
Estimate = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, tuple[int, int, int, int], int]


def _logits(q: np.ndarray, keys: np.ndarray, scale: float, softcap: float) -> np.ndarray:
    """float64 [n] of q [D] and keys [n, D]; soft-capped where softcap > 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        logits = scale * (keys.astype(np.float64) @ q.astype(np.float64))
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
    return np.clip(np.nan_to_num(logits, nan=-MAX_LOGIT), -MAX_LOGIT, MAX_LOGIT)


def _softmax(logits: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Output [D] and natural-log LSE of logits [n] over values [n, D]; n = 0 gives 0 and −∞."""
    if len(logits) == 0:
        return np.zeros(values.shape[1]), -np.inf
    top = logits.max()
    weights = np.exp(logits - top)
    return weights @ values.astype(np.float64) / weights.sum(), top + np.log(weights.sum())


def exact_attend(
    q: np.ndarray, runs: Sequence[Sequence[Run]], scale: float, softcap: float, threads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Output float32 [B, H, D], LSE float32 [B, H] and nanoseconds."""
    began = time.perf_counter_ns()
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, dtype=np.float32)
    for b, of_sequence in enumerate(runs):
        if not of_sequence:
            continue
        rows = np.concatenate([table.read(start, stop) for table, start, stop in of_sequence], axis=1)
        for h in range(q.shape[1]):
            keys, values = rows[h * rows.shape[0] // q.shape[1]].transpose(1, 0, 2)
            out[b, h], lse[b, h] = _softmax(_logits(q[b, h], keys, scale, softcap), values)
    return out, lse, time.perf_counter_ns() - began


# --- sampled by tables ---------------------------------------------------------------------------------------------


def _hits(codes: np.ndarray, group: SampledRows, h: int, rate: float, key: tuple[int, int]) -> np.ndarray:
    """Rows (int64, ascending) that share at least two of the codes uint16 [L], or are in the tail, for kv head h."""
    found = [np.zeros(0, dtype=np.int64)]
    for segment in group.segments:
        hits = np.zeros(segment.n, dtype=np.int64)
        for table, code in enumerate(codes.tolist()):
            first, last = segment.offsets[h, table, code : code + 2].tolist()
            hits[segment.ids[h, table, first:last]] += 1
        found.append(_or_in_tail(hits, segment.start, h, rate, key))
    if group.tail is not None:
        hits = (group.tail.codes[h, :, : group.tail.n] == codes[:, None]).sum(axis=0)
        found.append(_or_in_tail(hits, group.tail.start, h, rate, key))
    return np.concatenate(found)


def _or_in_tail(hits: np.ndarray, start: int, h: int, rate: float, key: tuple[int, int]) -> np.ndarray:
    tail = tail_rows(start + len(hits), rate, key, h)[start:]
    return np.flatnonzero((hits >= 2) | tail) + start


def lsh_sample(
    codes: np.ndarray, groups: Sequence[SampledRows], threads: int, rate: float = 0.0, key: tuple[int, int] = (0, 0)
) -> list[list[np.ndarray]]:
    """Sampled rows of every sequence and query head."""
    H = codes.shape[1]
    return [
        [_hits(codes[b, h], group, h * group.table.kv_heads // H, rate, key) for h in range(H)]
        for b, group in enumerate(groups)
    ]


def _log_weight(q: np.ndarray, keys: np.ndarray, mu: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """−ln u [n] of keys [n, D]: linear interpolation in sin(θ/2), uniform cells."""
    q, centred = q.astype(np.float64), keys.astype(np.float64) - mu
    norms = np.linalg.norm(q) * np.linalg.norm(centred, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = np.nan_to_num(np.where(norms > 0, (centred @ q) / norms, 0.0), nan=0.0)
    at = np.sqrt((1 - np.clip(cosine, -1, 1)) / 2) * (len(weights) - 1)
    weight: np.ndarray = np.interp(at, np.arange(len(weights)), weights.astype(np.float64))
    return weight


def lsh_attend(
    q: np.ndarray,
    codes: np.ndarray,
    groups: Sequence[SampledRows],
    weights: np.ndarray,
    rate: float,
    key: tuple[int, int],
    scale: float,
    softcap: float,
    threads: int,
    runs: Sequence[Sequence[Run]],
    with_error: bool,
) -> Estimate:
    """See `_estimate`."""
    began = time.perf_counter_ns()
    found = lsh_sample(codes, groups, threads, rate, key)

    def sampled(b: int, h: int, kv_head: int, keys: np.ndarray) -> tuple[np.ndarray, float]:
        return _log_weight(q[b, h], keys, groups[b].mu[kv_head], weights), rate

    return _estimate(q, groups, found, sampled, scale, softcap, runs, with_error, began)


# --- sampled by signatures -----------------------------------------------------------------------------------------


def _taken(
    q: np.ndarray, packed: np.ndarray, groups: Sequence[SignedRows], jitter: np.ndarray, rates: np.ndarray,
    shares: np.ndarray, key: tuple[int, int], scale: float, elsewhere: Elsewhere = (),
) -> list[list[Taken]]:  # fmt: skip
    H = q.shape[1]

    def of_head(b: int, h: int) -> Taken:
        there = elsewhere[b] if elsewhere else None
        given = None if there is None else (there[0][h], there[1][h])
        kv_head = h * groups[b].table.kv_heads // H
        return Taken(q[b, h], packed, groups[b], scale, rates[b, h], shares[b, h], jitter, key, kv_head, given)

    return [[of_head(b, h) for h in range(H)] for b in range(len(groups))]


def rabitq_sample(
    q: np.ndarray, packed: np.ndarray, share: float, groups: Sequence[SignedRows], jitter: np.ndarray,
    rates: np.ndarray, shares: np.ndarray, key: tuple[int, int], scale: float, threads: int,
) -> list[list[np.ndarray]]:  # fmt: skip
    """Sampled rows of every sequence and query head."""
    return [
        [of_head.rows for of_head in heads] for heads in _taken(q, packed, groups, jitter, rates, shares, key, scale)
    ]


def rabitq_attend(
    q: np.ndarray,
    packed: np.ndarray,
    share: float,
    groups: Sequence[SignedRows],
    jitter: np.ndarray,
    weights: np.ndarray,
    rates: np.ndarray,
    shares: np.ndarray,
    key: tuple[int, int],
    scale: float,
    softcap: float,
    threads: int,
    runs: Sequence[Sequence[Run]],
    with_error: bool,
    elsewhere: Elsewhere,
) -> Estimate:
    """See `_estimate`."""
    began = time.perf_counter_ns()
    taken = _taken(q, packed, groups, jitter, rates, shares, key, scale, elsewhere)
    found = [[of_head.rows for of_head in heads] for heads in taken]

    def sampled(b: int, h: int, kv_head: int, keys: np.ndarray) -> tuple[np.ndarray, float]:
        return taken[b][h].log_weight(keys, weights), taken[b][h].rate

    return _estimate(q, groups, found, sampled, scale, softcap, runs, with_error, began)


# --- what both share -----------------------------------------------------------------------------------------------


def _estimate(
    q: np.ndarray,
    groups: Sequence[SampledRows | SignedRows],
    found: list[list[np.ndarray]],
    sampled: Callable[[int, int, int, np.ndarray], tuple[np.ndarray, float]],
    scale: float,
    softcap: float,
    runs: Sequence[Sequence[Run]],
    with_error: bool,
    began: int,
) -> Estimate:
    """Output float32 [B, H, D], LSE and estimated error float32 [B, H], sampled int64 [B, H], ns of retrieve, attend,
    window, merge, and of all.

    found: sampled rows of every sequence and query head; sampled(b, h, kv head, their keys): −ln u, and the rate of the
    uniform tail.
    """
    retrieved = time.perf_counter_ns()
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, dtype=np.float32)
    error = np.zeros(q.shape[:2], dtype=np.float32)
    for b, group in enumerate(groups):
        last = max((int(rows[-1]) + 1 for rows in found[b] if len(rows)), default=0)
        stored = group.table.read(0, last)
        for h in range(q.shape[1]):
            kv_head = h * group.table.kv_heads // q.shape[1]
            keys, values = stored[kv_head, found[b][h]].transpose(1, 0, 2)
            log_u, rate = sampled(b, h, kv_head, keys)
            pi = rate + (1 - rate) * np.exp(-log_u)
            logits = _logits(q[b, h], keys, scale, softcap) + (-np.log(pi) if rate else log_u)
            for table, start, stop in runs[b]:
                near = table.read(start, stop)[kv_head]
                logits = np.concatenate([logits, _logits(q[b, h], near[:, 0], scale, softcap)])
                values = np.concatenate([values, near[:, 1]])
            o, lse[b, h] = _softmax(logits, values)
            out[b, h] = o
            if with_error and len(pi):
                weights = np.exp(logits[: len(pi)] - lse[b, h])
                error[b, h] = _relative_error(weights, pi, values[: len(pi)], o)
    ended = time.perf_counter_ns()
    counts = np.array([[len(rows) for rows in heads] for heads in found], dtype=np.int64).reshape(q.shape[:2])
    return out, lse, error, counts, (retrieved - began, ended - retrieved, 0, 0), ended - began


def _relative_error(weights: np.ndarray, pi: np.ndarray, values: np.ndarray, o: np.ndarray) -> float:
    """√(Σ w²(1−π)‖v−o‖²) / ‖o‖."""
    distances = ((values.astype(np.float64) - o) ** 2).sum(axis=1)
    variance = float((weights**2 * (1 - pi) * distances).sum())
    with np.errstate(divide="ignore"):
        return float(np.sqrt(variance) / np.linalg.norm(o)) if variance > 0 else 0.0
