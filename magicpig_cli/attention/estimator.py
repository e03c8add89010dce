"""The estimators' formulas in float64 (paper section 4; DESIGN.md, "The estimator"; EVIDENCE.md section 2). NumPy only.

Tables take a key iff its code of K sign bits equals the query's in at least two of L tables; signatures iff the logit
that its sign bits tell and a jitter reach a threshold; the uniform tail takes any key with a fixed probability. This
module is the reference for whatever needs the probability of that: the kernels' tables of −ln u, predictions, tests.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from magicpig_cli.kernels import Z_HIGH, Z_LOW, rotation_share

Floats = NDArray[np.float64]

FLOOR = 1e-30  # of u: −ln u stays finite for a key opposite to the query
CELLS = 4096  # of the table of −ln u
TABLE_ERROR = 8e-6  # of −ln u read from it, K in 1..16, L in 2..1000, cos θ ≥ −0.5 (docs/decisions/001)
NORMAL_ERROR = 8e-6  # of −ln Φ read from the table of the signature sampler, z ≥ Z_LOW
_SERIES_BELOW = 0.1  # L·p; above it the closed form loses fewer than 3 of 16 digits
_BISECTIONS = 40
_FAR = 30.0  # from there on the series of the Mills ratio, within 105 / x⁸
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


# --- the uniform tail, and what a sample tells of its own error ----------------------------------------------------


def with_tail(u: ArrayLike, rate: float) -> Floats:
    """π = 1 − (1−u)(1−rate): the probability of a key that the uniform tail may take too."""
    u = np.asarray(u, dtype=np.float64)
    return rate + (1 - rate) * u


def estimated_error(weights: ArrayLike, pi: ArrayLike, values: ArrayLike, output: ArrayLike) -> Any:
    """‖õ − o‖ / ‖o‖ as the sample itself tells it: root of Σ ŵᵢ²·(1−πᵢ)·‖vᵢ−õ‖² / ‖õ‖², over sampled keys.

    Its square has the expectation of `predicted_error`'s: a key appears with probability π, and then ŵ ≈ w/π. weights
    [.., S] are the softmax weights of the sampled keys with −ln π in their logits, normalised over exact keys too; the
    rest as there, with the estimate in place of the exact output.
    """
    w, pi = np.asarray(weights, dtype=np.float64), np.asarray(pi, dtype=np.float64)
    return predicted_error(w * np.sqrt(pi), pi, values, output)


# --- signatures ----------------------------------------------------------------------------------------------------


def normal_probability(z: ArrayLike) -> Floats:
    """Φ(z), accurate far below 0 too; floor 1e-30."""
    z = np.asarray(z, dtype=np.float64)
    upper = np.array([math.erfc(x) for x in (-z / math.sqrt(2)).ravel().tolist()]).reshape(z.shape)
    return np.maximum(upper / 2, FLOOR)


def log_normal_table(cells: int = CELLS) -> NDArray[np.float32]:
    """−ln Φ(z) at uniform z from Z_LOW to Z_HIGH; float32 [cells + 1], read by linear interpolation.

    Its second derivative is below 1, so with 4,096 cells the interpolated value is within NORMAL_ERROR, float32 storage
    included. Below Z_LOW it stays at its first value, 64.
    """
    return (-np.log(normal_probability(np.linspace(Z_LOW, Z_HIGH, cells + 1)))).astype(np.float32)


def mean_alignment(bits: int, head_dim: int) -> float:
    """E[A], A = ⟨sign(P·x), P·x⟩ / |x| over rotations: each of the B terms is a coordinate of a random unit vector."""
    half = head_dim / 2
    return bits * math.exp(math.lgamma(half) - math.lgamma(half + 0.5)) / math.sqrt(math.pi)


def signature_deviation(
    q: ArrayLike, x: ArrayLike, bits: int, factors: ArrayLike | None = None, noise: float = 0.0, unit: float = 0.0
) -> Floats:
    """σ [.., N] of the estimated logits of keys with x = k − μ [.., N, D]; q [.., D] is the query times the scale.

    Given A = |x| / f the estimate's error is q's component across x times a direction that the rotations make uniform:
    σ² = (|q|² − (q·x)²/|x|²)·(B·f² − c·|x|²)/(D−1), c the `rotation_share`, both factors clamped at 0. factors [.., N]:
    f as stored, None for what it is about, |x| / E[A]. noise: variance of ⟨b, P·q⟩ by rounded look-up tables; unit:
    step of the scores, which are rounded four times.
    """
    q, x = np.asarray(q, dtype=np.float64), np.asarray(x, dtype=np.float64)
    head_dim, squares = x.shape[-1], (x**2).sum(axis=-1)
    f = np.sqrt(squares) / mean_alignment(bits, head_dim) if factors is None else np.asarray(factors, dtype=np.float64)
    along = np.einsum("...nd,...d->...n", x, q)
    across = (q**2).sum(axis=-1)[..., None] - np.divide(along**2, squares, out=np.zeros_like(along), where=squares > 0)
    spread = np.maximum(across, 0) * np.maximum(bits * f**2 - rotation_share(bits, head_dim) * squares, 0)
    deviation: Floats = np.sqrt(spread / max(head_dim - 1, 1) + noise * f**2 + unit**2 / 3)
    return deviation


def signature_probability(logits: ArrayLike, threshold: ArrayLike, deviation: ArrayLike) -> Floats:
    """u, the probability that a key of logit s is taken by a threshold τ; floor 1e-30.

    Its score is s + σ·ε + E, ε normal and E exponential with mean 1, so that u = E[min(1, exp(s − τ + σ·ε))]
    = Φ(z) + exp(s − τ + σ²/2)·Φ(−x) with z = (s − τ)/σ, x = z + σ. σ = 0: min(1, exp(s − τ)).
    """
    above = np.asarray(logits, dtype=np.float64) - np.asarray(threshold, dtype=np.float64)
    sigma = np.broadcast_to(np.asarray(deviation, dtype=np.float64), above.shape)
    with np.errstate(invalid="ignore", over="ignore"):
        z = np.divide(above, sigma, out=np.where(above >= 0, np.inf, -np.inf), where=sigma > 0)
        x = np.where(sigma > 0, z + sigma, z)
        beyond = np.exp(-(z**2) / 2) * mills_ratio(x) / math.sqrt(2 * math.pi)  # (x² − z²)/2 is the exponent
        below = np.exp(np.where(x > 0, 0, above + sigma**2 / 2)) * normal_probability(-x)
    u: Floats = np.clip(normal_probability(z) + np.where(x > 0, beyond, below), FLOOR, 1.0)
    return u


def mills_ratio(x: ArrayLike) -> Floats:
    """(1 − Φ(x)) / φ(x) of x ≥ 0, relative error below 2e-10; of x < 0 that of 0."""
    x = np.maximum(np.asarray(x, dtype=np.float64), 0)
    near = np.minimum(x, _FAR)
    upper = np.array([math.erfc(y) for y in (near / math.sqrt(2)).ravel().tolist()]).reshape(x.shape) / 2
    far = np.maximum(x, _FAR)
    series = (1 - far**-2.0 + 3 * far**-4.0 - 15 * far**-6.0) / far
    ratio: Floats = np.where(x < _FAR, upper * np.exp(near**2 / 2) * math.sqrt(2 * math.pi), series)
    return ratio


def predicted_threshold(logits: ArrayLike, deviation: ArrayLike, share: float) -> float:
    """τ at which a share of the keys [N] is expected to be taken: mean of `signature_probability` = share."""
    s, sigma = np.asarray(logits, dtype=np.float64), np.asarray(deviation, dtype=np.float64)
    low, high = float((s - 8 * sigma).min()), float((s + 8 * sigma).max()) - math.log(share)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if signature_probability(s, middle, sigma).mean() > share:
            low = middle
        else:
            high = middle
    return (low + high) / 2
