"""A device's scan of signatures, on torch's CPU tensors: the scores, thresholds and rows of the kernels, all bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli import kernels
from magicpig_cli.attention import scan as scanning
from magicpig_cli.cache.signatures_there import BlockThere, by_cell
from tests.kernels.data import make_basis, make_rows, make_signed, make_table

KEY = (13477, 2)  # the pool of jitter ends within the first 256 rows of kv heads 0 and 1


def queries(heads: int, head_dim: int, seed: int = 9) -> np.ndarray:
    return 2 * np.random.default_rng(seed).normal(size=(1, heads, head_dim)).astype(np.float32)


def blocks_of(group: kernels.SignedRows) -> list[BlockThere]:
    return [BlockThere(*by_cell(block)) for block in group.blocks]


def scanned(q: np.ndarray, basis, group, budget, tail: float, scale: float):
    """(scores, what the kernels are told was reached) by torch."""
    (found,) = kernels.rabitq_lookup(q, basis, [group], budget=budget, tail=tail, key=KEY, scale=scale, threads=1)
    parts = [torch.from_numpy(part) for part in (found.tables, found.lines, found.means, found.factor_scale)]
    jitter = torch.tensor(kernels.jitter_pool()).repeat(2), found.starts.tolist()
    subset = torch.from_numpy(found.subset)
    values = scanning.scores(blocks_of(group), parts, *jitter)
    bits, bounds = scanning.scan(blocks_of(group), parts, *jitter, subset, int(found.subset[:, 1].max()))
    reached = kernels.Reached(bits.numpy().view(np.uint64), kernels.bounds_of(found.subset, bounds.numpy()))
    return values.numpy(), reached


@pytest.mark.parametrize(("bits", "head_dim"), [(32, 8), (128, 64), (128, 80), (512, 128)])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_scores_and_rows_are_those_of_the_kernels(bits, head_dim, group):
    basis, table = make_basis(bits, head_dim), make_table(make_rows(2, 2560, head_dim), "bfloat16")
    signed = make_signed(table, 2560, basis, (256, 512, 1792))
    q, scale = queries(2 * group, head_dim), head_dim**-0.5
    for budgets, tail in (((0.02, 0.3), 0.25), ((0.9999, 1.0), 0.0), ((0.1,), 1.0)):
        budget = np.resize(np.array(budgets, dtype=np.float32), (1, 2 * group))
        values, reached = scanned(q, basis, signed, budget, tail, scale)
        (wanted,), _ = kernels.rabitq_scores(q, basis, [signed], key=KEY, scale=scale)
        assert np.array_equal(values, wanted)
        asked = {"budget": budget, "tail": tail, "key": KEY, "scale": scale, "threads": 1}
        weights = np.linspace(3, 0, 4096, dtype=np.float32)
        here = kernels.rabitq_attend(q, basis, [signed], weights, **asked)
        there = kernels.rabitq_attend(q, basis, [signed], weights, reached=[reached], **asked)
        assert np.array_equal(here.sampled, there.sampled)
        assert np.array_equal(here.out, there.out)
        assert np.array_equal(here.lse, there.lse)
        assert np.array_equal(here.error, there.error)


@pytest.mark.parametrize("odd", [0.0, np.inf, -np.inf, np.nan, 1e38, 1e-38])
def test_odd_queries_and_keys_are_scored_as_the_kernels_score_them(odd):
    rows = make_rows(1, 768, 32)
    rows[0, 40, 0, 3], rows[0, 256:512, 0] = np.inf, 1.5  # one without a number, and keys equal to their mean
    basis, q = make_basis(64, 32), queries(3, 32)
    signed = make_signed(make_table(rows), 768, basis)
    q[0, 1, 5] = odd
    q[0, 2] *= 0 if odd == 0 else 1
    budget = np.full((1, 3), 0.05, dtype=np.float32)
    values, reached = scanned(q, basis, signed, budget, 0.25, 0.2)
    (wanted,), _ = kernels.rabitq_scores(q, basis, [signed], key=KEY, scale=0.2)
    assert np.array_equal(values, wanted)
    assert (np.unpackbits(reached.bits.view(np.uint8), axis=1, bitorder="little") == (
        values >= reached.bounds[:, None])).all()  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 256 * 2, 256 * 2 * 3, 1 << 18])
def test_nothing_depends_on_how_much_is_scanned_at_a_time(monkeypatch, at_once):
    """Blocks of any size, cut or put together: scores of 41 cells, whose threshold comes from every fifth row."""
    monkeypatch.setattr(scanning, "SCAN_KEYS", at_once)
    basis, table = make_basis(64, 16), make_table(make_rows(2, 41 * 256, 16), "bfloat16")
    q, budget = queries(4, 16), np.array([[0.02, 0.002, 0.3, 1.0]], dtype=np.float32)
    signed = make_signed(table, 41 * 256, basis, (256, 512, 1536, 6400))
    values, reached = scanned(q, basis, signed, budget, 0.25, 0.25)
    (wanted,), _ = kernels.rabitq_scores(q, basis, [signed], key=KEY, scale=0.25)
    assert np.array_equal(values, wanted)
    found = kernels.rabitq_sample(q, basis, [signed], budget=budget, tail=0.0, key=KEY, scale=0.25)
    again = scanned(q, basis, signed, budget, 0.0, 0.25)[1]
    flags = np.unpackbits(again.bits.view(np.uint8), axis=1, bitorder="little")
    for h in range(3):
        assert np.array_equal(np.flatnonzero(flags[h]), found[0][h])
    assert reached.bounds[3] == -32768
