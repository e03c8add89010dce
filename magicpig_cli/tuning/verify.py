"""Real tables against the prediction: the engine's own attention step over captured queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import StepRecorder
from magicpig_cli.attention.lsh import LshSampler
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.kernels import RowType
from magicpig_cli.planner import Plan
from magicpig_cli.tuning.capture import Capture, Layer


@dataclass
class LayerQuality:
    """What sampling did to one layer, over all depths, steps and hash seeds."""

    sampled: int = 0  # Σ over query heads and steps
    offloaded: int = 0
    errors: list[np.ndarray] = field(default_factory=list)  # relative errors, float64 [B · H] per step

    @property
    def ratio(self) -> float:
        return self.sampled / self.offloaded

    @property
    def error(self) -> float:
        """RMS over query heads and steps."""
        return float(np.sqrt(np.mean(np.square(np.concatenate(self.errors)))))


class Replay:
    """Runs captured steps through tables of one (K, L), layer by layer, in memory of its own."""

    def __init__(self, capture: Capture, plan: Plan, device: torch.device) -> None:
        self._capture, self._plan = capture, plan
        self._staging = Staging(device)

    def run(
        self, layers: tuple[int, ...], K: int, L: int, seeds: range
    ) -> Iterator[tuple[int, LayerQuality]]:  # fmt: skip
        """Yields each layer with what was measured, every depth and seed together."""
        samplers = [LshSampler(K, L, seed, self._plan.threads, self._staging) for seed in seeds]
        for number in layers:
            layer, quality = self._capture.layer(number), LayerQuality()
            for sampler in samplers:
                for depth in range(len(self._capture.lengths)):
                    self._steps(layer, depth, sampler, quality)
                sampler.forget(number)
            yield number, quality

    def _steps(self, layer: Layer, depth: int, sampler: LshSampler, quality: LayerQuality) -> None:
        """All steps of one depth: tables over what is offloaded there, then token by token as the engine does."""
        attention = Attention(sampler, layer.rows.dtype, self._plan.threads, self._staging)
        cache, length = self._cache(layer), self._capture.lengths[depth]
        cache.extend(layer.rows[:, :length])
        attention.build_index(layer.number, cache)
        for step, q in enumerate(self._staging.to_device(layer.q[depth])):
            record = StepRecorder(errors=[])
            row = self._staging.to_device(layer.rows[:, length + step])
            key, value = (part[None, :, None] for part in row.unbind(dim=1))
            attention.step(layer.number, [cache], [True], q[None, :, None], key, value, layer.rule, record)
            quality.sampled += record.sampled[layer.number][0]
            quality.offloaded += record.offloaded[layer.number][0]
            assert record.errors is not None
            quality.errors += [errors.flatten().double().cpu().numpy() for errors in record.errors]

    def _cache(self, layer: Layer) -> LayerCache:
        kv_heads, _, _, head_dim = layer.rows.shape
        window = WindowShape(self._plan.sink, self._plan.local, self._plan.flush)
        row_type: RowType = self._plan.row_dtype
        pool = BlockPool(kv_heads, head_dim, row_type, self._plan.block_rows)
        return LayerCache(LayerSpec(kv_heads, head_dim), window, pool, self._staging)
