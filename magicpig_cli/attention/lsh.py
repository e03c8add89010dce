"""LSH-sampled attention of decode steps over the offloaded keys (paper section 4; DESIGN.md, "The estimator")."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import cached_property

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import Estimate, LogitRule, StepRecorder, as_estimate
from magicpig_cli.attention.estimator import log_weight_table
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.index import LshIndex, SavedTables
from magicpig_cli.cache.layer import LayerCache, Run
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore, as_array
from magicpig_cli.config import HASH_ROWS


def gaussian_directions(hash_seed: int, layer: int, head_dim: int, columns: int) -> np.ndarray:
    """R, float32 [D, K·L]: independent standard normals, a function of (hash_seed, layer) alone."""
    generator = np.random.Generator(np.random.Philox(key=hash_seed, counter=[0, 0, 0, layer]))
    return generator.standard_normal((head_dim, columns), dtype=np.float32)


def pack_signs(projected: torch.Tensor, K: int, L: int) -> torch.Tensor:
    """Sign bits of [..., L·K] as integer codes int32 [..., L]; bit k of table l is column l·K + k."""
    bits = (projected > 0).reshape(*projected.shape[:-1], L, K)
    powers = torch.tensor([1 << k for k in range(K)], dtype=torch.int32, device=projected.device)
    return (bits * powers).sum(dim=-1, dtype=torch.int32)


class LshHasher:
    """SimHash codes of one layer's keys and queries. On the CPU the kernels hash; elsewhere the device projects."""

    def __init__(
        self, layer: int, head_dim: int, K: int, L: int, hash_seed: int, threads: int, staging: Staging
    ) -> None:
        self.K, self.L = K, L
        self._threads, self._staging = threads, staging
        self._matrix = gaussian_directions(hash_seed, layer, head_dim, L * K)
        self._projection = kernels.Projection(self._matrix, K, L)

    @cached_property
    def _device_matrix(self) -> torch.Tensor:
        return self._staging.to_device(torch.from_numpy(self._matrix))

    def bias(self, mean: np.ndarray) -> np.ndarray:
        """What the mean contributes to each projection: float32 [Hkv, D] → [Hkv, L·K]."""
        return self._projection.bias(mean)

    def codes(
        self, store: RowStore, start: int, stop: int, bias: np.ndarray, out: np.ndarray, first_head: int = 0
    ) -> None:
        """Codes of stored rows [start, stop), centred, into out uint16 [heads, L, n], of heads from first_head on."""
        if self._staging.device.type == "cpu":
            kernels.hash_rows(store.table, start, stop, self._projection, bias, self._threads, out, first_head)
            return
        heads = slice(first_head, first_head + out.shape[0])
        offset = self._staging.to_device(torch.from_numpy(bias[heads])).unsqueeze(1)
        done = 0
        for rows in store.views(start, stop, at_most=HASH_ROWS):
            keys = self._staging.to_device(rows[heads])[:, :, 0].float()
            codes = self._pack_on_device(keys @ self._device_matrix - offset)
            out[:, :, done : done + rows.shape[1]] = codes.transpose(0, 2, 1)
            done += rows.shape[1]

    def query_codes(self, q: torch.Tensor) -> np.ndarray:
        """Codes of queries float32 [B, H, D], never centred: uint16 [B, H, L]."""
        if self._staging.device.type == "cpu":
            return kernels.hash_queries(as_array(q), self._projection, threads=self._threads)
        return self._pack_on_device(q @ self._device_matrix)

    def _pack_on_device(self, projected: torch.Tensor) -> np.ndarray:
        codes = pack_signs(projected, self.K, self.L)
        return self._staging.to_host(codes).numpy().astype(np.uint16)


class LshSampler:
    """Hashers of all sampled layers and the −ln u table of one (K, L)."""

    name = "lsh"

    def __init__(self, K: int, L: int, hash_seed: int, threads: int, staging: Staging, tail_rate: float = 0.0) -> None:
        """tail_rate: share of all keys that is drawn uniformly beside the tables."""
        self.K, self.L, self.tail_rate = K, L, tail_rate
        self._hash_seed, self._threads, self._staging = hash_seed, threads, staging
        self._weights = log_weight_table(K, L)
        self._hashers: dict[int, LshHasher] = {}

    def hasher(self, layer: int, head_dim: int) -> LshHasher:
        if layer not in self._hashers:
            self._hashers[layer] = LshHasher(
                layer, head_dim, self.K, self.L, self._hash_seed, self._threads, self._staging
            )
        return self._hashers[layer]

    def forget(self, layer: int) -> None:
        self._hashers.pop(layer, None)

    def learn(self, index: Index, error: np.ndarray) -> None:
        """K and L stay what they are."""

    def new_index(self, layer: int, cache: LayerCache) -> LshIndex:
        return LshIndex(self.hasher(layer, cache.spec.head_dim), cache.store, self._threads)

    def restored(self, layer: int, cache: LayerCache, saved: IndexReader) -> LshIndex:
        tables = SavedTables.read(saved, cache.spec.kv_heads)
        return LshIndex.restored(tables, self.hasher(layer, cache.spec.head_dim), cache.store, self._threads)

    def attend(
        self, layer: int, q: torch.Tensor, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        exact: list[list[Run]] | None = None, sampled: SequenceOf[bool] | None = None,
    ) -> Estimate:  # fmt: skip
        with record.stage("hash"):
            codes = self.hasher(layer, q.shape[-1]).query_codes(q)
        flags = sampled or [True] * len(caches)
        rows = [_sampled_rows(cache) if flag else _nothing(cache) for cache, flag in zip(caches, flags, strict=True)]
        queries = as_array(self._staging.to_host(q))
        done = kernels.lsh_attend(
            queries, codes, rows, self._weights, scale=rule.scale, softcap=rule.softcap, threads=self._threads,
            tail=self.tail_rate, key=(self._hash_seed, layer), exact=exact,
        )  # fmt: skip
        return as_estimate(done, record, self._staging, None)


def _sampled_rows(cache: LayerCache) -> kernels.SampledRows:
    assert isinstance(cache.index, LshIndex), "sampling needs an index"
    return cache.index.sampled_rows()


def _nothing(cache: LayerCache) -> kernels.SampledRows:
    """For a sequence that is attended exactly beside sampled ones."""
    return kernels.SampledRows(
        cache.store.table, np.zeros((cache.spec.kv_heads, cache.spec.head_dim), dtype=np.float32)
    )
