"""How far float32 results may be from float64 on the same (already rounded) inputs. The only place with tolerances.

Every bound is c·u·Σ|aᵢbᵢ| with u = 2⁻²⁴: what rounding can do to a sum of products, whatever the order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

U = 2.0**-24  # unit roundoff of float32
DOT = 32  # products over the head dim, in vector lanes
SUM = 128  # weighted sums over thousands of rows
LOGITS = 1024  # through all layers of a tiny model, blocks of keys in another order
INT8 = 0.1  # logits through all layers of a tiny model on int8 rows; measured 0.003 to 0.05, other keys give over 0.5
INT8_OUTPUT = 0.01  # of attention outputs on the demo model, the goal of int8 rows; measured: docs/decisions/003
EXP = 8  # exponential, and the tanh made of it, in ulp
INT4_FLIPS = 0.02  # of the largest value in a block: one value of a vector that is rounded the other way makes 0.004
BF16_U = 2.0**-9  # unit roundoff of bfloat16
# The signature sampler. Its probabilities are those of a Gaussian error, which the estimate's nearly is.
INCLUSION = 0.03  # of the frequency in each decile of u, over rotations; measured: docs/decisions/012
UNNORMALISED = 0.02  # relative, of the mean of Σ e^s/π and Σ e^s/π·v over rotations, beside 4 standard errors
BUDGET = 0.2  # relative, of the mean sampled ratio of 32 heads at 1 to 8% of 5,120 keys
BF16_STEP = 2.0**-7  # between neighbouring bfloat16, relative: a mean or a factor is off by half of it
SAMPLED_RATIO, PREDICTED_ERROR = 0.1, 0.25  # relative, predicted against real tables: the roadmap's
HISTOGRAM = 2e-5  # relative, of sums over keys by angle in 16,384 cells; measured 1e-5 at K = 16, 6e-7 at K = 10
# Nats per token on the demo model: measured 0.0008, 0.004 and 0.003, for its linear layers are 4-bit ones already.
KL_LIMIT = {"bfloat16": 0.005, "int8": 0.02, "int4": 0.02}
# Relative, of tiny random models: median and largest of 14 vectors of logits.
# Measured (0.020, 0.054) and (0.058, 0.147), and (0.025, 0.045) for int4 beside a float32 model of its rounded weights.
ROUNDED_LOGITS = {"bfloat16": (0.04, 0.08), "int8": (0.12, 0.25), "int4": (0.05, 0.1)}


def dot_bound(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of a [..., n, D] · b [D]."""
    return DOT * U * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))


def logit_bound(q: np.ndarray, keys: np.ndarray, scale: float, softcap: float | None) -> np.ndarray:
    """Of scale·q·k, soft-capped or not; float64 [n]."""
    bound = abs(scale) * dot_bound(keys, q) + DOT * U
    return bound + EXP * U * softcap if softcap else bound


