"""Attention of one layer's decode step, several ways in turns: the sampler, own exact attention, torch's.

`VARIANTS` is the table of ways: a name and a function that prepares a layer for it. A later sampler adds a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from magicpig_cli.bench.layer_tensors import IndexedLayer
from magicpig_cli.bench.timing import ColdCache, interleave, median_ns

Call = Callable[[int], Any]  # attends with the queries of this step


def _lsh(layer: IndexedLayer, threads: int) -> Call:
    return lambda step: layer.attend(step, threads)


def _exact(layer: IndexedLayer, threads: int) -> Call:
    return lambda step: layer.attend_exactly(step, threads)


def _sdpa(layer: IndexedLayer, dtype: torch.dtype) -> Call:
    """torch with the group's heads folded into rows: [1, Hkv, G, D] against [1, Hkv, N, D], both contiguous.

    Its `enable_gqa` with one query row is 3–10 times slower (EVIDENCE.md section 1), so that would be no opponent.
    """
    tensors = layer.tensors
    keys = tensors.rows[None, :, :, 0].to(dtype).contiguous()
    values = tensors.rows[None, :, :, 1].to(dtype).contiguous()
    q = tensors.q.reshape(tensors.steps, 1, tensors.kv_heads, -1, tensors.head_dim).to(dtype)
    return lambda step: scaled_dot_product_attention(q[step], keys, values, scale=tensors.scale)


VARIANTS: dict[str, Callable[[IndexedLayer, int], Call]] = {
    "lsh": _lsh,
    "exact": _exact,
    "sdpa_f32": lambda layer, _: _sdpa(layer, torch.float32),
    "sdpa_bf16": lambda layer, _: _sdpa(layer, torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class AttendTimes:
    """Medians over the steps of one layer, one thread, cold caches."""

    sampled: float  # ratio
    us_per_head: dict[str, float]  # by variant; per query head
    stage_us: dict[str, float]  # of lsh, per query head


def measure_attend(layer: IndexedLayer, cold: ColdCache, reps: int) -> AttendTimes:
    """All variants in turns, each repetition with the next step's queries."""
    calls = {name: _over_steps(prepare(layer, 1), layer) for name, prepare in VARIANTS.items()}
    calls["hash"] = _over_steps(lambda step: layer.hasher.query_codes(layer.tensors.q[step : step + 1]), layer)
    with torch.inference_mode():
        samples = interleave(calls, reps, cold)
    heads = layer.tensors.heads
    hash_us = median_ns(samples.pop("hash")) / heads / 1e3
    stages = [sample.result.stage_ns for sample in samples["lsh"]]
    return AttendTimes(
        sampled=layer.sampled_ratio(),
        us_per_head={name: median_ns(timed) / heads / 1e3 for name, timed in samples.items()},
        stage_us={
            "hash": hash_us,
            **{stage: float(np.median([of[stage] for of in stages])) / heads / 1e3 for stage in stages[0]},
        },
    )


def _over_steps(call: Call, layer: IndexedLayer) -> Call:
    return lambda rep: call(rep % layer.tensors.steps)


def measure_scaling(layer: IndexedLayer, cold: ColdCache, reps: int) -> float:
    """How many times faster the sampled call of a layer is on two threads than on one."""
    steps = layer.tensors.steps
    calls: dict[str, Call] = {
        "one": lambda rep: layer.attend(rep % steps, 1),
        "two": lambda rep: layer.attend(rep % steps, 2),
    }
    samples = interleave(calls, reps, cold)
    return median_ns(samples["one"]) / median_ns(samples["two"])
