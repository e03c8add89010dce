"""What int8 rows gain and cost against bfloat16 rows: speed of the sampled call, error of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import Partial
from magicpig_cli.attention.merge import merge
from magicpig_cli.attention.rotation import rotation
from magicpig_cli.bench.attend_case import VARIANTS
from magicpig_cli.bench.layer_tensors import IndexedLayer, LayerTensors, stored
from magicpig_cli.bench.timing import ColdCache, median_ns
from magicpig_cli.bench.turns import Attend, in_turns
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import DEFAULT_LOCAL, DEFAULT_SINK


def int8_speedup(layer: IndexedLayer, cold: ColdCache, reps: int) -> float:
    """Times by which the sampled call is faster over int8 rows; the same keys are sampled from the same tables."""
    samples = in_turns(layer, {"bfloat16": VARIANTS["lsh"], "int8": _over_int8}, reps, cold)
    return median_ns(samples["bfloat16"]) / median_ns(samples["int8"])


def _over_int8(layer: IndexedLayer) -> Attend:
    narrow = stored(layer.tensors.rows, "int8")
    return lambda step: layer.attend(step, 1, narrow.table)


def int8_errors(layers: Sequence[LayerTensors], threads: int) -> dict[str, float]:
    """RMS of ‖o8 − o16‖ / ‖o16‖ over layers, steps and query heads (CLI.md, "error"): int8 against bfloat16 rows.

    As in the engine, sink and window stay bfloat16. `rel_error` is of exact attention, `rel_error_sampled` of the
    estimate from the same sampled keys, `rel_error_offloaded` of the int8 rows alone, which no model ever sees.
    """
    errors = np.array([_Int8Layer(tensors, threads).squared_errors() for tensors in layers])  # [layers, 3]
    exact, sampled, offloaded = np.sqrt(errors.mean(axis=0)).tolist()
    return {
        "rel_error": exact,
        "rel_error_sampled": sampled,
        "rel_error_offloaded": offloaded,
        "worst_layer": float(np.sqrt(errors[:, :2].max())),
    }


class _Int8Layer:
    """A layer twice: as it is, and as the engine holds it with int8 rows, where keys, queries and mean are rotated."""

    def __init__(self, tensors: LayerTensors, threads: int) -> None:
        sink, local = DEFAULT_SINK, tensors.n - DEFAULT_LOCAL
        self._scale, self._threads = tensors.scale, threads
        self._wide = IndexedLayer(replace(tensors, rows=tensors.rows[:, sink:local].contiguous()), threads=threads)
        turn = rotation(tensors.head_dim)
        rows = tensors.rows.float()
        rows[:, :, 0] = rows[:, :, 0] @ torch.from_numpy(turn)
        near = torch.cat([tensors.rows[:, :sink], tensors.rows[:, local:]], dim=1)
        turned_near = torch.cat([rows[:, :sink], rows[:, local:]], dim=1).to(torch.bfloat16)
        self._near = (stored(near), stored(turned_near))
        self._far = (self._wide.store, stored(rows[:, sink:local], "int8"))
        group = self._wide.index.sampled_rows()
        self._groups = (group, replace(group, table=self._far[1].table, mu=group.mu @ turn))
        self._q = (self._wide.q, self._wide.q @ turn)

    def squared_errors(self) -> tuple[float, float, float]:
        """Mean over steps and heads: exact, sampled, and exact over the offloaded rows alone."""
        near, far = self._exact(self._near), self._exact(self._far)
        estimate = [self._sampled(which) for which in (0, 1)]
        return (
            _squared_error(*(merge(a, b).out for a, b in zip(near, far, strict=True))),
            _squared_error(*(merge(a, b).out for a, b in zip(near, estimate, strict=True))),
            _squared_error(*(part.out for part in far)),
        )

    def _exact(self, stores: tuple[RowStore, RowStore]) -> list[Partial]:
        """Over all rows of the one and of the other store, for every step: [S, H, D]."""
        done = [
            kernels.exact_attend(
                q, [[(store.table, 0, store.length)]] * len(q), scale=self._scale, threads=self._threads
            )
            for q, store in zip(self._q, stores, strict=True)
        ]
        return [Partial(torch.from_numpy(part.out), torch.from_numpy(part.lse)) for part in done]

    def _sampled(self, which: int) -> Partial:
        q, group = self._q[which], self._groups[which]
        codes, weights = self._wide.codes, self._wide.weights
        done = kernels.lsh_attend(q, codes, [group] * len(q), weights, scale=self._scale, threads=self._threads,
                                  with_error=False)  # fmt: skip
        return Partial(torch.from_numpy(done.out), torch.from_numpy(done.lse))


def _squared_error(wanted: torch.Tensor, out: torch.Tensor) -> float:
    """Mean of (‖out − wanted‖ / ‖wanted‖)² over [S, H, D]."""
    return float(((out - wanted).square().sum(dim=-1) / wanted.square().sum(dim=-1)).mean())
