"""Whether an index that grows token by token costs more than one built at once, and whether a step ever stalls.

A step is all that attention does in one layer when a token is decoded: its row enters the cache, rows that leave the
window enter the index, the query is hashed, window and sampled rows are attended and merged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.attention.lsh import LshSampler
from magicpig_cli.bench.layer_tensors import BLOCK_ROWS, LayerTensors
from magicpig_cli.bench.timing import claim_memory, no_collection
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.config import DEFAULT_K, DEFAULT_L, DEFAULT_LOCAL, DEFAULT_SINK
from magicpig_cli.planner import FLUSH

START_ROWS = 1024  # prefilled, so that the index grows through all sizes
LAST_STEPS = 256  # compared with an index built at once
NEIGHBOURHOOD = 1025  # steps around one whose median says what a step of that context costs
REPLAYS = 3
WARMUP_STEPS = 32  # the last of `start` are appended too, untimed


@dataclass(frozen=True, slots=True)
class Growth:
    """Steps of a growing context, one thread, caches as they come (rows and tables exceed the L3)."""

    step_ratio: float  # at the end, over an index built at once from the same rows
    worst_over_median: float  # the worst step, each the least of REPLAYS, over the median of the steps around it
    worst_over_run_median: float  # over the median of all: also counts that a step costs more as the context grows
    worst_step: int
    median_ms: float


class _Steps:
    """One cache of one layer that is fed row by row."""

    def __init__(self, tensors: LayerTensors, sampler: LshSampler) -> None:
        staging = Staging(torch.device("cpu"))
        self._tensors, self._sampler = tensors, sampler
        self._attention = Attention(sampler, torch.bfloat16, 1, staging)
        pool = BlockPool(tensors.kv_heads, tensors.head_dim, "bfloat16", BLOCK_ROWS)
        window = WindowShape(DEFAULT_SINK, DEFAULT_LOCAL, FLUSH)
        self.cache = LayerCache(LayerSpec(tensors.kv_heads, tensors.head_dim), window, pool, staging)

    def prefill(self, rows: int) -> None:
        """Take the first `rows` rows at once and build the index over them."""
        self.cache.extend(self._tensors.rows[:, :rows])
        hasher = self._sampler.hasher(self._tensors.layer, self._tensors.head_dim)
        self.cache.index = LshIndex(hasher, self.cache.store, 1)
        self.cache.index.extend()

    def step(self) -> int:
        """Append the next row and attend: nanoseconds."""
        tensors, position = self._tensors, self.cache.length
        row = tensors.rows[None, :, position : position + 1]  # [1, Hkv, 1, 2, D]
        key, value = row[..., 0, :].float(), row[..., 1, :].float()
        q = tensors.q[position % tensors.steps][None, :, None]  # [1, H, 1, D]
        begin = time.perf_counter_ns()
        self._attention.step(
            tensors.layer, [self.cache], [True], q, key, value, LogitRule(tensors.scale), StepRecorder()
        )  # fmt: skip
        return time.perf_counter_ns() - begin


def measure_growth(tensors: LayerTensors, appended: int, start: int = START_ROWS) -> Growth:
    """Append `appended` rows one by one after `start`, REPLAYS times; then compare with an index built at once.

    tensors: at least start + appended + LAST_STEPS rows.
    """
    sampler = LshSampler(DEFAULT_K, DEFAULT_L, 0, 1, Staging(torch.device("cpu")))
    replays = np.empty((REPLAYS, appended))
    with torch.inference_mode(), no_collection():
        for replay in range(REPLAYS):
            claim_memory(min(2 << 30, 16 * tensors.rows.nbytes))  # rows, tables and what they are joined into
            grown = _Steps(tensors, sampler)
            grown.prefill(start - WARMUP_STEPS)
            for _ in range(WARMUP_STEPS):
                grown.step()
            replays[replay] = [grown.step() for _ in range(appended)]
        at_once = _Steps(tensors, sampler)
        at_once.prefill(start + appended)
        pairs = np.array([(grown.step(), at_once.step()) for _ in range(LAST_STEPS)])
    steps = replays.min(axis=0)
    local = steps / _local_medians(steps)
    last = np.median(pairs, axis=0)
    return Growth(
        step_ratio=float(last[0] / last[1]),
        worst_over_median=float(local.max()),
        worst_over_run_median=float(steps.max() / np.median(steps)),
        worst_step=int(local.argmax()),
        median_ms=float(np.median(steps) / 1e6),
    )


def _local_medians(steps: np.ndarray) -> np.ndarray:
    """Median over NEIGHBOURHOOD steps around each (fewer at the ends, where the first or last of them stand in)."""
    half = min(NEIGHBOURHOOD, len(steps)) // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(steps, half, mode="reflect"), 2 * half + 1)
    medians: np.ndarray = np.median(windows[: len(steps)], axis=1)
    return medians
