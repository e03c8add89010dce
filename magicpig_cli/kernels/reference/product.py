"""Linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from magicpig_cli.kernels.product import Weights

_SMALLEST = np.float32(2.0**-100)  # a group of a vector that stays below is zero


def multiply(x: np.ndarray, weights: Weights, threads: int) -> np.ndarray:
    """float32 [Σ M·N]: x float32 [M, K] times each weight, one [M, N] after the other."""
    if weights.is_int4:
        rounded = [round_groups(row) for row in x]
        pairs = zip(weights.weights, weights.scales, strict=True)
        small = [_multiply_int4(*row, *pair) for pair in pairs for row in rounded]
        return np.concatenate([np.zeros(0, np.float32), *small])
    wide = [weights.read(i).astype(np.float64) for i in range(len(weights.weights))]
    products = [weight @ row for weight in wide for row in x.astype(np.float64)]
    return np.concatenate([np.zeros(0), *products]).astype(np.float32)


def round_groups(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [K/32, 32] and float32 step [K/32] of x [K], NaN where a group has what is no number or infinite."""
    groups = x.reshape(-1, 32)
    largest = np.abs(groups).max(axis=1)
    finite, empty = np.isfinite(largest), largest < _SMALLEST
    kept = np.where(finite & ~empty, largest, np.float32(1))
    integers = np.rint(np.where(finite & ~empty, groups.T, 0).T * (np.float32(127) / kept)[:, None])
    step = np.where(finite, np.where(empty, np.float32(0), kept / np.float32(127)), np.float32(np.nan))
    return integers.astype(np.int8), step


def _multiply_int4(integers: np.ndarray, step: np.ndarray, codes: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """float32 [N], summed as every native kernel sums it, so that all have the same bits: cyext/simd/int4.h."""
    groups, padded = len(step), -len(step) % 4
    values = _codes(codes).astype(np.int32) * integers
    dots = values.reshape(-1, groups, 2, 4, 4).sum(axis=(2, 4))  # over the two halves and neighbours: [N, K/32, 4]
    scale, minimum = factors.astype(np.float32).transpose(2, 0, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = dots.astype(np.float32) * (scale * step)[:, :, None]
        offsets = minimum * (step * integers.sum(axis=1, dtype=np.int32).astype(np.float32))
        terms = np.pad(terms, ((0, 0), (0, padded), (0, 0))).reshape(len(codes), -1, 4, 4)
        lanes = np.zeros((len(codes), 4, 4), np.float32)
        at_minimum = np.zeros((len(codes), 4), np.float32)
        for four, more in zip(
            terms.swapaxes(0, 1), np.pad(offsets, ((0, 0), (0, padded))).reshape(len(codes), -1, 4).swapaxes(0, 1),
            strict=True,
        ):  # fmt: skip
            lanes += four
            at_minimum += more
        a, b, c, d = ((lanes[:, 0] + lanes[:, 2]) + (lanes[:, 1] + lanes[:, 3])).T
        first, second = (at_minimum[:, :2] + at_minimum[:, 2:]).T
        total: np.ndarray = ((a + b) + (c + d)) + (first + second)
    return total


def _codes(packed: np.ndarray) -> np.ndarray:
    """uint8 [N, K/32, 32] of codes as they are held, [N, K/2]."""
    halves = packed.reshape(len(packed), packed.shape[1] // 16, 16)
    return np.concatenate([halves & 15, halves >> 4], axis=2)


def round_int4(values: np.ndarray, codes: np.ndarray, factors: np.ndarray, threads: int) -> None:
    """Codes [N, K/2] and factors [N, K/32, 2] of float32 [N, K]."""
    groups = values.reshape(-1, 32)
    smallest, largest = groups.min(axis=1), groups.max(axis=1)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        steps = _steps(groups - smallest[:, None], largest - smallest)
        pairs = np.stack([(largest - smallest) / steps, smallest], axis=1).astype(np.float16)
        scale, minimum = pairs.astype(np.float32).T
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        found = np.rint((groups - minimum[:, None]) * inverse[:, None]).clip(0, 15)
    halves = np.nan_to_num(found).astype(np.uint8).reshape(-1, 2, 16)
    codes[:] = (halves[:, 0] | halves[:, 1] << 4).reshape(codes.shape)
    factors[:] = pairs.reshape(factors.shape)


def _steps(above: np.ndarray, span: np.ndarray) -> np.ndarray:
    """float32 [n]: how many steps of the grid on which values [n, 32] above the smallest lie their span [n] is."""
    found, open_ = np.full(len(span), np.float32(15)), np.ones(len(span), dtype=bool)
    for steps in range(15, 0, -1):
        at = above * (np.float32(steps) / span)[:, None]
        fits = open_ & (np.abs(at - np.rint(at)) < np.float32(0.05)).all(axis=1)
        found[fits] = steps
        open_ &= ~fits
    return found


def widen_int4(codes: np.ndarray, factors: np.ndarray, out: np.ndarray, threads: int) -> None:
    """out float32 [N, K] = minimum + scale · code."""
    scale, minimum = factors.astype(np.float32).transpose(2, 0, 1)
    with np.errstate(invalid="ignore"):
        values = scale[:, :, None] * _codes(codes) + minimum[:, :, None]
    out[:] = values.reshape(out.shape)
