"""What the signature sampler would do with the captured queries, in closed form.

Thresholds are those of one draw of the scores, s + σ·ε + E, as a kernel takes them from one rotation; everything else
is an expectation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli.attention.estimator import Floats, mean_alignment
from magicpig_cli.kernels import SIGNATURE_ROWS, rotation_share
from magicpig_cli.tuning.capture import Capture, Layer

BUDGETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
_STEPS = 4  # of each depth: every one costs a pass over all keys for each budget
_TINY = 1e-30
_LEAST = 1e-6  # nats, of a deviation that is none


@dataclass(frozen=True, slots=True)
class SignatureQuality:
    """Sums of one layer over (query head, step) pairs at one budget."""

    sampled: float  # expected keys
    keys: float
    squares: float  # predicted relative error, squared
    pairs: int

    def __add__(self, other: SignatureQuality) -> SignatureQuality:
        return SignatureQuality(
            self.sampled + other.sampled, self.keys + other.keys, self.squares + other.squares,
            self.pairs + other.pairs,
        )  # fmt: skip

    @property
    def ratio(self) -> float:
        return self.sampled / self.keys

    @property
    def error(self) -> float:
        return float((self.squares / self.pairs) ** 0.5)


def measure_signatures(
    capture: Capture, layer: Layer, bits: int, tail: float, budgets: Iterable[float] = BUDGETS,
    shares: Sequence[float] | None = None,
) -> dict[float, SignatureQuality]:  # fmt: skip
    """By budget, what is expected of one layer over all depths; float64. shares: of the budget, by query head."""
    found: dict[float, SignatureQuality] = {}
    for head, pair in _pairs(capture, layer, bits):
        for budget in budgets:
            quality = pair.quality(min(budget * shares[head], 1.0) if shares else budget, tail)
            found[budget] = found[budget] + quality if budget in found else quality
    return found


def squared_errors(capture: Capture, layer: Layer, bits: int, tail: float, budget: float) -> Floats:
    """Expected squared relative error of each query head [H] at one budget: the mean over depths and steps."""
    squares: list[list[float]] = [[] for _ in range(layer.q.shape[2])]
    for head, pair in _pairs(capture, layer, bits):
        squares[head].append(pair.quality(budget, tail).squares)
    means: Floats = np.array(squares).mean(axis=1)
    return means


def _pairs(capture: Capture, layer: Layer, bits: int) -> Iterator[tuple[int, _Pair]]:
    """Query heads, each with what one step attends to."""
    group = layer.q.shape[2] // layer.rows.shape[0]
    for depth, (length, offloaded) in enumerate(zip(capture.lengths, capture.offloaded, strict=True)):
        signed = offloaded // SIGNATURE_ROWS * SIGNATURE_ROWS
        middle = slice(capture.sink, capture.sink + signed)
        for kv_head in range(layer.rows.shape[0]):
            rows = layer.rows[kv_head, : length + capture.steps].double()
            for step in range(min(_STEPS, capture.steps)):
                for head in range(kv_head * group, (kv_head + 1) * group):
                    q = layer.q[depth, step, head].double()
                    yield head, _Pair(layer, q, rows[: length + step + 1], middle, bits)


class _Pair:
    """One query head at one step: q [D], and the rows [n, 2, D] that it sees, those in `middle` signed."""

    def __init__(self, layer: Layer, q: torch.Tensor, rows: torch.Tensor, middle: slice, bits: int) -> None:
        q = q * layer.rule.scale
        keys, values = rows.unbind(dim=1)
        dots = keys @ q
        logits = dots
        if layer.rule.softcap is not None:
            logits = layer.rule.softcap * torch.tanh(dots / layer.rule.softcap)
        weights = logits.softmax(dim=0)
        output = weights @ values
        spread = (values[middle] - output).square().sum(dim=1) / output.square().sum().clamp_min(_TINY)
        self.share = weights[middle].square() * spread  # w²·‖v−o‖²/‖o‖²
        self.scores = dots[middle]
        self.deviation = _deviation(q, keys[middle], bits)
        generator = torch.Generator().manual_seed(len(rows))
        noise = torch.randn(self.scores.shape, generator=generator, dtype=torch.float64)
        jitter = torch.empty_like(noise).exponential_(generator=generator)
        self.ordered = (self.scores + self.deviation * noise + jitter).sort(descending=True).values

    def quality(self, budget: float, tail: float) -> SignatureQuality:
        if budget >= 1:  # nothing is left to chance
            return SignatureQuality(float(len(self.ordered)), float(len(self.ordered)), 0.0, 1)
        rate = tail * budget
        taken = round((budget - rate) / (1 - rate) * len(self.ordered))
        threshold = self.ordered[min(max(taken, 1), len(self.ordered)) - 1]
        u = probability(self.scores - threshold, self.deviation.clamp_min(_LEAST))
        pi = (rate + (1 - rate) * u).clamp_min(_TINY)
        squares = float((self.share * (1 - pi) / pi).sum())
        return SignatureQuality(float(pi.sum()), float(len(pi)), squares, 1)


def probability(above: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """u [n] of `estimator.signature_probability`, for many keys."""
    z = above / sigma
    x = z + sigma
    beyond = (-z.square() / 2).exp() * torch.special.erfcx(x.clamp_min(0) / 2**0.5) / 2
    below = (above + sigma.square() / 2).clamp_max(0).exp() * torch.special.ndtr(-x)
    u: torch.Tensor = torch.special.ndtr(z) + torch.where(x > 0, beyond, below)
    return u.clamp_max(1)


def _deviation(q: torch.Tensor, keys: torch.Tensor, bits: int) -> torch.Tensor:
    """σ [n] of the estimated logits, q [D] times the scale; as `estimator.signature_deviation`, for many keys."""
    head_dim = keys.shape[1]
    blocks = keys.view(-1, SIGNATURE_ROWS, head_dim)
    x = (blocks - blocks.mean(dim=1, keepdim=True)).view(-1, head_dim)
    squares = x.square().sum(dim=1)
    across = (q.square().sum() - (x @ q).square() / squares.clamp_min(_TINY)).clamp_min(0)
    spread = bits / mean_alignment(bits, head_dim) ** 2 - rotation_share(bits, head_dim)
    return (across * squares * max(spread, 0.0) / max(head_dim - 1, 1)).sqrt()


def error_and_ratio(layers: Iterable[Mapping[float, SignatureQuality]], budget: float) -> tuple[float, float]:
    """Mean over layers of each one's error, and Σ sampled / Σ keys."""
    chosen = [layer[budget] for layer in layers]
    ratio = sum(layer.sampled for layer in chosen) / sum(layer.keys for layer in chosen)
    return sum(layer.error for layer in chosen) / len(chosen), ratio
