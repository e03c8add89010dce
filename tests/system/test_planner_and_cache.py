"""The planner's byte counts against what a cache really holds, however a sequence grew."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from magicpig_cli import hardware
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.cache.store import RowStore
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.kernels import MAX_SEGMENT_ROWS
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner import Plan, plan
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("turns", [(1200,), (400, 100, 700), (1199, 1)])
def test_bytes_of_a_sequence(family, turns, kv_dtype):
    model = tiny_model(family)
    shape = shape_from_config(model.config)
    options = AttentionOptions(mode="lsh", K=5, L=12, kv_dtype=kv_dtype)
    chosen = plan(hardware.probe(), shape, Settings(attention=options, threads=1))
    runner = ModelRunner(model, shape, chosen, torch.device("cpu"), hash_seed=0)
    sequence = runner.new_sequence()
    for turn in turns:
        list(runner.prefill(sequence, torch.arange(turn).remainder(250).tolist()))
        runner.build_index(sequence)
    assert sequence.kv_bytes == chosen.kv_bytes(1200)
    assert sequence.index_bytes == chosen.index_bytes(1200)
    windows = sum(layer.window.rows.nbytes for layer in sequence.layers)
    assert windows == chosen.window_bytes()


# One sampled layer with one head whose rows are two numbers: what grows is the index, and it grows fast.
LITTLE = ModelShape(
    family="llama", layers=2, hidden=2, heads=1, kv_heads=1, head_dim=2, vocab=8, layer_windows=(None, None),
    context=1 << 20, params=100,
)  # fmt: skip
L = 2
OUTSIDE = 4 + 64  # sink and local: tokens that are never in the index


class EvenCodes:
    """A hasher that spreads rows over the buckets without looking at them."""

    def __init__(self, K: int) -> None:
        self.K, self.L = K, L

    def bias(self, mean: np.ndarray) -> np.ndarray:
        return np.zeros((1, L * self.K), dtype=np.float32)

    def codes(self, store: RowStore, start: int, stop: int, bias: np.ndarray) -> np.ndarray:
        codes = np.arange(start, stop) % (1 << self.K)
        return np.ascontiguousarray(np.broadcast_to(codes.astype(np.uint16), (1, L, stop - start)))


def little_plan(K: int) -> Plan:
    return plan(hardware.probe(), LITTLE, Settings(attention=AttentionOptions(mode="lsh", K=K, L=L)))


def growth(K: int, first: int, steps: list[int]) -> Iterator[tuple[int, LshIndex]]:
    """(tokens, index) after a prompt with `first` offloaded keys and after each further step; multiples of 64."""
    store = RowStore(BlockPool(1, 2, "bfloat16", 1024))
    store.append(torch.zeros(1, first, 2, 2, dtype=torch.bfloat16))
    index = LshIndex(EvenCodes(K), store, threads=1)
    yield OUTSIDE + first, index
    for step in steps:
        store.append(torch.zeros(1, step, 2, 2, dtype=torch.bfloat16))
        index.extend()
        yield OUTSIDE + store.length, index


def some_turns(seed: int, total: int) -> list[int]:
    """Turns of 64 to 26,000 keys, most of them short."""
    sizes = np.random.default_rng(seed).choice([64, 128, 512, 1088, 2048, 9000 // 64 * 64, 26_000 // 64 * 64], 2000)
    return [int(size) for size, before in zip(sizes, np.cumsum(sizes) - sizes, strict=True) if before < total]


PATHS = {
    "at once": [(total, []) for total in (256, 1024, 1088, 4096, 32_768, 65_472, 65_536, 98_304, 200_000 // 64 * 64)],
    "token by token": [(256, [64] * 1600), (40_000, [64] * 800)],
    "turn by turn": [(256, some_turns(seed, 150_000)) for seed in range(6)],
    # What the longest lists are made of: a segment that may not be merged with a small one before it.
    "jumps": [(36_800, [28_736 + 64 * extra, 18_368, 9152, 4544, 2240, 1088] * 3) for extra in (0, 1, 100)],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("K", "at_most", "short_at_most"), [(10, 1.15, 1.4), (16, 3.6, 3.6)])
def test_an_index_is_never_larger_than_planned_and_not_much_smaller(path, K, at_most, short_at_most):
    chosen = little_plan(K)
    for first, steps in PATHS[path]:
        for tokens, index in growth(K, first // 64 * 64, steps):
            planned = chosen.index_bytes(tokens)
            assert planned >= index.nbytes
            # A short one may be off by as many keys as a tail holds: some are there, and its room counts in any case.
            assert planned <= (at_most if tokens >= 24_000 else short_at_most) * index.nbytes


def test_a_prompt_read_at_once_has_the_fewest_segments():
    for keys in (65_472, 65_472 + 1088, 200_000 // 64 * 64):
        _, index = next(growth(10, keys, []))
        assert len(index.segments) == -(-keys // MAX_SEGMENT_ROWS)
