"""What it costs to build the tables, or the signatures, of one KV head, and the bytes they take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.rabitq import signature_basis
from magicpig_cli.bench.layer_tensors import LayerTensors, hashing, stored
from magicpig_cli.bench.timing import ColdCache, claim_memory, interleave, median_ns
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.config import DEFAULT_BITS, DEFAULT_K, DEFAULT_L

# Claimed before each call, not once: what others gave back, the host of a virtual machine may have taken meanwhile. Our
# sort took 95 ms then, 33 in memory that is there; torch's, which takes 16 times as long, the same 530 either way.
_WRITTEN = 512 << 20  # bytes, at most, by one call: torch's ids are 118 MB, beside copies


def measure_build(tensors: LayerTensors, cold: ColdCache, reps: int) -> dict[str, float]:
    """Index of the first KV head's rows on one thread (mean, codes, tables), and its sort against torch's.

    Both sort the same codes. `sort_speedup` is over one torch.sort of all tables [L, N]; of int16, because that is
    not slower than int32. Given one table at a time torch takes another algorithm (radix sort, for integers in one
    dimension) and is several times faster: `sort_speedup_table_by_table`. Neither makes the offsets of the buckets.
    """
    rows = tensors.rows[:1]
    hasher, store = hashing(tensors, DEFAULT_K, DEFAULT_L, 0, 1), stored(rows)

    def build() -> LshIndex:
        index = LshIndex(hasher, store, 1)
        index.extend()
        return index

    index = build()
    parts = [kernels.segment_codes(segment) for segment in index.segments]  # uint16 [1, L, n] each
    for_torch = torch.from_numpy(np.concatenate(parts, axis=2)[0].astype(np.int16))  # [L, N]
    basis, signed = (
        signature_basis(0, tensors.layer, tensors.head_dim, DEFAULT_BITS),
        store.length // kernels.SIGNATURE_ROWS * kernels.SIGNATURE_ROWS,
    )
    calls: dict[str, Callable[[int], object]] = {
        "signatures": lambda _: kernels.sign_rows(store.table, 0, signed, basis, 1),
        "index": lambda _: build(),
        "sort": lambda _: [kernels.build_segment(part, DEFAULT_K, 0, 1) for part in parts],
        "torch": lambda _: torch.sort(for_torch, dim=1),
        "torch_tables": lambda _: [torch.sort(table) for table in for_torch],
    }

    def between(_: str) -> None:
        claim_memory(_WRITTEN)
        cold()

    samples = interleave(calls, reps, between)
    sort_ns = median_ns(samples["sort"])
    signatures_ns = median_ns(samples["signatures"])
    return {
        "index_s": median_ns(samples["index"]) / 1e9,
        "rabitq_index_s": signatures_ns / 1e9,
        "rabitq_speedup": median_ns(samples["index"]) / signatures_ns,
        "rabitq_bytes_per_token": samples["signatures"][0].result.nbytes / signed,
        "sort_s": sort_ns / 1e9,
        "sort_speedup": median_ns(samples["torch"]) / sort_ns,
        "sort_speedup_table_by_table": median_ns(samples["torch_tables"]) / sort_ns,
        "index_bytes_per_token": index.nbytes / store.length,
    }
