"""How well the signature sampler knows itself, on real queries and keys: its probabilities, its estimate of its error.

Every rotation is another draw of the same estimator (docs/method.md), so means over many of them are compared with what
the formulas of `attention.estimator` say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import (
    log_normal_table,
    signature_deviation,
    signature_probability,
    with_tail,
)
from magicpig_cli.attention.rabitq import signature_basis
from magicpig_cli.bench.layer_tensors import LayerTensors, stored
from magicpig_cli.bench.report import markdown_table
from magicpig_cli.config import DEFAULT_BITS, DEFAULT_BUDGET, DEFAULT_TAIL
from magicpig_cli.kernels import SIGNATURE_ROWS
from magicpig_cli.kernels.reference.signature import look_up_tables, tail_rows, threshold
from magicpig_cli.kernels.signature_shape import TOP_SCORE

SINK, LOCAL = 4, 64  # rows attended exactly at both ends, and what is left of a cell of 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """How much is sampled."""

    bits: int = DEFAULT_BITS
    budget: float = DEFAULT_BUDGET
    tail: float = DEFAULT_TAIL

    @property
    def rate(self) -> float:
        """Of the uniform tail."""
        return self.tail * self.budget

    @property
    def share(self) -> float:
        """Of the rows, that the threshold takes."""
        return (self.budget - self.rate) / (1 - self.rate)


class SignedLayer:
    """Real queries and rows of one layer: whole cells in the middle are sampled, both ends are read exactly."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.tensors = tensors
        self.n = (tensors.n - SINK - LOCAL) // SIGNATURE_ROWS * SIGNATURE_ROWS
        self.middle = stored(tensors.rows[:, SINK : SINK + self.n].contiguous())
        near = torch.cat([tensors.rows[:, :SINK], tensors.rows[:, SINK + self.n :]], dim=1)
        self.near = stored(near)
        self.q = tensors.q.numpy()  # [S, H, D]

    def signed(self, sampling: Sampling, seed: int) -> tuple[kernels.SignatureBasis, kernels.SignedRows]:
        """The rotations of a seed, and the signatures on them."""
        basis = signature_basis(seed, self.tensors.layer, self.tensors.head_dim, sampling.bits)
        block = kernels.sign_rows(self.middle.table, 0, self.n, basis, threads=1)
        return basis, kernels.SignedRows(self.middle.table, (block,))

    @cached_property
    def rows(self) -> np.ndarray:
        """Keys and values of the middle as they are stored, float64 [Hkv, n, 2, D]."""
        return self.middle.table.read(0, self.n).astype(np.float64)

    @cached_property
    def logits(self) -> np.ndarray:
        """float64 [S, H, n]."""
        group = self.tensors.heads // self.tensors.kv_heads
        keys = self.rows[:, :, 0].repeat(group, axis=0)  # [H, n, D]
        logits: np.ndarray = np.einsum("shd,hnd->shn", self.q.astype(np.float64), keys) * self.tensors.scale
        return logits

    def kv_head(self, head: int) -> int:
        return head * self.tensors.kv_heads // self.tensors.heads


@dataclass(frozen=True, slots=True)
class Draw:
    """One rotation, of one query head of one step."""

    reached: np.ndarray  # bool [n]: taken by the threshold
    taken: np.ndarray  # bool [n]: or by the uniform tail
    u: np.ndarray  # float64 [n]: probability of the first
    logits: np.ndarray  # float64 [n]


def draws(layer: SignedLayer, sampling: Sampling, seed: int) -> Iterator[Draw]:
    """What is taken with one rotation, step by step and head by head, and how likely that was."""
    basis, rows = layer.signed(sampling, seed)
    scale, bits = layer.tensors.scale, sampling.bits
    key = (seed, layer.tensors.layer)
    scores, units = kernels.rabitq_scores(layer.q, basis, [rows] * len(layer.q), key=key, scale=scale)
    block = rows.blocks[0]
    factors, means = kernels.widen(block.factors), kernels.widen(block.means)
    uniform = [tail_rows(layer.n, sampling.rate, key, h) for h in range(layer.tensors.kv_heads)]
    for step, head in np.ndindex(layer.q.shape[:2]):
        h, unit, q = layer.kv_head(head), float(units[step, head]), layer.q[step, head].astype(np.float64) * scale
        bound = threshold(scores[step][head], sampling.share)
        assert -TOP_SCORE <= bound <= TOP_SCORE, "a context of many cells has a threshold"
        _, look_up_step, _ = look_up_tables(basis.matrix.astype(np.float64) @ q)
        deviation = signature_deviation(
            q, layer.rows[h, :, 0] - means[h].repeat(SIGNATURE_ROWS, axis=0), bits, factors[h],
            noise=bits / 4 * look_up_step**2 / 12, unit=unit,
        )  # fmt: skip
        reached = scores[step][head] >= bound
        u = signature_probability(layer.logits[step, head], (bound - 0.5) * unit, deviation)
        yield Draw(reached, reached | uniform[h], u, layer.logits[step, head])


