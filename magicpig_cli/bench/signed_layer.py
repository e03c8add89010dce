"""A stored layer whose rows are sampled by their signatures: the second sampler beside the tables of `IndexedLayer`."""

from __future__ import annotations

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import log_normal_table
from magicpig_cli.bench.layer_tensors import LayerTensors
from magicpig_cli.cache.store import RowStore

BUDGET, TAIL, BITS = 0.02, 0.25, 128


def random_basis(bits: int, head_dim: int, seed: int = 0) -> kernels.SignatureBasis:
    """Rotations drawn by QR of Gaussians, on top of each other, cut to `bits` rows."""
    rng = np.random.default_rng(seed)
    rotations = [np.linalg.qr(rng.standard_normal((head_dim, head_dim)))[0] for _ in range(-(-bits // head_dim))]
    return kernels.SignatureBasis(np.ascontiguousarray(np.concatenate(rotations)[:bits], dtype=np.float32))


class SignedLayer:
    """Signatures of the complete cells of a store; the rows after them are attended exactly, as in the engine."""

    def __init__(self, tensors: LayerTensors, store: RowStore, threads: int) -> None:
        self.tensors, self._store = tensors, store
        self._basis = random_basis(BITS, tensors.head_dim, tensors.layer)
        self._signed = store.length // kernels.SIGNATURE_ROWS * kernels.SIGNATURE_ROWS
        block = kernels.sign_rows(store.table, 0, self._signed, self._basis, threads)
        self._rows = kernels.SignedRows(store.table, [block])
        self._weights = log_normal_table()
        self._budget = np.full((1, tensors.heads), BUDGET, dtype=np.float32)

    def attend(self, q: np.ndarray, threads: int, with_error: bool = False) -> kernels.Sampled:
        """The estimate of one step: q float32 [1, H, D]."""
        return kernels.rabitq_attend(
            q, self._basis, [self._rows], self._weights, budget=self._budget, tail=TAIL, key=(0, self.tensors.layer),
            scale=self.tensors.scale, threads=threads, exact=[[(self._store.table, self._signed, self._store.length)]],
            with_error=with_error,
        )  # fmt: skip
