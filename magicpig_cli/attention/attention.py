"""Attention of one layer, one call per forward: takes new keys and values into the caches, then attends."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from threading import Lock

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import Estimate, Late, LogitRule, Partial, Sampler, StepRecorder
from magicpig_cli.attention.exact import attend_chunk, attend_near, attend_step
from magicpig_cli.attention.merge import merge, share_of
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import as_array
from magicpig_cli.config import BLOCK_KEYS


class Attention:
    """Exact attention for prompts, dense layers and short sequences; sampled attention for the others.

    rotation: [D, D] on the device, by which keys and queries are multiplied before anything else; None = not at all.
    turn: held by who has the kernels at work beside a device. They use all threads, so halves of a batch take turns.
    """

    def __init__(
        self, sampler: Sampler | None, row_dtype: torch.dtype, threads: int, staging: Staging,
        rotation: torch.Tensor | None = None, turn: Lock | None = None,
    ) -> None:  # fmt: skip
        self._sampler = sampler
        self._row_dtype = row_dtype
        self._rotation = rotation
        self._threads = threads
        self._staging = staging
        self._turn = turn or Lock()

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
        index = self._index(layer, cache)
        index.extend()
        assert self._sampler is not None
        self._sampler.built(index)

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
        history = cache.pieces(at_most=BLOCK_KEYS) if self._staging.on_host else cache.pieces_there(_in_sight(cache))
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
        if self._staging.on_host:
            asked, k, v = (as_array(part[:, :, 0].float().contiguous()) for part in (q, key, value))
            out = self.step_here(layer, caches, sampled, asked, k, v, rule, record)
            return torch.from_numpy(out).to(q.dtype).unsqueeze(1)
        queries = self._rotated(q[:, :, 0]).float().contiguous()
        self._asked(layer, queries, rule)
        if self._sampler is not None and any(sampled):
            attended = self._sample_apart(layer, caches, sampled, queries, key, value, rule, record)
            self._measure(caches, sampled, queries, attended, rule, record)
        else:
            self._take(caches, key, value)
            with record.on_device("dense", self._staging):
                attended = attend_step(queries, list(caches), [0] * len(caches), rule, self._threads, self._staging)
        return attended.out.to(q.dtype).unsqueeze(1)

    def step_here(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: np.ndarray,
        key: np.ndarray, value: np.ndarray, rule: LogitRule, record: StepRecorder,
    ) -> np.ndarray:  # fmt: skip
        """The same in host memory, float32: q [B, H, D], key and value [B, Hkv, D] → [B, H, D].

        Without torch, whose views and copies took as long as the kernels at a short context (docs/decisions/013).
        """
        if self._rotation is not None:
            q, key = (as_array(self._rotated(torch.from_numpy(part))) for part in (q, key))
        self._asked(layer, q, rule)
        if self._sampler is not None and any(sampled):
            found = self._sample_beside(layer, caches, sampled, q, key, value, rule, record)
            if record.errors is not None:
                self._measure(caches, sampled, torch.from_numpy(q), found.partial, rule, record)
            return found.out
        self._take_here(caches, key, value)
        began = time.perf_counter_ns()
        runs = [cache.runs() for cache in caches]
        done = kernels.exact_attend(q, runs, scale=rule.scale, softcap=rule.softcap, threads=self._threads)
        record.add("dense", time.perf_counter_ns() - began)
        return done.out

    def _asked(self, layer: int, queries: torch.Tensor | np.ndarray, rule: LogitRule) -> None:
        """Told of the queries [B, H, D] of a step as they are compared with the rows, for those who keep them."""

    def finish(self, record: StepRecorder) -> None:
        """At the end of a forward: wait for what was not waited for in its layers, and note it."""
        if record.late:
            (shares,) = self._staging.bring("shares", torch.stack([late.share for late in record.late])).wait()
            for late, share in zip(record.late, shares.numpy(), strict=True):
                for b, index in enumerate(late.indexes):
                    if index is not None:
                        self._note_error(late.layer, len(late.indexes), b, index, late.error[b] * share[b], record)
            record.late.clear()
        self._staging.settle()
        record.read_marks()

    def learn(self, record: StepRecorder) -> None:
        """After a step that was made for every sequence of the batch: the sampler learns from its errors."""
        if self._sampler is not None:
            for index, error in record.lessons:
                self._sampler.learn(index, error)

    def _take(self, caches: SequenceOf[LayerCache], key: torch.Tensor, value: torch.Tensor) -> None:
        """Take in one new token per sequence: key and value [B, Hkv, 1, D]."""
        keys, values = self._rotated(key[:, :, 0]), value[:, :, 0]
        for b, cache in enumerate(caches):
            cache.append_one(keys[b], values[b])

    def _take_here(self, caches: SequenceOf[LayerCache], key: np.ndarray, value: np.ndarray) -> None:
        """The same in host memory, rotated already: key and value float32 [B, Hkv, D]."""
        for b, cache in enumerate(caches):
            cache.append_here(key[b], value[b])

    def _step_index(self, layer: int, cache: LayerCache) -> int:
        """What a decode step does for the index; how many rows it samples from. The mean stays as it is.

        Called before the new row comes in. If that moves rows out of the window, the step has enough to do.
        """
        index = self._index(layer, cache)
        if not cache.full:
            index.step()
        return index.length

    def _sample_beside(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: np.ndarray,
        key: np.ndarray, value: np.ndarray, rule: LogitRule, record: StepRecorder,
    ) -> Estimate:  # fmt: skip
        """Exact parts and samples of all sequences in one call of the kernels, which read the windows too."""
        assert self._sampler is not None
        store_from = [self._step_index(layer, c) if s else 0 for c, s in zip(caches, sampled, strict=True)]
        self._take_here(caches, key, value)
        runs = [cache.runs(start) for cache, start in zip(caches, store_from, strict=True)]
        found = self._sampler.attend(layer, q, list(caches), rule, record, runs, sampled)
        for b in (b for b, flag in enumerate(sampled) if flag):
            index = caches[b].index
            assert index is not None
            self._note(layer, len(caches), b, index.length, found, record)
            if found.error is not None:
                self._note_error(layer, len(caches), b, index, found.error[b], record)
        return found

    def _sample_apart(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], queries: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> Partial:  # fmt: skip
        """Windows on the device, beside that by the kernels what of sampled sequences is in host memory, then merged.

        Nobody waits but the host for its queries, and for the rows that a device finds for them. The indexes' upkeep
        comes last, while the device goes on: rows that this step has moved out of the window are sampled from later
        than on a CPU, and attended exactly until then.
        """
        assert self._sampler is not None
        with record.on_device("hash", self._staging):
            computed = self._sampler.on_device(layer, queries)
        asked = self._staging.bring("queries", queries, *computed)
        moves = [cache.full for cache in caches]
        indexes = [self._index(layer, c) if s else None for c, s in zip(caches, sampled, strict=True)]
        covered = [0 if index is None else index.length for index in indexes]
        self._take(caches, key, value)
        with record.on_device("window", self._staging):
            near = attend_near(queries, list(caches), sampled, rule)
        with record.waiting():
            here, *computed_here = asked.wait()
        q = as_array(here)
        there = self._sampler.found_there(layer, q, list(caches), rule, record, sampled, self._turn)
        reached = None
        if there is not None:
            with record.waiting():
                reached = there()
        with self._turn:
            runs = [c.stored_runs(start) if s else [] for c, start, s in zip(caches, covered, sampled, strict=True)]
            found = self._sampler.attend(
                layer, q, list(caches), rule, record, runs, sampled, computed=computed_here, reached=reached
            )
        with record.on_device("merge", self._staging):
            attended = self._merged(layer, near, found, indexes, record)
        for b, index in enumerate(indexes):
            if index is not None:
                self._note(layer, len(caches), b, covered[b], found, record)
                if not moves[b]:
                    with self._turn:
                        index.step()
        return attended

    def _merged(
        self, layer: int, near: Partial, found: Estimate, indexes: list[Index | None], record: StepRecorder
    ) -> Partial:
        """Windows and estimates, on the device, and what is left of the estimated error."""
        estimate = found.partial
        with self._staging.sent("estimates", estimate.out, estimate.lse) as there:
            far = Partial(*there)
            attended = merge(near, far)
            if found.error is not None:
                record.late.append(Late(layer, indexes, found.error, share_of(far, attended)))
            return attended

    def _note(
        self, layer: int, count: int, b: int, covered: int, found: Estimate, record: StepRecorder
    ) -> None:  # fmt: skip
        """Record what was sampled of sequence b of `count`, from so many keys of its index."""
        for table in (record.sampled, record.offloaded):
            table.setdefault(layer, [0] * count)
        for told in (record.squares, record.budgets):
            told.setdefault(layer, [None] * count)
        record.sampled[layer][b] = sum(found.sampled[b].tolist())  # of few numbers: NumPy takes longer to begin
        record.offloaded[layer][b] = covered * found.sampled.shape[1]
        if found.budget is not None:
            record.budgets[layer][b] = sum(found.budget[b].tolist()) / found.budget.shape[1]

    def _note_error(
        self, layer: int, count: int, b: int, index: Index, error: np.ndarray, record: StepRecorder
    ) -> None:  # fmt: skip
        """Record the estimated relative error [H] of sequence b."""
        record.squares.setdefault(layer, [None] * count)[b] = sum(e * e for e in error.tolist()) / len(error)
        record.lessons.append((index, error))

    def _measure(
        self, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], queries: torch.Tensor, attended: Partial,
        rule: LogitRule, record: StepRecorder,
    ) -> None:  # fmt: skip
        """How far the results of the sampled sequences are off, if that is asked for."""
        if record.errors is None:
            return
        picked = [b for b, flag in enumerate(sampled) if flag]
        chosen = [caches[b] for b in picked]
        q = queries[picked].contiguous()
        truth = attend_step(q, chosen, [0] * len(chosen), rule, self._threads, self._staging)
        size = truth.out.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        record.errors.append((attended.out[picked] - truth.out).norm(dim=-1) / size)


def _in_sight(cache: LayerCache) -> int:
    """The first row of the store that the next token may attend to."""
    window = cache.spec.window
    first = 0 if window is None else cache.length - window + 1
    return min(max(0, first - cache.shape.sink), cache.store.length)
