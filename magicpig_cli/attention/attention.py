"""Attention of one layer, one call per forward: takes new keys and values into the caches, then attends."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from magicpig_cli.attention.base import Estimate, LogitRule, Partial, Sampler, StepRecorder
from magicpig_cli.attention.exact import attend_chunk, attend_step
from magicpig_cli.attention.merge import merge, share_of
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.staging import Staging
from magicpig_cli.config import BLOCK_KEYS


class Attention:
    """Exact attention for prompts, dense layers and short sequences; sampled attention for the others.

    rotation: [D, D] on the device, by which keys and queries are multiplied before anything else; None = not at all.
    """

    def __init__(
        self, sampler: Sampler | None, row_dtype: torch.dtype, threads: int, staging: Staging,
        rotation: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._sampler = sampler
        self._row_dtype = row_dtype
        self._rotation = rotation
        self._threads = threads
        self._staging = staging
        self.windows_on_host = staging.device.type == "cpu"  # where the kernels that sample can read them

    def _rows(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """K and V side by side, rounded to the row type: [B, Hkv, T, D] twice → [B, Hkv, T, 2, D]."""
        return torch.stack([self._rotated(key).to(self._row_dtype), value.to(self._row_dtype)], dim=3)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or queries [..., D] as they are stored and compared: in float32 if rotated."""
        return x if self._rotation is None else x.float() @ self._rotation

    def build_index(self, layer: int, cache: LayerCache) -> None:
        """Bring the layer's index up to its store, anew where that has outgrown the old mean (after a prefill)."""
        if cache.index is not None and cache.index.outgrown:
            cache.index = None  # before the new one is made, not after: both together would be twice the memory
        self._index(layer, cache).extend()

    def adopt_index(self, layer: int, cache: LayerCache, saved: IndexReader) -> None:
        """Give the layer an index that was taken down before, as far as its store goes. Raises MagicpigError."""
        assert self._sampler is not None
        index = self._sampler.restored(layer, cache, saved)
        index.truncate(cache.store.length)
        cache.index = index

    def _index(self, layer: int, cache: LayerCache) -> Index:
        """The layer's index for this sampler; one without rows where it had none."""
        assert self._sampler is not None
        if cache.index is None or cache.index.sampler != self._sampler.name:
            cache.index = None  # first, as above
            cache.index = self._sampler.new_index(layer, cache)
        return cache.index

    def chunk(
        self, cache: LayerCache, q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: LogitRule
    ) -> torch.Tensor:
        """A prompt chunk of one sequence: q [1, H, T, D], key and value [1, Hkv, T, D] → [1, T, H, D]."""
        rows = self._rows(key, value)[0]
        history = cache.pieces(at_most=BLOCK_KEYS)
        queries = self._rotated(q[0])
        out = attend_chunk(queries, rows, history, cache.length, rule, cache.spec.window, self._staging)
        cache.extend(rows)
        return out.to(q.dtype).unsqueeze(0)

    def step(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> torch.Tensor:  # fmt: skip
        """One new token per sequence: q [B, H, 1, D], key and value [B, Hkv, 1, D] → [B, 1, H, D].

        sampled[b]: estimate the offloaded part of sequence b from its index instead of reading all of it.
        """
        queries = self._rotated(q[:, :, 0]).float().contiguous()
        store_from = [self._step_index(layer, c) if s else 0 for c, s in zip(caches, sampled, strict=True)]
        self._take(caches, key, value)
        picked = [b for b, s in enumerate(sampled) if s]
        if not picked:
            with record.stage("dense"):
                attended = attend_step(queries, list(caches), store_from, rule, self._threads, self._staging)
        elif self.windows_on_host:
            attended = self._sample_beside(layer, caches, sampled, store_from, queries, rule, record)
        else:
            attended = self._sample_apart(layer, caches, picked, store_from, queries, rule, record)
        return attended.out.to(q.dtype).unsqueeze(1)

    def _take(self, caches: SequenceOf[LayerCache], key: torch.Tensor, value: torch.Tensor) -> None:
        """Take in one new token per sequence: key and value [B, Hkv, 1, D]."""
        keys, values = self._rotated(key[:, :, 0]), value[:, :, 0]
        for b, cache in enumerate(caches):
            cache.append_one(keys[b], values[b])

    def _step_index(self, layer: int, cache: LayerCache) -> int:
        """What a decode step does for the index; how many rows it samples from. The mean stays as it is.

        Called before the new row comes in. If that moves rows out of the window, the step has enough to do.
        """
        index = self._index(layer, cache)
        if not cache.full:
            index.step()
        return index.length

    def _sample_beside(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], store_from: list[int],
        queries: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> Partial:  # fmt: skip
        """Exact parts and samples of all sequences in one call of the kernels."""
        assert self._sampler is not None
        runs = [cache.runs(start) for cache, start in zip(caches, store_from, strict=True)]
        found = self._sampler.attend(layer, queries, list(caches), rule, record, runs, sampled)
        picked = [b for b, flag in enumerate(sampled) if flag]
        for b in picked:
            self._note(layer, caches, b, found, b, found.error, record)
        self._measure(caches, picked, queries, found.attended, rule, record)
        return found.attended

    def _sample_apart(
        self, layer: int, caches: SequenceOf[LayerCache], picked: list[int], store_from: list[int],
        queries: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> Partial:  # fmt: skip
        """Exact parts of all sequences where they are, samples of those `picked` from host memory, merged."""
        assert self._sampler is not None
        with record.stage("window"):
            near = attend_step(queries, list(caches), store_from, rule, self._threads, self._staging)
        q = queries[picked].contiguous()
        found = self._sampler.attend(layer, q, [caches[b] for b in picked], rule, record)
        with record.stage("merge"):
            merged = merge(Partial(near.out[picked], near.lse[picked]), found.attended)
            out, lse = near.out.clone(), near.lse.clone()
            out[picked], lse[picked] = merged.out, merged.lse
            error = found.error
            if error is not None:
                error = error * self._staging.to_host(share_of(found.attended, merged)).numpy()
        for row, b in enumerate(picked):
            self._note(layer, caches, b, found, row, error, record)
        attended = Partial(out, lse)
        self._measure(caches, picked, queries, attended, rule, record)
        return attended

    def _note(
        self, layer: int, caches: SequenceOf[LayerCache], b: int, found: Estimate, row: int,
        error: np.ndarray | None, record: StepRecorder,
    ) -> None:  # fmt: skip
        """Record what was sampled of sequence b, which is in this row of `found`; error: as estimated, [.., H]."""
        index = caches[b].index
        assert index is not None
        assert self._sampler is not None
        for table in (record.sampled, record.offloaded):
            table.setdefault(layer, [0] * len(caches))
        for told in (record.squares, record.budgets):
            told.setdefault(layer, [None] * len(caches))
        record.sampled[layer][b] = int(found.sampled[row].sum())
        record.offloaded[layer][b] = index.length * found.sampled.shape[1]
        if error is not None:
            wide = error[row].astype(np.float64)
            record.squares[layer][b] = float(wide @ wide) / len(wide)
            self._sampler.learn(index, error[row])
        if found.budget is not None:
            record.budgets[layer][b] = float(found.budget[row].sum(dtype=np.float64)) / found.budget.shape[1]

    def _measure(
        self, caches: SequenceOf[LayerCache], picked: SequenceOf[int], queries: torch.Tensor, attended: Partial,
        rule: LogitRule, record: StepRecorder,
    ) -> None:  # fmt: skip
        """How far the results of the sequences `picked` are off, if that is asked for."""
        if record.errors is None:
            return
        chosen = [caches[b] for b in picked]
        q = queries[picked].contiguous()
        truth = attend_step(q, chosen, [0] * len(chosen), rule, self._threads, self._staging)
        size = truth.out.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        record.errors.append((attended.out[picked] - truth.out).norm(dim=-1) / size)
