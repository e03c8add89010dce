"""What int8 rows gain and cost against bfloat16 rows: speed of the sampled call, error of its output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magicpig_cli.bench.layer_tensors import IndexedLayer, stored
from magicpig_cli.bench.timing import ColdCache, median_ns
from magicpig_cli.bench.turns import Attend, in_turns


def int8_speedup(layer: IndexedLayer, cold: ColdCache, reps: int) -> float:
    """Times by which the sampled call is faster over int8 rows; the same keys are sampled from the same tables."""
    samples = in_turns(layer, {"bfloat16": _over_bfloat16, "int8": _over_int8}, reps, cold)
    return median_ns(samples["bfloat16"]) / median_ns(samples["int8"])


def _over_bfloat16(layer: IndexedLayer) -> Attend:
    return lambda step: layer.attend(step, 1)


def _over_int8(layer: IndexedLayer) -> Attend:
    narrow = stored(layer.tensors.rows, "int8")
    return lambda step: layer.attend(step, 1, narrow.table)


def int8_errors(layers: Sequence[IndexedLayer], threads: int) -> dict[str, float]:
    """RMS of ‖o8 − o16‖ / ‖o16‖ over layers, steps and query heads: over all rows, and over the same sampled ones.

    `worst_layer` is the largest RMS of one layer, either way.
    """
    exact, sampled = [], []  # squared errors [S, H] of each layer
    for layer in layers:
        table = stored(layer.tensors.rows, "int8").table
        steps = range(layer.tensors.steps)
        exact.append([
            _squared_error(layer.attend_exactly(s, threads, table).out, layer.attend_exactly(s, threads).out)
            for s in steps
        ])  # fmt: skip
        sampled.append([
            _squared_error(layer.attend(s, threads, table).out, layer.attend(s, threads).out) for s in steps
        ])  # fmt: skip
    worst = max(float(np.mean(of_layer)) for of_layer in exact + sampled)
    return {
        "rel_error": float(np.mean(exact)) ** 0.5,
        "rel_error_sampled": float(np.mean(sampled)) ** 0.5,
        "worst_layer": worst**0.5,
    }


def _squared_error(out: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(‖out − wanted‖ / ‖wanted‖)² by head [H], of [1, H, D]; 0 where nothing was sampled in either."""
    distance, size = ((out - wanted) ** 2).sum(axis=-1)[0], (wanted**2).sum(axis=-1)[0]
    squares: np.ndarray = np.divide(distance, size, out=np.zeros_like(distance), where=size > 0)
    return squares
