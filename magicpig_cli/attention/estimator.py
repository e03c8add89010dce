"""The LSH estimator's formulas in float64 (paper section 4; DESIGN.md, "The estimator"). NumPy only.

A key is sampled iff its code of K sign bits equals the query's in at least two of L tables. This module is the
reference for whatever needs the probability of that: the kernels' table of −ln u, predictions of quality, tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FLOOR = 1e-30  # of u: −ln u stays finite for a key opposite to the query
CELLS = 4096  # of the table of −ln u
TABLE_ERROR = 8e-6  # of −ln u read from it, K in 1..16, L in 2..1000, cos θ ≥ −0.5 (docs/decisions/001)
_SERIES_BELOW = 0.1  # L·p; above it the closed form loses fewer than 3 of 16 digits
_TERMS = 12  # each is below 0.1/3 of the one before: the rest is below 1e-16 of the sum


def inclusion_probability(cos: ArrayLike, K: int, L: int) -> Floats:
    """u, the probability that a key is sampled, from the cosine of its angle to the query (after centring).

    p = (1 − θ/π)^K is the collision probability in one table, u = 1 − (1−p)^L − L·p·(1−p)^(L−1). Cosines that
    rounding has put outside [−1, 1] count as ±1. Same shape as cos, in [1e-30, 1]; relative error below 1e-12, and
    1e-8 where cos θ < −0.999.
    """
    return inclusion_at_angle(np.arccos(np.clip(np.asarray(cos, dtype=np.float64), -1.0, 1.0)), K, L)


def inclusion_at_angle(theta: Floats, K: int, L: int) -> Floats:
    """u at angles in [0, π]."""
    with np.errstate(divide="ignore", invalid="ignore"):  # p = 0 and p = 1 have infinite logarithms
        log_hit = K * np.log1p(-theta / np.pi)  # ln p
        p = np.exp(log_hit)
        log_miss = np.where(p < 0.5, np.log1p(-p), np.log(-np.expm1(log_hit)))  # ln (1 − p)
    closed = -np.expm1(L * log_miss) - L * p * np.exp((L - 1) * log_miss)
    u = np.where(L * p < _SERIES_BELOW, _series(np.minimum(p, _SERIES_BELOW / L), L), closed)
    return np.clip(u, FLOOR, 1.0)


def _series(p: Floats, L: int) -> Floats:
    """Σ_{j≥2} C(L,j)·p^j·(1−p)^(L−j) for L·p ≤ 0.1: where p is small the closed form subtracts 1 from nearly 1."""
    term = L * (L - 1) / 2 * p**2 * np.exp((L - 2) * np.log1p(-p))
    total = np.array(term)
    for j in range(2, min(L, _TERMS)):
        term = term * ((L - j) / (j + 1)) * p / (1 - p)
        total += term
    return total


def half_angle_grid(cells: int = CELLS) -> Floats:
    """The angles at which s = sin(θ/2) is 0, 1/cells, … 1: float64 [cells + 1], ascending from 0 to π."""
    grid: Floats = 2 * np.arcsin(np.linspace(0.0, 1.0, cells + 1))
    return grid


def collision_probability(theta: Floats, K: int) -> Floats:
    """p = (1 − θ/π)^K, the probability that codes of K bits agree at angles in [0, π]."""
    return (1 - theta / np.pi) ** K


def log_weight_table(K: int, L: int, cells: int = CELLS) -> NDArray[np.float32]:
    """−ln u at s = sin(θ/2) = √((1 − cos θ)/2) of 0, 1/cells, … 1; float32 [cells + 1], read by linear interpolation.

    Over s the function is smooth where θ → 0, over cos θ its slope is infinite there. With 4,096 cells the
    interpolated value is within TABLE_ERROR, float32 storage included.
    """
    return (-np.log(inclusion_at_angle(half_angle_grid(cells), K, L))).astype(np.float32)


def cosine(queries: ArrayLike, keys: ArrayLike) -> Floats:
    """Cosines of the angles between queries [.., D] and keys [.., D] (broadcast); 0, a right angle, for a zero norm."""
    q, k = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    norms = np.linalg.norm(q, axis=-1) * np.linalg.norm(k, axis=-1)
    dots = np.einsum("...d,...d->...", q, k)
    cos: Floats = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
    return cos


def predicted_ratio(cos: ArrayLike, K: int, L: int) -> Any:
    """Expected share of sampled keys: mean of u over the offloaded keys [.., N] → float64 [..]."""
    return inclusion_probability(cos, K, L).mean(axis=-1)


def predicted_error(weights: ArrayLike, u: ArrayLike, values: ArrayLike, output: ArrayLike) -> Any:
    """Predicted ‖õ − o‖ / ‖o‖ of the merged output: root of Σ wᵢ²·(1−uᵢ)/uᵢ·‖vᵢ−o‖² / ‖o‖², over offloaded keys.

    First-order variance of the self-normalised estimator, keys taken as independent (measured: 1.2–1.3 times this,
    EVIDENCE.md section 2). weights [.., N] are softmax weights over sink, window and offloaded keys together, of which
    only the offloaded are passed; u [.., N]; values [.., N, D]; output [.., D] is the exact output → float64 [..],
    infinite where the exact output is zero and the estimate is not.
    """
    w, u = np.asarray(weights, dtype=np.float64), np.asarray(u, dtype=np.float64)
    o = np.asarray(output, dtype=np.float64)
    distances = np.sum((np.asarray(values, dtype=np.float64) - o[..., None, :]) ** 2, axis=-1)
    error = np.sqrt(np.sum(w**2 * (1 - u) / u * distances, axis=-1))
    norm = np.linalg.norm(o, axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error > 0, error / norm, 0.0)
