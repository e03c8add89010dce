"""Keys and queries that have the geometry of a language model's without running one.

Keys of a head form a narrow cone: the cosine to their mean is about 0.9 (paper section 3; the demo model's are alike).
Around the mean they lie in clusters of very unequal size, as tokens and topics do. Queries point away from the mean,
so a key matters only by how it differs from it, and few do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli.bench.layer_tensors import IndexedLayer, LayerTensors

CONE_COSINE = 0.9  # of a key to the mean of all
CLUSTERS = 256  # cluster j holds a share proportional to 1 / (j + 1)
_TOGETHER = 0.4  # cosine between two keys of a cluster, after centring: fullest bucket 17 times the mean (demo: 7–22)
_APART = 0.3  # size of what a head has of its own: a group of 4 reads 2.75 times one head (demo, group of 3: 2.3)
_MOST_CLOSENESS = 8.0  # beyond it a query is a cluster's centre
_BISECTIONS = 16


@dataclass(frozen=True, slots=True)
class SyntheticShape:
    """Sizes of a layer: n keys, `steps` decode steps."""

    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    n: int
    steps: int = 4


class SyntheticLayer:
    """Keys and values, drawn once, and queries at any closeness to the clusters. A function of shape and seed."""

    def __init__(self, shape: SyntheticShape, seed: int = 0) -> None:
        self.shape = shape
        self._rng = np.random.default_rng(seed)
        heads, group, dim = shape.kv_heads, shape.group, shape.head_dim
        self._mean = _directions(self._rng, heads, dim)
        self._centres = _directions(self._rng, heads * CLUSTERS, dim).reshape(heads, CLUSTERS, dim)
        self.rows = torch.stack([self._draw_head(head) for head in range(heads)])
        targets = self._rng.choice(CLUSTERS, size=(shape.steps, heads), p=_shares())
        self._targets = self._centres[np.arange(heads), targets][:, :, None]  # [S, Hkv, 1, D]
        own = _directions(self._rng, shape.steps * heads * group, dim)
        self._own = own.reshape(shape.steps, heads, group, dim)

    def _draw_head(self, head: int) -> torch.Tensor:
        """Rows bfloat16 [N, 2, D] of one KV head; keys are of size √D, values standard normal."""
        n, dim = self.shape.n, self.shape.head_dim
        cluster = self._rng.choice(CLUSTERS, size=n, p=_shares())
        rows = self._rng.standard_normal((n, 2, dim), dtype=np.float32)
        keys = rows[:, 0]
        keys *= np.float32(((1 - _TOGETHER) / dim) ** 0.5)
        keys += np.float32(_TOGETHER**0.5) * self._centres[head, cluster]
        keys *= np.float32((1 - CONE_COSINE**2) ** 0.5)
        keys += np.float32(CONE_COSINE) * self._mean[head]
        keys *= np.float32(dim**0.5)
        return torch.from_numpy(rows).to(torch.bfloat16)

    def tensors(self, closeness: float) -> LayerTensors:
        """The layer with queries that lean towards one cluster per group and step; 0: towards none."""
        q = -self._mean[:, None] + np.float32(closeness) * self._targets + np.float32(_APART) * self._own
        q *= np.float32(self.shape.head_dim**0.5) / np.linalg.norm(q, axis=-1, keepdims=True)
        flat = q.reshape(self.shape.steps, -1, self.shape.head_dim)
        return LayerTensors(torch.from_numpy(flat), self.rows, self.shape.head_dim**-0.5)


def calibrated(shape: SyntheticShape, ratio: float, seed: int = 0, threads: int = 1) -> IndexedLayer:
    """An indexed layer whose queries sample `ratio` of the keys, measured with its tables at the default K and L.

    Bisects the closeness of the queries. ValueError: no closeness gives that ratio.
    """
    layer = SyntheticLayer(shape, seed)
    indexed = IndexedLayer(layer.tensors(0.0), threads=threads)
    low, high = 0.0, _MOST_CLOSENESS
    ends = [_ratio_at(indexed, layer, closeness, threads) for closeness in (low, high)]
    if not ends[0] <= ratio <= ends[1]:
        raise ValueError(f"ratio: these keys can give {ends[0]:.4f} to {ends[1]:.4f}, got {ratio}")
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _ratio_at(indexed, layer, middle, threads) < ratio else (low, middle)
    _ratio_at(indexed, layer, high, threads)
    return indexed


def _ratio_at(indexed: IndexedLayer, layer: SyntheticLayer, closeness: float, threads: int) -> float:
    indexed.ask(layer.tensors(closeness))
    return indexed.sampled_ratio(threads)


def _shares() -> np.ndarray:
    """Zipf: float64 [CLUSTERS], adding up to 1."""
    weights = 1 / np.arange(1, CLUSTERS + 1)
    shares: np.ndarray = weights / weights.sum()
    return shares


def _directions(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    """Independent uniform unit vectors, float32 [count, D]."""
    x = rng.standard_normal((count, dim), dtype=np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x
