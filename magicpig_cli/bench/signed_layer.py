"""A stored layer whose rows are sampled by their signatures: the second sampler beside the tables of `IndexedLayer`."""

from __future__ import annotations

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import log_normal_table
from magicpig_cli.attention.rabitq import signature_basis
from magicpig_cli.bench.layer_tensors import LayerTensors
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import DEFAULT_BITS, DEFAULT_BUDGET, DEFAULT_TAIL


class SignedLayer:
    """Signatures of the complete cells of a store; the rows after them are attended exactly, as in the engine."""

    def __init__(self, tensors: LayerTensors, store: RowStore, threads: int) -> None:
        self.tensors, self._store = tensors, store
        self._basis = signature_basis(0, tensors.layer, tensors.head_dim, DEFAULT_BITS)
        self._signed = store.length // kernels.SIGNATURE_ROWS * kernels.SIGNATURE_ROWS
        block = kernels.sign_rows(store.table, 0, self._signed, self._basis, threads)
        self._rows = kernels.SignedRows(store.table, [block])
        self._weights = log_normal_table()
        self._budget = np.full((1, tensors.heads), DEFAULT_BUDGET, dtype=np.float32)

    def attend(self, q: np.ndarray, threads: int, with_error: bool = False) -> kernels.Sampled:
        """The estimate of one step: q float32 [1, H, D]."""
        return kernels.rabitq_attend(
            q, self._basis, [self._rows], self._weights, budget=self._budget, tail=DEFAULT_TAIL,
            key=(0, self.tensors.layer), scale=self.tensors.scale, threads=threads,
            exact=[[(self._store.table, self._signed, self._store.length)]], with_error=with_error,
        )  # fmt: skip
