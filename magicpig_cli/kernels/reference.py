"""Every kernel in NumPy, one screen each: what the native ones are held to, and a way to run without them.

Same names and arguments as the native modules (trusted: the door has checked them). Integer results are the same bit
for bit; floats are summed in float64, so a hash bit can differ where the projection is within rounding of zero.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from magicpig_cli.kernels.attend import Run, SampledRows
    from magicpig_cli.kernels.block import Block, Norm
    from magicpig_cli.kernels.product import Weights
    from magicpig_cli.kernels.rows import RowTable
    from magicpig_cli.kernels.segment import Segment

TIER = "reference"
MAX_LOGIT = 3e38
_CHUNK_ROWS = 4096  # rows hashed at once: bounds the float64 projections


# --- hashing -------------------------------------------------------------------------------------------------------


def pack_projection(matrix: np.ndarray, K: int, L: int) -> np.ndarray:
    """float64 [D, L·K]."""
    return matrix.astype(np.float64)


def project(x: np.ndarray, packed: np.ndarray, K: int, L: int) -> np.ndarray:
    """float32 [n, L·K] of x float32 [n, D]."""
    with np.errstate(invalid="ignore", over="ignore"):
        projected: np.ndarray = x.astype(np.float64) @ packed
        return projected.astype(np.float32)


def _codes(x: np.ndarray, packed: np.ndarray, bias: np.ndarray | float, K: int, L: int) -> np.ndarray:
    """uint16 [n, L]: bit k of table l says whether column l·K + k exceeds the bias."""
    bits = project(x, packed, K, L) > bias
    codes: np.ndarray = (bits.reshape(len(x), L, K) << np.arange(K)).sum(axis=2)
    return codes.astype(np.uint16)


def hash_rows(
    table: RowTable,
    start: int,
    stop: int,
    packed: np.ndarray,
    K: int,
    L: int,
    bias: np.ndarray,
    threads: int,
    out: np.ndarray,
    first_head: int,
) -> None:
    """Codes of the keys in rows [start, stop) into out uint16 [heads, L, n], of the kv heads from first_head on."""
    for first in range(start, stop, _CHUNK_ROWS):
        last = min(first + _CHUNK_ROWS, stop)
        keys = table.read(first, last)[:, :, 0]
        for at, h in enumerate(range(first_head, first_head + out.shape[0])):
            out[at, :, first - start : last - start] = _codes(keys[h], packed, bias[h], K, L).T


def hash_queries(q: np.ndarray, packed: np.ndarray, K: int, L: int, threads: int) -> np.ndarray:
    """uint16 [B, H, L] of q float32 [B, H, D]."""
    B, H, D = q.shape
    return _codes(q.reshape(B * H, D), packed, 0.0, K, L).reshape(B, H, L)


# --- tables --------------------------------------------------------------------------------------------------------


def join(
    parts: Sequence[Segment],
    codes: np.ndarray,
    rows: int,
    first: int,
    last: int,
    codes_from: int,
    offsets: np.ndarray,
    ids: np.ndarray,
    threads: int,
) -> None:
    """Tables [first, last), counted over heads, of segments and further rows: a stable sort of all codes by value."""
    L, K = ids.shape[1], (offsets.shape[2] - 1).bit_length() - 1
    for item in range(first, last):
        h, table = divmod(item, L)
        at = divmod(item - codes_from, L)
        known = [_table_codes(part, h, table) for part in parts]
        everything = np.concatenate([*known, *([codes[at][:rows]] if rows else [])])
        offsets[h, table] = np.concatenate([[0], np.cumsum(np.bincount(everything, minlength=2**K))])
        ids[h, table] = np.argsort(everything, kind="stable")


def _table_codes(segment: Segment, h: int, table: int) -> np.ndarray:
    """uint16 [n]: the bucket in which each id of a table stands."""
    codes = np.empty(segment.n, dtype=np.uint16)
    sizes = np.diff(segment.offsets[h, table].astype(np.int64))
    codes[segment.ids[h, table]] = np.repeat(np.arange(2**segment.K, dtype=np.uint16), sizes)
    return codes


def segment_codes(segment: Segment) -> np.ndarray:
    """uint16 [Hkv, L, n]."""
    heads, L, _ = segment.ids.shape
    return np.stack([np.stack([_table_codes(segment, h, table) for table in range(L)]) for h in range(heads)])


def truncate_segment(segment: Segment, n: int, threads: int) -> tuple[np.ndarray, np.ndarray]:
    """By definition: the tables over the first n codes."""
    codes = segment_codes(segment)[:, :, :n]
    offsets, ids = np.empty_like(segment.offsets), np.empty_like(codes)
    join((), codes, n, 0, codes.shape[0] * codes.shape[1], 0, offsets, ids, threads)
    return offsets, ids


# --- attention -----------------------------------------------------------------------------------------------------


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


def _sampled(codes: np.ndarray, group: SampledRows, h: int) -> np.ndarray:
    """Rows (int64, ascending) that share at least two of the codes uint16 [L], for kv head h."""
    found = [np.zeros(0, dtype=np.int64)]
    for segment in group.segments:
        hits = np.zeros(segment.n, dtype=np.int64)
        for table, code in enumerate(codes.tolist()):
            first, last = segment.offsets[h, table, code : code + 2].tolist()
            hits[segment.ids[h, table, first:last]] += 1
        found.append(np.flatnonzero(hits >= 2) + segment.start)
    if group.tail is not None:
        hits = (group.tail.codes[h, :, : group.tail.n] == codes[:, None]).sum(axis=0)
        found.append(np.flatnonzero(hits >= 2) + group.tail.start)
    return np.concatenate(found)


def lsh_sample(codes: np.ndarray, groups: Sequence[SampledRows], threads: int) -> list[list[np.ndarray]]:
    """Sampled rows of every sequence and query head."""
    H = codes.shape[1]
    return [
        [_sampled(codes[b, h], group, h * group.table.kv_heads // H) for h in range(H)]
        for b, group in enumerate(groups)
    ]


def _weight(q: np.ndarray, keys: np.ndarray, mu: np.ndarray, weights: np.ndarray) -> np.ndarray:
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
    scale: float,
    softcap: float,
    threads: int,
    runs: Sequence[Sequence[Run]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int, int, int], int]:
    """Output float32 [B, H, D], LSE float32 [B, H], sampled int64 [B, H], ns of retrieve, attend, window, merge, and of
    all."""
    began = time.perf_counter_ns()
    found = lsh_sample(codes, groups, threads)
    retrieved = time.perf_counter_ns()
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf, dtype=np.float32)
    for b, group in enumerate(groups):
        last = max((int(rows[-1]) + 1 for rows in found[b] if len(rows)), default=0)
        stored = group.table.read(0, last)
        for h in range(q.shape[1]):
            kv_head = h * group.table.kv_heads // q.shape[1]
            keys, values = stored[kv_head, found[b][h]].transpose(1, 0, 2)
            logits = _logits(q[b, h], keys, scale, softcap) + _weight(q[b, h], keys, group.mu[kv_head], weights)
            for table, start, stop in runs[b]:
                near = table.read(start, stop)[kv_head]
                logits = np.concatenate([logits, _logits(q[b, h], near[:, 0], scale, softcap)])
                values = np.concatenate([values, near[:, 1]])
            out[b, h], lse[b, h] = _softmax(logits, values)
    ended = time.perf_counter_ns()
    sampled = np.array([[len(rows) for rows in heads] for heads in found], dtype=np.int64).reshape(q.shape[:2])
    return out, lse, sampled, (retrieved - began, ended - retrieved, 0, 0), ended - began


# --- linear layers -------------------------------------------------------------------------------------------------


def multiply(x: np.ndarray, weights: Weights, threads: int) -> np.ndarray:
    """float32 [Σ M·N]: x float32 [M, K] times each weight, one [M, N] after the other."""
    wide = [weights.read(i).astype(np.float64) for i in range(len(weights.weights))]
    products = [weight @ row for weight in wide for row in x.astype(np.float64)]
    return np.concatenate([np.zeros(0), *products]).astype(np.float32)


def block_inputs(
    x: np.ndarray, block: Block, cosine: np.ndarray | None, sine: np.ndarray | None, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q float32 [M, H, D], k and v float32 [M, Hkv, D] of x float32 [M, E]."""
    flat = multiply(_normed(x, block.before_attention), block.qkv, threads)
    parts: list[np.ndarray] = []
    done = 0
    for outer, heads in zip(block.qkv.outer, (block.heads, block.kv_heads, block.kv_heads), strict=True):
        part = flat[len(x) * done : len(x) * (done + outer)].reshape(len(x), outer)
        if block.qkv_bias is not None:
            part = part + block.qkv_bias[done : done + outer]
        norm = {0: block.q_norm, 1: block.k_norm}.get(len(parts))
        by_head = _normed(part, norm).reshape(len(x), heads, block.head_dim)
        parts.append(by_head if len(parts) == 2 else _rotated(by_head, cosine, sine))
        done += outer
    q, k, v = parts
    return q, k, v


