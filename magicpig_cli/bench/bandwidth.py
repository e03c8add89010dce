"""What memory gives to one thread, and how much of it the kernels reach over the same rows in the same run."""

from __future__ import annotations

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.bench.attend_case import VARIANTS
from magicpig_cli.bench.layer_tensors import IndexedLayer
from magicpig_cli.bench.timing import ColdCache, Timed, median_ns
from magicpig_cli.bench.turns import Attend, Way, in_turns


def measure_bandwidth(layer: IndexedLayer, cold: ColdCache, reps: int) -> dict[str, float]:
    """Sequential and sorted-row bandwidth, and the share of it that exact attention and the gather of lsh reach.

    Exact attention is held against a sequential read of the store's blocks, the attend stage against a read of the
    union rows of each group in the same order.
    """
    table, steps = layer.store.table, layer.tensors.steps
    ways: dict[str, Way] = {
        "exact": VARIANTS["exact"],
        "sequential": _sequential,
        "lsh": lambda layer: lambda step: layer.attend(step, 1).stage_ns["attend"],
        "rows": _rows,
    }
    samples = in_turns(layer, ways, reps, cold)
    unions = [layer.union_rows(step) for step in range(steps)]
    rows_bytes = kernels.row_bytes(table.head_dim, table.dtype)
    exact_bytes = layer.store.length * table.kv_heads * rows_bytes
    union_bytes = [sum(map(len, union)) * rows_bytes for union in unions]
    sequential = sum(block.nbytes for block in table.blocks) / _median_result(samples["sequential"])
    sorted_rows = _rate(samples["rows"], union_bytes)
    return {
        "sequential_gb_s": sequential,
        "sorted_row_gb_s": sorted_rows,
        "exact_fraction": exact_bytes / median_ns(samples["exact"]) / sequential,
        "gather_fraction": _rate(samples["lsh"], union_bytes) / sorted_rows,
    }


def _sequential(layer: IndexedLayer) -> Attend:
    """Reads all blocks of the store: nanoseconds."""
    blocks = [block.reshape(-1).view(np.uint8) for block in layer.store.table.blocks]
    return lambda _: sum(kernels.read_sequential(block, 1) for block in blocks)


def _rows(layer: IndexedLayer) -> Attend:
    """Reads the union rows of each group: nanoseconds."""
    unions = [layer.union_rows(step) for step in range(layer.tensors.steps)]
    return lambda step: sum(
        kernels.read_rows(layer.store.table, head, rows, 1) for head, rows in enumerate(unions[step])
    )


def _median_result(samples: list[Timed]) -> float:
    return float(np.median([sample.result for sample in samples]))


def _rate(samples: list[Timed], step_bytes: list[int]) -> float:
    """Median bytes per nanosecond (GB/s), where the result of a call is its time and step i read step_bytes[i]."""
    return float(np.median([step_bytes[i % len(step_bytes)] / timed.result for i, timed in enumerate(samples)]))
