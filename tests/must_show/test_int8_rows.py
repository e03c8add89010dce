"""What int8 rows cost on real tensors of the demo model: attention on them beside attention on bfloat16 rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.estimator import log_weight_table
from magicpig_cli.attention.lsh import LshHasher
from magicpig_cli.attention.rotation import rotation
from magicpig_cli.bench.fill import fill_ids
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import mean_key
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine

TOKENS, STEPS = 6144, 8
K, L = 10, 150


@pytest.fixture(scope="module")
def engine(demo_available) -> Engine:
    return Engine.load(Settings(ModelOptions("demo"), AttentionOptions(mode="exact", kv_dtype="bfloat16")))


def capture(engine: Engine, monkeypatch) -> tuple[list[np.ndarray], list[torch.Tensor], list[np.ndarray], float]:
    """Per layer: queries float32 [STEPS, H, D], offloaded rows [Hkv, N, 2, D] and window rows; the logits' scale."""
    ids = fill_ids(engine, TOKENS)
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, ids[:-STEPS]))
    queries: dict[int, list[torch.Tensor]] = {}
    scales, step = set(), Attention.step

    def listen(self, layer, caches, sampled, q, key, value, rule, record):
        queries.setdefault(layer, []).append(q[0, :, 0].float().clone())
        scales.add(rule.scale)
        return step(self, layer, caches, sampled, q, key, value, rule, record)

    monkeypatch.setattr(Attention, "step", listen)
    for token in ids[-STEPS:]:
        engine.runner.decode([sequence], [token])
    (scale,) = scales
    return (
        [torch.stack(queries[layer]).numpy() for layer in range(len(sequence.layers))],
        [layer.store.read(0, layer.store.length) for layer in sequence.layers],
        [layer.window.valid.float().numpy() for layer in sequence.layers],
        scale,
    )


class Layer:
    """Attention to the same offloaded rows, stored as bfloat16, and rotated as int8."""

    def __init__(self, number: int, q: np.ndarray, rows: torch.Tensor, scale: float) -> None:
        self.scale, (heads, count, _, dim) = scale, rows.shape
        basis = torch.from_numpy(rotation(dim))
        turned = torch.stack([(rows[:, :, 0].float() @ basis).bfloat16(), rows[:, :, 1]], dim=2)
        self.stores = [RowStore(BlockPool(heads, dim, dtype, 1024)) for dtype in ("bfloat16", "int8")]
        for store, stored in zip(self.stores, (rows, turned), strict=True):
            store.append(stored)
        self.queries = [q, (torch.from_numpy(q) @ basis).numpy()]
        mean = mean_key(self.stores[0])
        self.means = [mean, (torch.from_numpy(mean) @ basis).numpy()]
        hasher = LshHasher(number, dim, K, L, 0, 1, Staging(torch.device("cpu")))
        codes = hasher.codes(self.stores[0], 0, count, hasher.bias(mean))
        self.segment = kernels.build_segment(codes, K, 0, 1)
        self.codes = hasher.query_codes(torch.from_numpy(q))

    def exact(self, which: int) -> tuple[np.ndarray, np.ndarray]:
        """Output [STEPS, H, D] and LSE [STEPS, H] over all rows."""
        table, q = self.stores[which].table, self.queries[which]
        runs = [[(table, 0, self.stores[which].length)]] * len(q)
        done = kernels.exact_attend(q, runs, scale=self.scale, threads=1)
        return done.out, done.lse

    def sampled(self, which: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of the estimate from the rows that the bfloat16 codes sample."""
        group = kernels.SampledRows(self.stores[which].table, self.means[which], [self.segment])
        done = kernels.lsh_attend(
            self.queries[which], self.codes, [group] * len(self.codes), log_weight_table(K, L), scale=self.scale,
            threads=1,
        )  # fmt: skip
        return done.out, done.lse


def merged(part: tuple[np.ndarray, np.ndarray], window: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    share = 1 / (1 + np.exp(window[1].astype(np.float64) - part[1]))[..., None]
    return part[0] * share + window[0] * (1 - share)


def relative(mine: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.linalg.norm(mine - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)


@pytest.mark.slow
def test_error_against_bfloat16_rows(engine, monkeypatch, record_property):
    """≤ 1% of the output, RMS over heads and steps: of each layer's attention, and of the offloaded part over all."""
    queries, stored, windows, scale = capture(engine, monkeypatch)
    whole, part = {"exact": [], "sampled": []}, {"exact": [], "sampled": []}
    for number, (q, rows, window) in enumerate(zip(queries, stored, windows, strict=True)):
        layer = Layer(number, q, rows, scale)
        near = kernels.RowTable(window.shape[0], window.shape[3], "float32", window.shape[1])
        near.append_block(window)
        done = kernels.exact_attend(q, [[(near, 0, window.shape[1])]] * len(q), scale=scale, threads=1)
        for kind, attend in (("exact", layer.exact), ("sampled", layer.sampled)):
            bfloat16, int8 = attend(0), attend(1)
            part[kind].append(relative(int8[0], bfloat16[0]))
            whole[kind].append(relative(*(merged(found, (done.out, done.lse)) for found in (int8, bfloat16))))
    for kind in ("exact", "sampled"):
        layers = np.sqrt((np.stack(whole[kind]) ** 2).mean(axis=(1, 2)))
        offloaded = float(np.sqrt((np.stack(part[kind]) ** 2).mean()))
        print(
            f"int8 rows, {kind}: {np.sqrt((layers**2).mean()):.3%}, worst layer {layers.max():.3%}; "
            f"offloaded part alone {offloaded:.3%}"
        )
        record_property(f"int8_{kind}_error", float(layers.max()))
        assert layers.max() <= 0.01
        assert offloaded <= 0.01
