"""LSH-sampled attention of decode steps over the offloaded keys (paper section 4; DESIGN.md, "The estimator")."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from functools import cached_property, partial

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import Estimate, LogitRule, StepRecorder, as_estimate
from magicpig_cli.attention.estimator import log_weight_table
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.cache.layer import LayerCache, Run
from magicpig_cli.cache.quantize import as_numbers
from magicpig_cli.cache.saved_tables import SavedTables
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import HASH_ROWS

HASHED_HERE = 64  # rows up to which the host hashes them itself: what a decode step does for its index is four


def gaussian_directions(hash_seed: int, layer: int, head_dim: int, columns: int) -> np.ndarray:
    """R, float32 [D, K·L]: independent standard normals, a function of (hash_seed, layer) alone."""
    generator = np.random.Generator(np.random.Philox(key=hash_seed, counter=[0, 0, 0, layer]))
    return generator.standard_normal((head_dim, columns), dtype=np.float32)


def pack_signs(projected: torch.Tensor, powers: torch.Tensor, L: int) -> torch.Tensor:
    """Sign bits of [..., L·K] as the bits of uint16 codes, int16 [..., L]; bit k of table l is column l·K + k.

    powers: int32 [K], 2ᵏ, on the same device.
    """
    bits = (projected > 0).reshape(*projected.shape[:-1], L, len(powers))
    return (bits * powers).sum(dim=-1, dtype=torch.int32).to(torch.int16)


class LshHasher:
    """SimHash codes of one layer's keys and queries.

    A device projects its queries and the keys of a prompt. On the CPU, and for the few keys that a decode step hashes,
    for which it would wait longer than they take, the kernels do.
    """

    def __init__(
        self, layer: int, head_dim: int, K: int, L: int, hash_seed: int, threads: int, staging: Staging
    ) -> None:
        self.K, self.L = K, L
        self._threads, self._staging = threads, staging
        self._matrix = gaussian_directions(hash_seed, layer, head_dim, L * K)
        self._projection = kernels.Projection(self._matrix, K, L)

    @cached_property
    def _there(self) -> tuple[torch.Tensor, torch.Tensor]:
        """On the device: the directions, and the values of bits."""
        powers = torch.tensor([1 << k for k in range(self.K)], dtype=torch.int32)
        return self._staging.to_device(torch.from_numpy(self._matrix)), self._staging.to_device(powers)

    def bias(self, mean: np.ndarray) -> np.ndarray:
        """What the mean contributes to each projection: float32 [Hkv, D] → [Hkv, L·K]."""
        return self._projection.bias(mean)

    def codes(
        self, store: RowStore, start: int, stop: int, bias: np.ndarray, out: np.ndarray, first_head: int = 0
    ) -> None:
        """Codes of stored rows [start, stop), centred, into out uint16 [heads, L, n], of heads from first_head on."""
        if self._staging.on_host or stop - start <= HASHED_HERE:
            kernels.hash_rows(store.table, start, stop, self._projection, bias, self._threads, out, first_head)
            return
        for head in range(len(out)):
            self._codes_there(store, start, stop, bias[first_head + head], out[head], first_head + head)
        self._staging.settle()

    def _codes_there(
        self, store: RowStore, start: int, stop: int, bias: np.ndarray, out: np.ndarray, head: int
    ) -> None:  # fmt: skip
        """The same of one head, by the device: bias [L·K], out [L, n], which are there after `Staging.settle`."""
        matrix, _ = self._there
        offset = self._staging.to_device(torch.from_numpy(bias))
        pieces = store.lying(start, stop, at_most=HASH_ROWS)
        for done, rows in self._staging.stream("hashed rows", _placed(rows[head] for rows in pieces)):
            keys = as_numbers(rows)[:, 0].float()
            codes = self._pack(keys @ matrix - offset)  # [n, L]
            self._staging.bring("codes of rows", codes, then=partial(_keep, out[:, done : done + len(keys)]))

    def query_codes(self, q: np.ndarray) -> np.ndarray:
        """Codes of queries float32 [B, H, D], never centred: uint16 [B, H, L]."""
        return kernels.hash_queries(q, self._projection, threads=self._threads)

    def query_codes_there(self, q: torch.Tensor) -> torch.Tensor:
        """The same by the device, on it: the bits as int16."""
        return self._pack(q @ self._there[0])

    def _pack(self, projected: torch.Tensor) -> torch.Tensor:
        return pack_signs(projected, self._there[1], self.L)


def _placed(pieces: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces of rows, each with the number of rows before it."""
    done = 0
    for rows in pieces:
        yield done, rows
        done += len(rows)


def _keep(out: np.ndarray, codes: torch.Tensor) -> None:
    """Codes int16 [n, L] into uint16 [L, n]."""
    out[:] = codes.numpy().view(np.uint16).T


class LshSampler:
    """Hashers of all sampled layers and the −ln u table of one (K, L)."""

    name = "lsh"

    def __init__(self, K: int, L: int, hash_seed: int, threads: int, staging: Staging, tail_rate: float = 0.0) -> None:
        """tail_rate: share of all keys that is drawn uniformly beside the tables."""
        self.K, self.L, self.tail_rate = K, L, tail_rate
        self._hash_seed, self._threads, self._staging = hash_seed, threads, staging
        self._weights = log_weight_table(K, L)
        self._hashers: dict[int, LshHasher] = {}
        self._lock = threading.Lock()

    def hasher(self, layer: int, head_dim: int) -> LshHasher:
        with self._lock:  # halves of a batch and the index builder may want the same one
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

    def on_device(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.hasher(layer, q.shape[-1]).query_codes_there(q),)

    def built(self, index: Index) -> None:
        """It is on the host alone."""

    def found_there(self, *_: object) -> None:
        """It is on the host alone."""

    def attend(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        exact: list[list[Run]] | None = None, sampled: SequenceOf[bool] | None = None,
        computed: SequenceOf[torch.Tensor] = (), reached: SequenceOf[kernels.Reached | None] | None = None,
    ) -> Estimate:  # fmt: skip
        with record.stage("hash"):
            hasher = self.hasher(layer, q.shape[-1])
            codes = computed[0].numpy().view(np.uint16) if computed else hasher.query_codes(q)
        flags = sampled or [True] * len(caches)
        rows = [_sampled_rows(cache) if flag else _nothing(cache) for cache, flag in zip(caches, flags, strict=True)]
        done = kernels.lsh_attend(
            q, codes, rows, self._weights, scale=rule.scale, softcap=rule.softcap, threads=self._threads,
            tail=self.tail_rate, key=(self._hash_seed, layer), exact=exact,
        )  # fmt: skip
        return as_estimate(done, record, None)


def _sampled_rows(cache: LayerCache) -> kernels.SampledRows:
    assert isinstance(cache.index, LshIndex), "sampling needs an index"
    return cache.index.sampled_rows()


def _nothing(cache: LayerCache) -> kernels.SampledRows:
    """For a sequence that is attended exactly beside sampled ones."""
    return kernels.SampledRows(
        cache.store.table, np.zeros((cache.spec.kv_heads, cache.spec.head_dim), dtype=np.float32)
    )
