"""Signatures of rows, the scores that a query gives them, and which rows that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from magicpig_cli.kernels.jitter import head_seed, jitter_start
from magicpig_cli.kernels.reference.rows import nearest_bfloat16
from magicpig_cli.kernels.rows import widen
from magicpig_cli.kernels.signature_shape import (
    JITTER_NATS,
    JITTER_ROWS,
    SIGNATURE_GROUP,
    SIGNATURE_ROWS,
    TOP_SCORE,
    Z_HIGH,
    Z_LOW,
    rotation_share,
    threshold_subset,
)

if TYPE_CHECKING:
    from magicpig_cli.kernels.rows import RowTable
    from magicpig_cli.kernels.signature import SignedRows

MOST = 31  # of a cell of the look-up tables: eight of them fit in a byte
LEAST_LIKELY = 200.0  # −ln of what counts as nothing
ROUNDING = 8  # units that a score may be off by, at most


def pack_basis(matrix: np.ndarray) -> np.ndarray:
    """float64 [bits, D]."""
    return matrix.astype(np.float64)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """bfloat16 bits of finite numbers, rounded to nearest even; what is not finite becomes 0."""
    return nearest_bfloat16(np.where(np.isfinite(x), x, 0).astype(np.float32))


def sign_rows(
    table: RowTable,
    start: int,
    stop: int,
    packed: np.ndarray,
    codes: np.ndarray,
    factors: np.ndarray,
    means: np.ndarray,
    threads: int,
) -> None:
    """Signatures of the keys in rows [start, stop) into codes, factors and means (see SignatureBlock)."""
    for cell in range((stop - start) // SIGNATURE_ROWS):
        first = start + cell * SIGNATURE_ROWS
        keys = table.read(first, first + SIGNATURE_ROWS)[:, :, 0]  # [Hkv, 256, D]
        with np.errstate(invalid="ignore", over="ignore"):
            means[:, cell] = to_bfloat16((keys.astype(np.float64).sum(axis=1) / SIGNATURE_ROWS).astype(np.float32))
            x = (keys - widen(means[:, cell])[:, None]).astype(np.float64)
            projected = x @ packed.T  # [Hkv, 256, bits]
            size = np.abs(projected).sum(axis=2)
            factor = np.divide((x**2).sum(axis=2), size, out=np.zeros_like(size), where=size > 0)
            factors[:, cell * SIGNATURE_ROWS : (cell + 1) * SIGNATURE_ROWS] = to_bfloat16(factor.astype(np.float32))
        nibbles = ((projected > 0).reshape(*projected.shape[:2], -1, 4) << np.arange(4)).sum(axis=3)
        halves = nibbles.reshape(len(nibbles), SIGNATURE_ROWS // SIGNATURE_GROUP, 2, 16, -1).astype(np.uint8)
        groups = slice(cell * SIGNATURE_ROWS // SIGNATURE_GROUP, (cell + 1) * SIGNATURE_ROWS // SIGNATURE_GROUP)
        codes[:, groups] = (halves[:, :, 0] | halves[:, :, 1] << 4).swapaxes(2, 3)


def look_up_tables(projected: np.ndarray) -> tuple[np.ndarray, float, float]:
    """⟨b, projected⟩ by nibbles of b is step·Σ table[j, nibble j] + offset, about.

    Returns table uint8 [bits/4, 16], at most MOST; step; offset."""
    projected = np.where(np.isfinite(projected), projected, 0).reshape(-1, 4)
    signs = (np.arange(16)[:, None] >> np.arange(4) & 1) * 2 - 1  # of the bits of each nibble
    half = np.abs(projected).sum(axis=1)
    step = 2 * half.max() / MOST
    table = np.rint((signs @ projected.T + half) / (step or 1.0)).T
    return table.astype(np.uint8), step, -half.sum()


class Scores:
    """Scores int16 [n] of the rows of one sequence and query head: estimated logits and jitter in units of `unit`."""

    def __init__(
        self, q: np.ndarray, packed: np.ndarray, group: SignedRows, jitter: np.ndarray, key: tuple[int, int], h: int
    ) -> None:
        """q float64 [D], times the scale of the logits; h: kv head."""
        table, step, offset = look_up_tables(packed @ q)
        self.table = table
        codes = _concatenate([block.codes[h] for block in group.blocks], (0, len(table), 16))
        self.factors = widen(_concatenate([block.factors[h] for block in group.blocks], (0,))).astype(np.float64)
        self.means = widen(_concatenate([block.means[h] for block in group.blocks], (0, len(q)))).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            of_means = np.nan_to_num(self.means @ q, nan=0.0, posinf=0.0, neginf=0.0)
        self.noise = len(table) * step**2 / 12  # variance of step·Σ table, by its rounding
        pairs = np.stack([codes & 15, codes >> 4], axis=1)  # [n/32, 2, bits/4, 16]
        sums = table[np.arange(len(table))[:, None], pairs].sum(axis=2, dtype=np.int64).reshape(-1)
        self.jitter = jitter[(jitter_start(key, h) + np.arange(len(sums))) % JITTER_ROWS].astype(np.int64)
        self.unit, self.values = self._scored(sums, step, offset, of_means, len(table))

    def _scored(
        self, sums: np.ndarray, step: float, offset: float, of_means: np.ndarray, nibbles: int
    ) -> tuple[float, np.ndarray]:
        """The unit, and factors·(step·sums + offset) + q·μ + jitter in it, by products of 16 bits as the kernels make
        them."""
        centre, largest = -offset / (step or 1.0), self.factors.max(initial=0)
        farthest = nibbles / 2 + centre  # that a sum is from the centre
        lift = 1 << math.floor(math.log2(TOP_SCORE / farthest))
        part = largest * step / lift * 32768 / TOP_SCORE  # of a product of a sum and a factor
        most = np.abs(of_means).max(initial=0) + largest * step * farthest
        unit = max((most + JITTER_NATS) / (TOP_SCORE - ROUNDING), part)
        per_share = np.float32(TOP_SCORE) / np.float32(largest or 1.0)  # what a device has too (`Lookup.factor_scale`)
        shares = np.rint(self.factors.astype(np.float32) * per_share).astype(np.int64)
        of_jitter = round(JITTER_NATS / TOP_SCORE / unit * 32768)
        self.line = lift, round(centre * lift), min(round(part / unit * 32768), TOP_SCORE), of_jitter
        self.of_means = np.rint(of_means / unit).astype(np.int16)
        product = _product(_product(lift * sums - self.line[1], shares), self.line[2])
        jittered = self.of_means.astype(np.int64).repeat(SIGNATURE_ROWS) + _product(self.jitter, of_jitter)
        return unit, (product + jittered).astype(np.int16)


def _product(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    """a·b / 2^15, rounded."""
    rounded: np.ndarray = ((a * b >> 14) + 1) >> 1
    return rounded


def _concatenate(arrays: Sequence[np.ndarray], empty: tuple[int, ...]) -> np.ndarray:
    """Arrays one after another; of shape `empty` if there are none."""
    return np.concatenate(arrays) if arrays else np.zeros(empty, dtype=np.uint8)


def threshold(scores: np.ndarray, share: float) -> int:
    """The score that a share of the rows reaches, from every so-manieth of them: int16, above all if none is to be
    taken, below all if all are."""
    if len(scores) == 0:
        return TOP_SCORE + 1
    stride, size, count = threshold_subset(len(scores), share)
    if count in (0, size):
        return -TOP_SCORE - 1 if count else TOP_SCORE + 1
    return int(np.sort(scores[::stride])[-count])


def tail_rows(n: int, rate: float, key: tuple[int, int], kv_head: int) -> np.ndarray:
    """bool [n]: rows of the uniform tail, those whose 32-bit hash is below rate·2³². The same for every query head."""
    seed = head_seed(key, kv_head)
    x = (np.arange(n, dtype=np.uint64) + (seed & 0xFFFFFFFF)) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint64(shift)
        x = x * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(16)
    tail: np.ndarray = x ^ np.uint64(seed >> 32) < np.uint64(math.floor(rate * 2**32))
    return tail


def rabitq_scores(
    q: np.ndarray, packed: np.ndarray, groups: Sequence[SignedRows], jitter: np.ndarray, key: tuple[int, int],
    scale: float, threads: int,
) -> tuple[list[np.ndarray], np.ndarray]:  # fmt: skip
    """Scores int16 [H, n] of every sequence, and their units float32 [B, H]."""
    found = [[_scores(q[b, h], packed, group, jitter, key, scale, h, q.shape[1]) for h in range(q.shape[1])]
             for b, group in enumerate(groups)]  # fmt: skip
    units = np.array([[of_head.unit for of_head in heads] for heads in found], dtype=np.float32)
    return [np.stack([of_head.values for of_head in heads]) for heads in found], units.reshape(q.shape[:2])


def _scores(
    q: np.ndarray, packed: np.ndarray, group: SignedRows, jitter: np.ndarray, key: tuple[int, int], scale: float,
    h: int, heads: int,
) -> Scores:  # fmt: skip
    return Scores(q.astype(np.float64) * scale, packed, group, jitter, key, h * group.table.kv_heads // heads)


def rabitq_lookup(
    q: np.ndarray, packed: np.ndarray, groups: Sequence[SignedRows], jitter: np.ndarray, key: tuple[int, int],
    scale: float, threads: int,
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:  # fmt: skip
    """What the scores of each sequence are made of beside signatures: look-up tables uint8 [H, nibbles, 16], lift,
    centre, share and share of the jitter int32 [H, 4], scores of the means int16 [H, cells]."""
    parts = []
    for b, group in enumerate(groups):
        heads = [_scores(q[b, h], packed, group, jitter, key, scale, h, q.shape[1]) for h in range(q.shape[1])]
        tables = np.stack([of_head.table for of_head in heads])
        lines = np.array([of_head.line for of_head in heads], dtype=np.int32)
        parts.append((tables, lines, np.stack([of_head.of_means for of_head in heads])))
    return parts


class Taken:
    """The rows of one sequence and query head that are sampled, and what their weights depend on."""

    def __init__(
        self, q: np.ndarray, packed: np.ndarray, group: SignedRows, scale: float, rate: float, share: float,
        jitter: np.ndarray, key: tuple[int, int], h: int, elsewhere: tuple[np.ndarray, int] | None = None,
    ) -> None:  # fmt: skip
        """q [D]; rate of the uniform tail; share of the rows that the threshold is to take; h: kv head; elsewhere: the
        rows that reach the threshold as bits uint64 [n/64], and the threshold, where somebody else has compared."""
        self._q, (self._bits, D) = q.astype(np.float64) * scale, packed.shape
        self._share = rotation_share(self._bits, D)
        self.scores = Scores(self._q, packed, group, jitter, key, h)
        values = self.scores.values.astype(np.int64)
        bound = threshold(self.scores.values, share) if elsewhere is None else int(elsewhere[1])
        reached = values >= bound
        if elsewhere is not None and abs(bound) <= TOP_SCORE:
            reached = np.unpackbits(elsewhere[0].astype("<u8").view(np.uint8), bitorder="little").astype(bool)
        self.rate = 1.0 if bound < -TOP_SCORE else rate
        self.tau = math.inf if bound > TOP_SCORE else (bound - 0.5) * self.scores.unit
        self.rows = np.flatnonzero(reached | tail_rows(len(values), self.rate, key, h))

    def log_weight(self, keys: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """−ln u [n] of the sampled keys [n, D]."""
        f, mu = self.scores.factors[self.rows], self.scores.means[self.rows // SIGNATURE_ROWS]
        s = keys.astype(np.float64) @ self._q
        x = keys.astype(np.float64) - mu
        along, squares = x @ self._q, (x**2).sum(axis=1)
        across = self._q @ self._q - np.divide(along**2, squares, out=np.zeros_like(along), where=squares > 0)
        spread = np.maximum(across, 0) * np.maximum(self._bits * f**2 - self._share * squares, 0)
        variance = spread / max(len(self._q) - 1, 1) + self.scores.noise * f**2 + self.scores.unit**2 / 3
        return jittered_log_weight(s - self.tau, np.sqrt(variance), weights)


def jittered_log_weight(above: np.ndarray, sigma: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """−ln u of keys whose logits are `above` = s − τ, from −ln Φ (`estimator.signature_probability`).

    u = Φ(z) + exp(above + σ²/2)·Φ(−x), z = above / σ, x = z + σ; where x > 0 the exponent is (x² − z²)/2."""
    with np.errstate(invalid="ignore", over="ignore"):
        z = above / sigma
        x = z + sigma
        exponent = np.where(x > 0, (np.minimum(x, -Z_LOW) ** 2 - z**2) / 2, above + sigma**2 / 2)
        by_score, by_jitter = read_log_normal(z, weights), read_log_normal(-x, weights) - exponent
    by_jitter = np.where(by_jitter < LEAST_LIKELY, by_jitter, LEAST_LIKELY)
    weight: np.ndarray = np.maximum(-np.logaddexp(-by_score, -by_jitter), 0)
    return weight


def read_log_normal(z: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """−ln Φ(z) from a table over uniform cells of z."""
    cells = len(weights) - 1
    at = (np.clip(np.nan_to_num(z, nan=Z_LOW), Z_LOW, Z_HIGH) - Z_LOW) * (cells / (Z_HIGH - Z_LOW))
    weight: np.ndarray = np.interp(at, np.arange(cells + 1), weights.astype(np.float64))
    return weight
