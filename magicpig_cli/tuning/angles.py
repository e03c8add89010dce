"""Histograms over the angle between queries and keys, from which ratio, error and work of every (K, L) follow at once.

With s = sin(θ/2), u depends on s alone for given K and L, so Σᵢ xᵢ·f(sᵢ) over millions of keys is a product of two
short vectors once the xᵢ lie in a histogram over s. Every xᵢ is split between the two nodes next to sᵢ: the product is
then what linear interpolation of f between the nodes gives (docs/decisions/001 has the error of that).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from magicpig_cli.attention.estimator import (
    Floats,
    collision_probability,
    half_angle_grid,
    inclusion_at_angle,
)
from magicpig_cli.tuning.capture import Capture, Layer

# Between nodes. (1 − u)/u bends more than the kernels' −ln u, most where a key is far from the query: the predicted
# error over keys of a random model was off by 2e-4 with 4,096 cells and is by 1e-5 with these at K = 16, by 6e-7 at 10.
CELLS = 16_384
_THETA = half_angle_grid(CELLS)  # of the nodes


@dataclass(frozen=True, slots=True)
class Angles:
    """Offloaded keys of one layer by angle, summed over the (query head, step) pairs of one depth."""

    keys: Floats  # number of keys, float64 [CELLS + 1]
    error: Floats  # Σ w²·‖v−o‖²/‖o‖² (DESIGN.md, "Predicted quality"), float64 [CELLS + 1]
    pairs: int

    def __add__(self, other: Angles) -> Angles:
        return Angles(self.keys + other.keys, self.error + other.error, self.pairs + other.pairs)


@dataclass(frozen=True, slots=True)
class TableCurve:
    """What a key at each node costs and does for one (K, L): float64 [CELLS + 1] each."""

    u: Floats  # probability of being sampled
    odds: Floats  # (1 − u) / u
    visits: Floats  # expected number of the L tables that list it under the query's code

    @classmethod
    def of(cls, K: int, L: int) -> TableCurve:
        u = inclusion_at_angle(_THETA, K, L)
        return cls(u, (1 - u) / u, L * collision_probability(_THETA, K))

    def ratio(self, angles: Angles) -> float:
        """Expected Σ sampled / Σ offloaded."""
        return float(angles.keys @ self.u / angles.keys.sum())

    def error(self, angles: Angles) -> float:
        """Predicted error of the layer: RMS over its (query head, step) pairs."""
        return float(np.sqrt(angles.error @ self.odds / angles.pairs))

    def sampled(self, angles: Angles) -> float:
        """Expected keys sampled by one query head at one step."""
        return float(angles.keys @ self.u / angles.pairs)

    def visited(self, angles: Angles) -> float:
        """Expected ids counted by one query head at one step, over all tables."""
        return float(angles.keys @ self.visits / angles.pairs)


def measure_angles(capture: Capture, layer: Layer) -> list[Angles]:
    """One histogram per depth of the capture. All arithmetic is float64, on the rows as they are stored."""
    per_depth = []
    for depth, (length, offloaded) in enumerate(zip(capture.lengths, capture.offloaded, strict=True)):
        middle = slice(capture.sink, capture.sink + offloaded)
        rows = layer.rows[:, : length + capture.steps]
        heads = [
            _one_head(layer, depth, head, rows[head].double(), middle, length) for head in range(rows.shape[0])
        ]  # fmt: skip
        per_depth.append(total(heads))
    return per_depth


def total(parts: Iterable[Angles]) -> Angles:
    """All of them together."""
    first, *others = parts
    for other in others:
        first = first + other
    return first


def _one_head(layer: Layer, depth: int, head: int, rows: torch.Tensor, middle: slice, length: int) -> Angles:
    """One KV head and its G query heads at one depth; rows float64 [n, 2, D]."""
    steps, group = layer.q.shape[1], layer.q.shape[2] // layer.rows.shape[0]
    q = layer.q[depth, :, head * group : (head + 1) * group].double().flatten(0, 1)  # [S·G, D], step by step
    keys, values = rows.unbind(dim=1)
    weights = _softmax(layer, q @ keys.T, length, steps)
    outputs = weights @ values
    spread = values.square().sum(-1) - 2 * outputs @ values.T + outputs.square().sum(-1, keepdim=True)  # ‖v−o‖²
    share = weights.square() * spread.clamp_min(0) / outputs.square().sum(-1, keepdim=True)
    s = _half_angles(q, keys[middle])
    return Angles(_histogram(s, None), _histogram(s, share[:, middle]), len(q))


def _softmax(layer: Layer, dots: torch.Tensor, length: int, steps: int) -> torch.Tensor:
    """Weights [S·G, n] of dots q·k: step s sees the first length + s + 1 tokens."""
    logits = dots * layer.rule.scale
    if layer.rule.softcap is not None:
        logits = layer.rule.softcap * torch.tanh(logits / layer.rule.softcap)
    seen = length + 1 + torch.arange(steps).repeat_interleave(len(dots) // steps)
    logits.masked_fill_(torch.arange(dots.shape[1]) >= seen[:, None], -torch.inf)
    return logits.softmax(dim=-1)


def _half_angles(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """s = sin(θ/2) in [0, 1] of queries [R, D] and keys [n, D] centred on their mean; a zero norm has θ = π/2."""
    centred = keys - keys.mean(dim=0)
    norms = q.norm(dim=-1, keepdim=True) * centred.norm(dim=-1)
    cos = torch.where(norms > 0, q @ centred.T / norms, 0.0)
    return ((1 - cos.clamp(-1, 1)) / 2).sqrt()


def _histogram(s: torch.Tensor, weights: torch.Tensor | None) -> Floats:
    """Weights (None = 1 each) split between the nodes on both sides of s, in proportion."""
    at = s.numpy().ravel() * CELLS
    left = np.minimum(at.astype(np.int64), CELLS - 1)
    right_share = at - left
    w = np.ones_like(at) if weights is None else weights.numpy().ravel()
    return _counts(left, w * (1 - right_share)) + _counts(left + 1, w * right_share)


def _counts(nodes: np.ndarray, weights: Floats) -> Floats:
    counts: Any = np.bincount(nodes, weights, CELLS + 1)  # its type says integers, which is so without weights
    return np.asarray(counts, dtype=np.float64)
