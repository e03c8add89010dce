"""Attention of one layer's decode step, several ways in turns: the sampler, own exact attention, torch's.

`VARIANTS` is the table of ways: a name and a function that prepares a layer for it. A later sampler adds a line.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from magicpig_cli.bench.layer_tensors import IndexedLayer
from magicpig_cli.bench.signed_layer import SignedLayer
from magicpig_cli.bench.timing import ColdCache, median_ns
from magicpig_cli.bench.turns import Attend, Way, in_turns


def _lsh(layer: IndexedLayer, threads: int = 1) -> Attend:
    return lambda step: layer.attend(step, threads)


def _rabitq(layer: IndexedLayer, with_error: bool = False) -> Attend:
    signed = SignedLayer(layer.tensors, layer.store, threads=1)
    return lambda step: signed.attend(layer.q[step : step + 1], 1, with_error)


def _exact(layer: IndexedLayer) -> Attend:
    return lambda step: layer.attend_exactly(step, 1)


def _hash(layer: IndexedLayer) -> Attend:
    return lambda step: layer.hasher.query_codes(layer.q[step : step + 1])


def _sdpa(layer: IndexedLayer, dtype: torch.dtype) -> Attend:
    """torch with the group's heads folded into rows: [1, Hkv, G, D] against [1, Hkv, N, D], both contiguous.

    Its `enable_gqa` with one query row is 3–10 times slower (EVIDENCE.md section 1), so that would be no opponent.
    """
    tensors = layer.tensors
    keys = tensors.rows[None, :, :, 0].to(dtype).contiguous()
    values = tensors.rows[None, :, :, 1].to(dtype).contiguous()
    q = tensors.q.reshape(tensors.steps, 1, tensors.kv_heads, -1, tensors.head_dim).to(dtype)
    return lambda step: scaled_dot_product_attention(q[step], keys, values, scale=tensors.scale)


VARIANTS: dict[str, Way] = {
    "lsh": _lsh,
    "rabitq": _rabitq,
    "exact": _exact,
    "sdpa_f32": lambda layer: _sdpa(layer, torch.float32),
    "sdpa_bf16": lambda layer: _sdpa(layer, torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class AttendTimes:
    """Medians over the steps of one layer, one thread, cold caches."""

    sampled: float  # ratio, of lsh
    rabitq_sampled: float  # ratio
    us_per_head: dict[str, float]  # by variant; per query head
    stage_us: dict[str, float]  # of lsh, per query head; scan: what rabitq has for retrieve


def measure_attend(layer: IndexedLayer, cold: ColdCache, reps: int) -> AttendTimes:
    """All variants in turns, and the hashing of the queries, which lsh needs before its call."""
    with torch.inference_mode():
        also: dict[str, Way] = {"hash": _hash, "rabitq_error": lambda layer: _rabitq(layer, with_error=True)}
        samples = in_turns(layer, {**VARIANTS, **also}, reps, cold)
    heads = layer.tensors.heads
    us = {name: median_ns(timed) / heads / 1e3 for name, timed in samples.items()}
    stages = [sample.result.stage_ns for sample in samples["lsh"]]
    scans = [sample.result.stage_ns["retrieve"] for sample in samples["rabitq"]]
    taken = [sample.result.sampled.mean() for sample in samples["rabitq"]]
    return AttendTimes(
        sampled=layer.sampled_ratio(),
        rabitq_sampled=float(np.mean(taken)) / layer.tensors.n,
        us_per_head={name: us[name] for name in (*VARIANTS, "rabitq_error")},
        stage_us={
            "hash": us["hash"],
            **{stage: float(np.median([of[stage] for of in stages])) / heads / 1e3 for stage in stages[0]},
            "scan": float(np.median(scans)) / heads / 1e3,
        },
    )


def measure_scaling(layer: IndexedLayer, cold: ColdCache, reps: int) -> float:
    """How many times faster the sampled call of a layer is on two threads than on one."""
    samples = in_turns(layer, {"one": _lsh, "two": lambda layer: _lsh(layer, threads=2)}, reps, cold)
    return median_ns(samples["one"]) / median_ns(samples["two"])
