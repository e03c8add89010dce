"""A real index against the prediction: the engine's own attention step over captured queries, keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import Sampler, StepRecorder
from magicpig_cli.attention.estimator import Floats
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.config import MAX_SEED
from magicpig_cli.engine.samplers import make_sampler
from magicpig_cli.planner import Plan
from magicpig_cli.tuning.capture import Capture, Layer


@dataclass(frozen=True, slots=True)
class LayerQuality:
    """What sampling did to one layer, at every depth and step."""

    squares: Floats  # mean over query heads of the squared relative error, float64 [depths, S]
    sampled: Floats  # keys, summed over query heads, float64 [depths, S]
    offloaded: Floats

    @property
    def ratio(self) -> float:
        return float(self.sampled.sum() / self.offloaded.sum())

    @property
    def error(self) -> float:
        """RMS over query heads, steps and depths."""
        return float(np.sqrt(self.squares.mean()))

    def without(self, step: int) -> LayerQuality:
        """The same, but for one step at each depth."""
        return LayerQuality(*(np.delete(x, step, axis=1) for x in (self.squares, self.sampled, self.offloaded)))


@dataclass(frozen=True, slots=True)
class Quality:
    """Error and ratio of several layers as CLI.md defines them, and how far other steps could move them."""

    error: float  # RMS of each layer, averaged
    ratio: float  # Σ sampled / Σ offloaded
    error_deviation: float  # standard error, relative
    ratio_deviation: float

    @classmethod
    def of(cls, layers: Iterable[LayerQuality]) -> Quality:
        """Standard errors by the jackknife: each step left out in turn, at every depth at once."""
        layers = list(layers)
        steps = layers[0].squares.shape[1]
        error, ratio = _error_and_ratio(layers)
        others = np.array([_error_and_ratio([layer.without(step) for layer in layers]) for step in range(steps)])
        deviation = np.sqrt((steps - 1) * others.var(axis=0))
        return cls(error, ratio, float(deviation[0]) / max(error, 1e-30), float(deviation[1]) / max(ratio, 1e-30))


def _error_and_ratio(layers: list[LayerQuality]) -> tuple[float, float]:
    sampled = sum(float(layer.sampled.sum()) for layer in layers)
    offloaded = sum(float(layer.offloaded.sum()) for layer in layers)
    return float(np.mean([layer.error for layer in layers])), sampled / offloaded


class Replay:
    """Runs captured steps through a sampler, layer by layer, in memory of its own."""

    def __init__(self, capture: Capture, plan: Plan, device: torch.device, hash_seed: int) -> None:
        """Every depth has an index of its own, drawn with hash_seed, hash_seed + 1, …"""
        self._capture, self._plan = capture, plan
        self._staging = Staging(device)
        self._seeds = [(hash_seed + depth) % (MAX_SEED + 1) for depth in range(len(capture.lengths))]

    def run(self, layers: Iterable[int], sampling: Plan) -> Iterator[tuple[int, LayerQuality]]:
        """Yields each layer with what was measured of the sampler of that plan."""
        assert sampling.sampler is not None
        samplers = [make_sampler(sampling.sampler, sampling, seed, self._staging) for seed in self._seeds]
        for number in layers:
            layer = self._capture.layer(number)
            depths = [self._steps(layer, depth, sampler) for depth, sampler in enumerate(samplers)]
            for sampler in samplers:
                sampler.forget(number)
            yield number, LayerQuality(*(np.array(figures) for figures in zip(*depths, strict=True)))

    def _steps(self, layer: Layer, depth: int, sampler: Sampler) -> tuple[list[float], list[int], list[int]]:
        """All steps of one depth: an index over what is offloaded there, then token by token as the engine does."""
        attention = Attention(sampler, layer.rows.dtype, self._plan.threads, self._staging)
        cache, length = self._cache(layer), self._capture.lengths[depth]
        cache.extend(layer.rows[:, :length])
        attention.build_index(layer.number, cache)
        squares, sampled, offloaded = [], [], []
        for step, q in enumerate(self._staging.to_device(layer.q[depth])):
            record = StepRecorder(errors=[])
            row = self._staging.to_device(layer.rows[:, length + step])
            key, value = (part[None, :, None] for part in row.unbind(dim=1))
            attention.step(layer.number, [cache], [True], q[None, :, None], key, value, layer.rule, record)
            attention.finish(record)
            assert record.errors is not None
            squares.append(float(record.errors[0].double().square().mean()))
            sampled.append(record.sampled[layer.number][0])
            offloaded.append(record.offloaded[layer.number][0])
        return squares, sampled, offloaded

    def _cache(self, layer: Layer) -> LayerCache:
        kv_heads, _, _, head_dim = layer.rows.shape
        window = WindowShape(self._plan.sink, self._plan.local, self._plan.flush)
        pool = BlockPool(kv_heads, head_dim, self._plan.row_dtype, self._plan.block_rows)
        return LayerCache(LayerSpec(kv_heads, head_dim), window, pool, self._staging)