def attention_bounds(logits: np.ndarray, logit_error: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Of the softmax output [D] and of the LSE, where each logit [n] may be off by logit_error [n]; values [n, D]."""
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    # exp(x − top) also carries the rounding of x − top itself
    relative = logit_error + U * (EXP + np.abs(logits - logits.max()) + np.abs(logits))
    spread = weights @ relative
    out = weights @ ((relative + spread + SUM * U)[:, None] * np.abs(values.astype(np.float64)))
    top = np.abs(logits).max()
    return out, float(spread + U * (SUM + top + np.log(len(logits))))


def weight_bound(cosine: np.ndarray, cosine_error: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of −ln u read from `weights` at sin(θ/2), where the cosine may be off by cosine_error."""
    cells = len(weights) - 1

    def read(c: np.ndarray) -> np.ndarray:
        at = np.sqrt((1 - np.clip(c, -1, 1)) / 2) * cells
        return np.interp(at, np.arange(cells + 1), weights.astype(np.float64))

    error = cosine_error + EXP * U
    here, above, below = read(cosine), read(cosine + error), read(cosine - error)
    return (
        np.maximum(np.abs(above - here), np.abs(below - here))
        + U * (EXP + cells * EXP * slope(weights))
        + U * np.abs(here)
    )


def jittered_bound(
    above: np.ndarray, sigma: np.ndarray, off: np.ndarray, relative: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Of −ln u of a score with jitter, where s − τ may be off by `off` and σ by `relative` of itself.

    ln u = ln E[min(1, exp(s − τ + σε))] has a slope of at most 1 over s − τ, and of at most 1 + σ over σ: by Stein's
    lemma that of u is σ·E[exp(…); … < 0] − φ(z), and φ(z) ≤ (1 + |z|)·u where |z| < σ, φ(z) ≤ u elsewhere. Then
    rounding of positions in the table of −ln Φ `weights`, and of exponents, which are (x² − z²)/2 or s − τ."""
    moved = off + (1 + sigma) * sigma * relative
    x = np.clip(above / sigma + sigma, 0, 11)
    exponents = np.minimum(np.abs(above), 70) + x**2 + sigma
    return np.nan_to_num(moved + U * (DOT * exponents + len(weights) * EXP * slope(weights)), posinf=np.inf)


def deviation_error(q: np.ndarray, x: np.ndarray, f: np.ndarray, bits: int, sigma: np.ndarray) -> np.ndarray:
    """Relative, of the σ [n] of signatures with factors f: a difference of squares on either side of a product."""
    squares, norm = (x**2).sum(axis=1), float(q @ q)
    terms, products = bits * f**2 + squares, np.abs(x) @ np.abs(q)
    off = norm * DOT * U + 2 * DOT * U * products**2 / np.where(squares > 0, squares, 1)
    part = off * terms + norm * terms * DOT * U
    return np.where(sigma > 0, part / max(x.shape[1] - 1, 1) / np.maximum(sigma**2, 1e-300), 0)


def factor_bound(factors: np.ndarray) -> np.ndarray:
    """Of the factor of a signature: two sums, rounded to bfloat16."""
    return (BF16_STEP / 2 + 4 * DOT * U) * np.abs(factors)


def close_error(got: Any, wanted: Any, weights: Any, log_error: Any, distances: Any, sizes: Any, norm: float) -> bool:
    """Whether an estimated error is `wanted`, whose weights [n] may be off by log_error [n] each, relative; sizes [n]
    are |v|² + |out|², of which ‖v − out‖² is what remains."""
    relative = 2 * np.max(np.asarray(log_error), initial=0) + SUM * U
    slack = np.sum(np.asarray(weights) ** 2 * (SUM * U * np.asarray(sizes) + relative * np.asarray(distances)))
    return bool(abs(got**2 - wanted**2) <= slack / norm**2 + 2 * relative * wanted**2)


def slope(weights: np.ndarray) -> float:
    """Largest step between neighbouring cells: the position within a cell is known to u·cells."""
    return float(np.abs(np.diff(weights.astype(np.float64))).max())


def close_attention(out: Any, wanted: Any, rows: Any) -> bool:
    """Whether attention out [H, T, D] is `wanted` (float64) within rounding, over rows [Hkv, n, 2, D] of order 1."""
    out, wanted, rows = (np.asarray(x, dtype=np.float64) for x in (out, wanted, rows))
    largest = np.abs(rows[:, :, 1]).max(axis=1).repeat(out.shape[0] // rows.shape[0], axis=0)
    return bool((np.abs(out - wanted) <= SUM * 4 * U * largest[:, None]).all())


def close_logits(logits: Any, wanted: Any) -> bool:
    """Whether two float32 logit vectors [V] of one model differ by rounding only, measured at the largest of them."""
    logits, wanted = (np.asarray(x, dtype=np.float64) for x in (logits, wanted))
    return bool(np.abs(logits - wanted).max() <= LOGITS * U * np.abs(wanted).max())


def close_through_int8(logits: Any, wanted: Any) -> bool:
    """Whether logits [n, V] on int8 rows are those on float32 rows, up to INT8 of their length."""
    logits, wanted = (np.asarray(x, dtype=np.float64) for x in (logits, wanted))
    return bool((np.linalg.norm(logits - wanted, axis=-1) <= INT8 * np.linalg.norm(wanted, axis=-1)).all())


def close_int8_rows(rows: Any, wanted: Any, *, roundings: int) -> bool:
    """Whether rows [..., D] are `wanted` up to this many roundings to int8 (half a scale per element) and bfloat16."""
    rows, wanted = (np.asarray(x, dtype=np.float64) for x in (rows, wanted))
    bound = rows.shape[-1] ** 0.5 * np.linalg.norm(wanted, axis=-1) * roundings * (0.5 / 127 + BF16_U)
    return bool((np.linalg.norm(rows - wanted, axis=-1) <= bound).all())


def close_product(got: Any, wanted: Any, sizes: Any) -> bool:
    """Whether a product [M, N] is `wanted` up to rounding, sizes [M, N] being Σ|aᵢbᵢ|."""
    got, wanted, sizes = (np.asarray(x, dtype=np.float64) for x in (got, wanted, sizes))
    return bool((np.abs(got - wanted) <= DOT * U * (2 * sizes + np.abs(wanted))).all())


def close_block(got: Any, wanted: Any) -> bool:
    """Whether vectors [..., n] that have come through products, norms and gates differ by rounding only.

    Measured at the largest value of all, since what cancels in one place has been as large as in the others.
    """
    got, wanted = (np.asarray(x, dtype=np.float64) for x in (got, wanted))
    return bool((np.abs(got - wanted) <= LOGITS * U * np.abs(wanted).max()).all())


def close_int4_block(got: Any, wanted: Any) -> bool:
    """The same where products round their vectors: up to a few values that became the next integer."""
    got, wanted = (np.asarray(x, dtype=np.float64) for x in (got, wanted))
    return bool((np.abs(got - wanted) <= INT4_FLIPS * np.abs(wanted).max()).all())


def close_to_float32(got: Any, wanted: Any, form: str) -> bool:
    """Whether logits [steps, V] over weights of a tiny random model rounded to `form` follow those of float32.

    Random weights with standard deviation 0.2 amplify every rounding; trained ones are held to the KL divergence.
    """
    got, wanted = (np.asarray(x, dtype=np.float64) for x in (got, wanted))
    error = np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    return bool(np.median(error) <= ROUNDED_LOGITS[form][0] and error.max() <= ROUNDED_LOGITS[form][1])
