"""Queries, keys and values of one layer outside of any model, stored and indexed as decode steps use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import log_weight_table
from magicpig_cli.attention.lsh import LshHasher, LshSampler
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import DEFAULT_K, DEFAULT_L

BLOCK_ROWS = 1024
FEW_ROWS = 2048  # enough for a segment


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """What S decode steps of one layer attend with and to; logits are scale·q·k."""

    q: torch.Tensor  # float32 [S, H, D], after rotary embedding
    rows: torch.Tensor  # bfloat16 [Hkv, N, 2, D]: K and V of a key side by side
    scale: float
    layer: int = 0  # in the model; projections are drawn by it

    @property
    def steps(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.rows.shape[0]

    @property
    def n(self) -> int:
        return self.rows.shape[1]

    @property
    def head_dim(self) -> int:
        return self.rows.shape[3]


def stored(rows: torch.Tensor, dtype: kernels.RowType = "bfloat16") -> RowStore:
    """A store of its own that holds rows [Hkv, N, 2, D] as `dtype`, in the blocks that the engine uses."""
    store = RowStore(BlockPool(rows.shape[0], rows.shape[3], dtype, BLOCK_ROWS))
    store.append(rows)
    return store


def hashing(tensors: LayerTensors, K: int, L: int, hash_seed: int, threads: int) -> LshHasher:
    """The projections of the layer, on the CPU."""
    sampler = LshSampler(K, L, hash_seed, threads, Staging(torch.device("cpu")))
    return sampler.hasher(tensors.layer, tensors.head_dim)


class IndexedLayer:
    """A stored layer with its tables and the codes of its queries."""

    def __init__(
        self, tensors: LayerTensors, K: int = DEFAULT_K, L: int = DEFAULT_L, hash_seed: int = 0, threads: int = 1
    ) -> None:
        self.hasher = hashing(tensors, K, L, hash_seed, threads)
        self.store = stored(tensors.rows)
        self.index = LshIndex(self.hasher, self.store, threads)
        self.index.extend()
        self.weights = log_weight_table(K, L)  # −ln u
        self.ask(tensors)

    def ask(self, tensors: LayerTensors) -> None:
        """Take the queries of `tensors`, whose rows are those that are stored."""
        self.tensors = tensors
        self.q = tensors.q.numpy()
        self.codes = self.hasher.query_codes(self.q)  # uint16 [S, H, L]

    @cached_property
    def few(self) -> IndexedLayer:
        """A small layer of the same kind: what is done with it runs the same code."""
        return IndexedLayer(replace(self.tensors, rows=self.tensors.rows[:, :FEW_ROWS].contiguous()))

    def attend(self, step: int, threads: int, table: kernels.RowTable | None = None) -> kernels.Sampled:
        """The sampled estimate of one step; `table`: the same rows in another form, sampled alike."""
        group = self.index.sampled_rows()
        if table is not None:
            group = replace(group, table=table)
        one = slice(step, step + 1)
        return kernels.lsh_attend(
            self.q[one], self.codes[one], [group], self.weights, scale=self.tensors.scale, threads=threads,
            with_error=False,
        )  # fmt: skip

    def attend_exactly(self, step: int, threads: int) -> kernels.Attended:
        """The exact result of one step over all rows."""
        run = (self.store.table, 0, self.store.length)
        return kernels.exact_attend(self.q[step : step + 1], [[run]], scale=self.tensors.scale, threads=threads)

    def sampled_rows(self, threads: int = 1) -> list[list[np.ndarray]]:
        """Rows that each query head [S][H] samples: int64, ascending."""
        return kernels.lsh_sample(self.codes, [self.index.sampled_rows()] * self.tensors.steps, threads=threads)

    def sampled_ratio(self, threads: int = 1) -> float:
        """Σ sampled / Σ stored keys, per query head, over all steps."""
        counts = [len(rows) for of_step in self.sampled_rows(threads) for rows in of_step]
        return sum(counts) / (len(counts) * self.tensors.n)

    def union_rows(self, step: int) -> list[np.ndarray]:
        """Per KV head, the rows that any query head of its group samples: int64, ascending."""
        group = self.index.sampled_rows()
        (of_heads,) = kernels.lsh_sample(self.codes[step : step + 1], [group])
        size = self.tensors.heads // self.tensors.kv_heads
        return [np.unique(np.concatenate(of_heads[i : i + size])) for i in range(0, len(of_heads), size)]
