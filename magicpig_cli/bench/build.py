"""What it costs to build the tables of one KV head, and the bytes they take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.bench.layer_tensors import LayerTensors, hashing, stored
from magicpig_cli.bench.timing import ColdCache, interleave, median_ns
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.config import DEFAULT_K, DEFAULT_L


def measure_build(tensors: LayerTensors, cold: ColdCache, reps: int) -> dict[str, float]:
    """Index of the first KV head's rows on one thread (mean, codes, tables), and its sort against torch's.

    Both sort the same codes of all rows, table by table. torch gets int16, which it sorts faster than int32, and its
    result (order of rows, no offsets) is less than what a table needs.
    """
    rows = tensors.rows[:1]
    hasher, store = hashing(tensors, DEFAULT_K, DEFAULT_L, 0, 1), stored(rows)
    index = LshIndex(hasher, store, 1)
    codes = hasher.codes(store, 0, store.length, hasher.bias(index.mean))  # uint16 [1, L, N]
    limit = kernels.MAX_SEGMENT_ROWS
    parts = [np.ascontiguousarray(codes[:, :, start : start + limit]) for start in range(0, store.length, limit)]
    for_torch = torch.from_numpy(codes[0].astype(np.int16))  # [L, N]
    calls: dict[str, Callable[[int], object]] = {
        "index": lambda _: LshIndex(hasher, store, 1),
        "sort": lambda _: [kernels.build_segment(part, DEFAULT_K, 0, 1) for part in parts],
        "torch": lambda _: [torch.sort(table) for table in for_torch],
    }
    samples = interleave(calls, reps, cold)
    return {
        "index_s": median_ns(samples["index"]) / 1e9,
        "sort_s": median_ns(samples["sort"]) / 1e9,
        "sort_speedup": median_ns(samples["torch"]) / median_ns(samples["sort"]),
        "index_bytes_per_token": index.nbytes / store.length,
    }
