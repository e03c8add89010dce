"""Attention of decode steps sampled by signatures (DESIGN.md, "The estimator"; RaBitQ, Gao & Long, SIGMOD 2024).

A key is taken if the logit that its signature estimates, plus a jitter, is above a threshold, which lets a share of the
keys through, the budget: so with a probability that goes with its weight. How likely that was weighs what is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import Estimate, LogitRule, StepRecorder, as_estimate
from magicpig_cli.attention.estimator import log_normal_table
from magicpig_cli.attention.scan_there import Found, ScanThere
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.layer import LayerCache, Run
from magicpig_cli.cache.signatures import SavedSignatures, SignatureIndex
from magicpig_cli.config import BUDGET_RANGE

_STREAM = 1  # of the counter; 0 draws the directions of hash tables
# By --target-error: a head whose estimated error comes near the target reads twice as much in the next step; one that
# is below half of it reads 0.7 times as much, where the error, which goes with 1 / budget at most, is not near it. In
# between a budget stays. Queries differ from step to step: an RMS of 0.052 was had for 0.05, raised only above 0.05.
RAISE, RAISE_ABOVE = 2.0, 0.75
LOWER, LOWER_BELOW = 0.5**0.5, 0.5


def random_rotation(generator: np.random.Generator, head_dim: int) -> np.ndarray:
    """A random orthogonal matrix, float64 [D, D], uniform over all (Haar).

    Gram–Schmidt of Gaussian rows, each row made orthogonal twice: QR with a positive diagonal, which makes it uniform.
    Sums are NumPy's and not BLAS's, whose last bits depend on the number of threads.
    """
    rows: np.ndarray = generator.standard_normal((head_dim, head_dim))
    for i in range(head_dim):
        row, before = rows[i], rows[:i]
        for _ in range(2):
            row = row - ((before * row).sum(axis=1)[:, None] * before).sum(axis=0)
        rows[i] = row / np.sqrt((row * row).sum())
    return rows


def signature_directions(hash_seed: int, layer: int, head_dim: int, bits: int) -> np.ndarray:
    """float32 [bits, D]: the first rows of random rotations, one below the other; of (hash_seed, layer) alone."""
    generator = np.random.Generator(np.random.Philox(key=hash_seed, counter=[0, 0, _STREAM, layer]))
    rotations = [random_rotation(generator, head_dim) for _ in range(-(-bits // head_dim))]
    return np.ascontiguousarray(np.concatenate(rotations)[:bits].astype(np.float32))


def signature_basis(hash_seed: int, layer: int, head_dim: int, bits: int) -> kernels.SignatureBasis:
    """The same as the kernels take it."""
    return kernels.SignatureBasis(signature_directions(hash_seed, layer, head_dim, bits))


def next_budgets(budgets: np.ndarray, error: np.ndarray, target: float) -> np.ndarray:
    """Budgets float32 [H] of the next step, from those of this one and its estimated errors [H]."""
    factor = np.where(error > RAISE_ABOVE * target, RAISE, np.where(error < LOWER_BELOW * target, LOWER, 1.0))
    moved: np.ndarray = np.clip(budgets * factor, *BUDGET_RANGE).astype(np.float32)
    return moved


class RabitqSampler:
    """Directions of all sampled layers, and how much is read: `budget`, or what `target_error` makes of it.

    tail: share of the budget that is drawn uniformly; head_budgets: by layer, float32 [H], where heads differ; there: a
    device that scans the signatures.
    """

    name = "rabitq"

    def __init__(
        self, *, budget: float, tail: float, bits: int, target_error: float | None, hash_seed: int, threads: int,
        head_budgets: Mapping[int, np.ndarray] | None = None, there: ScanThere | None = None,
    ) -> None:  # fmt: skip
        self.budget, self.tail, self.bits, self.target_error = budget, tail, bits, target_error
        self._head_budgets = head_budgets or {}
        self._hash_seed, self._threads, self._there = hash_seed, threads, there
        self._weights = log_normal_table()
        self._bases: dict[int, kernels.SignatureBasis] = {}
        self._lock = threading.Lock()

    def basis(self, layer: int, head_dim: int) -> kernels.SignatureBasis:
        with self._lock:  # halves of a batch may want the same one
            if layer not in self._bases:
                self._bases[layer] = signature_basis(self._hash_seed, layer, head_dim, self.bits)
            return self._bases[layer]

    def forget(self, layer: int) -> None:
        self._bases.pop(layer, None)

    def new_index(self, layer: int, cache: LayerCache) -> SignatureIndex:
        return SignatureIndex(self.basis(layer, cache.spec.head_dim), cache.store, self._threads)

    def restored(self, layer: int, cache: LayerCache, saved: IndexReader) -> SignatureIndex:
        spec = cache.spec
        signatures = SavedSignatures.read(saved, spec.kv_heads, spec.head_dim, self.bits)
        return SignatureIndex.restored(signatures, self.basis(layer, spec.head_dim), cache.store, self._threads)

    def learn(self, index: Index, error: np.ndarray) -> None:
        if self.target_error is not None:
            assert isinstance(index, SignatureIndex)
            budgets = index.budgets  # the index's, so neighbours in a batch do not matter
            if budgets is None:
                budgets = np.full(len(error), self.budget, dtype=np.float32)
            index.budgets = next_budgets(budgets, error, self.target_error)

    def on_device(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    def built(self, index: Index) -> None:
        if self._there is not None:
            assert isinstance(index, SignatureIndex)
            self._there.keep(index.parts)

    def found_there(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        sampled: SequenceOf[bool], turn: threading.Lock,
    ) -> Found | None:  # fmt: skip
        if self._there is None:
            return None
        groups, budgets = self._asked(layer, q, caches, sampled)
        return self._there.find(
            q, self.basis(layer, q.shape[-1]), groups, budget=budgets, tail=self.tail,
            key=(self._hash_seed, layer), scale=rule.scale, threads=self._threads, record=record, turn=turn,
        )  # fmt: skip

    def attend(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        exact: list[list[Run]] | None = None, sampled: SequenceOf[bool] | None = None,
        computed: SequenceOf[torch.Tensor] = (), reached: SequenceOf[kernels.Reached | None] | None = None,
    ) -> Estimate:  # fmt: skip
        groups, budgets = self._asked(layer, q, caches, sampled)
        done = kernels.rabitq_attend(
            q, self.basis(layer, q.shape[-1]), groups, self._weights, budget=budgets, tail=self.tail,
            key=(self._hash_seed, layer), scale=rule.scale, softcap=rule.softcap, threads=self._threads, exact=exact,
            reached=reached,
        )  # fmt: skip
        return as_estimate(done, record, budgets)

    def _asked(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], sampled: SequenceOf[bool] | None
    ) -> tuple[list[kernels.SignedRows], np.ndarray]:
        """The rows that are sampled from, of sequences that are not sampled none; and budgets float32 [B, H]."""
        groups, budgets = [], np.empty(q.shape[:2], dtype=np.float32)
        budgets[:] = self._head_budgets.get(layer, self.budget)
        for b, cache in enumerate(caches):
            if sampled is None or sampled[b]:
                assert isinstance(cache.index, SignatureIndex), "sampling needs an index"
                groups.append(cache.index.signed_rows)
                if self.target_error is not None and cache.index.budgets is not None:
                    budgets[b] = cache.index.budgets
            else:
                groups.append(kernels.SignedRows(cache.store.table, ()))
        return groups, budgets