def _normed(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    """RMS norm of each n values of x [M, m·n], n weights."""
    if norm is None:
        return x
    wide = x.astype(np.float64).reshape(len(x), x.shape[1] // len(norm.weight), len(norm.weight))
    size = np.sqrt((wide**2).mean(axis=2, keepdims=True) + norm.eps)
    normed: np.ndarray = (wide / size * norm.weight).reshape(x.shape).astype(np.float32)
    return normed


def _rotated(x: np.ndarray, cosine: np.ndarray | None, sine: np.ndarray | None) -> np.ndarray:
    """Rotary embedding of the first R values of x [M, heads, D]."""
    if cosine is None or sine is None:
        return x
    turned, rest = x[..., : cosine.shape[1]], x[..., cosine.shape[1] :]
    first, second = np.split(turned, 2, axis=-1)
    turned = turned * cosine[:, None] + np.concatenate([-second, first], axis=-1) * sine[:, None]
    return np.concatenate([turned, rest], axis=-1)


def block_output(x: np.ndarray, attended: np.ndarray, block: Block, threads: int) -> np.ndarray:
    """The block's output float32 [M, E]."""
    added = x + _normed(multiply(attended, block.output, threads).reshape(x.shape), block.after_attention)
    both = multiply(_normed(added, block.before_mlp), block.gate_up, threads).reshape(2, len(x), block.down.inner)
    gate, up = both.astype(np.float64)
    at = gate if block.activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        gated = (gate / (1 + np.exp(-at)) * up).astype(np.float32)
    out: np.ndarray = added + _normed(multiply(gated, block.down, threads).reshape(x.shape), block.after_mlp)
    return out


# --- bandwidth -----------------------------------------------------------------------------------------------------


def read_sequential(data: np.ndarray, threads: int) -> tuple[int, float]:
    """Nanoseconds to read every byte once, from front to back, and what the reading summed up."""
    began = time.perf_counter_ns()
    total = _sum_of(data)
    return time.perf_counter_ns() - began, total


def read_rows(table: RowTable, kv_head: int, rows: np.ndarray, threads: int) -> tuple[int, float]:
    """Nanoseconds to read K and V of the listed rows, and what the reading summed up."""
    began, total = time.perf_counter_ns(), 0.0
    for row in rows.tolist():
        block, offset = divmod(row, table.block_rows)
        total += _sum_of(table.blocks[block][kv_head, offset])
    return time.perf_counter_ns() - began, total


def _sum_of(data: np.ndarray) -> float:
    """Whatever it holds, summed as float32; a rest shorter than one vector step of the kernels byte by byte."""
    raw = data.reshape(-1).view(np.int8)
    whole = raw.size // 256 * 256
    with np.errstate(all="ignore"):
        return float(raw[:whole].view(np.float32).sum()) + float(raw[whole:].sum())