@dataclass(frozen=True, slots=True)
class Decile:
    """Keys whose probability lies in a tenth of [0, 1]."""

    keys: int
    probability: float  # mean u
    frequency: float  # share of them that was taken


@dataclass(frozen=True, slots=True)
class Calibration:
    """Over all rotations, layers, steps and heads."""

    deciles: list[Decile]
    mean_sum: float  # of Ẑ / Z: unnormalised estimate of Σ exp(logit) over the sampled part, over the exact one
    standard_error: float  # of that mean: heads and steps are averaged first, rotations are the sample


def calibrate(layers: list[SignedLayer], sampling: Sampling, rotations: int) -> Calibration:
    """Frequencies of inclusion beside their probabilities, and the mean of the unnormalised estimate."""
    edges = np.linspace(0, 1, 11)
    keys, probable, taken = np.zeros(10), np.zeros(10), np.zeros(10)
    means = []
    for seed in range(rotations):
        ratios = []
        for draw in (draw for layer in layers for draw in draws(layer, sampling, seed)):
            bins = np.clip(np.digitize(draw.u, edges) - 1, 0, 9)
            keys += np.bincount(bins, minlength=10)
            probable += np.bincount(bins, weights=draw.u, minlength=10)
            taken += np.bincount(bins, weights=draw.reached, minlength=10)
            weights = np.exp(draw.logits - draw.logits.max())
            estimate = (weights / with_tail(draw.u, sampling.rate))[draw.taken].sum()
            ratios.append(estimate / weights.sum())
        means.append(float(np.mean(ratios)))
    deciles = [
        Decile(int(count), float(p / count), float(t / count))
        for count, p, t in zip(keys, probable, taken, strict=True)
        if count
    ]
    return Calibration(deciles, float(np.mean(means)), float(np.std(means, ddof=1) / np.sqrt(len(means))))


@dataclass(frozen=True, slots=True)
class OwnError:
    """Estimated and true relative errors [layers · steps · heads], each the RMS over rotations."""

    estimated: np.ndarray
    true: np.ndarray

    @property
    def factor(self) -> float:
        """Median of true over estimated: the one calibration factor."""
        return float(np.median(self.true / self.estimated))

    @property
    def log_correlation(self) -> float:
        return float(np.corrcoef(np.log(self.estimated), np.log(self.true))[0, 1])

    @property
    def within_two(self) -> float:
        """Share of them within a factor of two of the true one, after calibration."""
        off = np.abs(np.log2(self.true / (self.factor * self.estimated)))
        return float((off <= 1).mean())


def own_error(layers: list[SignedLayer], sampling: Sampling, rotations: int, threads: int = 1) -> OwnError:
    """What the sampler says of its error, and how far it is off, merged with the rows that are read exactly."""
    weights = log_normal_table()
    estimated: list[np.ndarray] = []
    true: list[np.ndarray] = []
    for layer in layers:
        near = (layer.near.table, 0, layer.near.length)
        runs, whole = [[near]] * len(layer.q), [[near, (layer.middle.table, 0, layer.n)]] * len(layer.q)
        exact = kernels.exact_attend(layer.q, whole, scale=layer.tensors.scale, threads=threads).out
        sums = np.zeros((2, *layer.q.shape[:2]))
        for seed in range(rotations):
            basis, rows = layer.signed(sampling, seed)
            done = kernels.rabitq_attend(
                layer.q, basis, [rows] * len(layer.q), weights, tail=sampling.tail, key=(seed, layer.tensors.layer),
                budget=np.full(layer.q.shape[:2], sampling.budget, dtype=np.float32), scale=layer.tensors.scale,
                threads=threads, exact=runs,
            )  # fmt: skip
            assert done.error is not None
            off = np.linalg.norm(done.out - exact, axis=2) / np.linalg.norm(exact, axis=2)
            sums += np.square([done.error, off], dtype=np.float64)
        for found, total in zip((estimated, true), np.sqrt(sums / rotations), strict=True):
            found.append(total.ravel())
    return OwnError(np.concatenate(estimated), np.concatenate(true))


def as_tables(calibrations: dict[str, Calibration], errors: dict[str, OwnError]) -> str:
    """Markdown: by text, inclusion by deciles of u, the unnormalised estimate, and the estimated error."""
    tenths = [f"{low:.1f} – {high:.1f}" for low, high in pairwise(np.linspace(0, 1, 11))]
    inclusion = [
        [text, *(f"{decile.frequency:.3f} / {decile.probability:.3f}" for decile in found.deciles)]
        for text, found in calibrations.items()
    ]
    columns = (
        "text", "mean of Ẑ / Z", "standard error", "log-correlation", "true / estimated, median", "within a factor 2",
    )  # fmt: skip
    means = [
        [
            text, f"{found.mean_sum:.4f}", f"{found.standard_error:.4f}", f"{errors[text].log_correlation:.3f}",
            f"{errors[text].factor:.2f}", f"{errors[text].within_two:.1%}",
        ]
        for text, found in calibrations.items()
    ]  # fmt: skip
    return markdown_table(["text", *tenths], inclusion) + "\n" + markdown_table(columns, means)
