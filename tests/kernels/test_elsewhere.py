"""Signatures that somebody else compares: scores by the formula of `Lookup`, and attention to what came of it."""

from __future__ import annotations

import numpy as np
import pytest

from magicpig_cli import kernels
from magicpig_cli.kernels.signature_shape import threshold_subset
from tests.kernels.data import budgets, log_normal, make_basis, make_rows, make_signed, make_table, queries

TOP = 32767
WEIGHTS = log_normal()
KEY = (13477, 2)  # the pool of jitter ends within the first 256 rows of kv heads 0 and 1


def by_formula(found: kernels.Lookup, group: kernels.SignedRows) -> np.ndarray:
    """Scores int16 [H, n], in NumPy."""
    heads, kv_heads = len(found.tables), len(found.factor_scale)
    codes = np.concatenate([block.codes for block in group.blocks], axis=1)
    factors = kernels.widen(np.concatenate([block.factors for block in group.blocks], axis=1))
    shares = np.rint(factors * found.factor_scale[:, None]).astype(np.int64)
    nibbles = np.stack([codes & 15, codes >> 4], axis=2)  # [Hkv, n/32, 2, bits/4, 16]
    out = np.empty((heads, group.n), dtype=np.int16)
    for h in range(heads):
        kv_head, (lift, centre, share, of_jitter) = h * kv_heads // heads, found.lines[h].tolist()
        each = found.tables[h][np.arange(nibbles.shape[3])[:, None], nibbles[kv_head]]
        sums = each.sum(axis=2, dtype=np.int64).reshape(-1)
        product = ((lift * sums - centre) * shares[kv_head] + 2**14) >> 15
        at = (found.starts[kv_head] + np.arange(group.n)) % kernels.JITTER_ROWS
        jitter = (kernels.jitter_pool()[at].astype(np.int64) * of_jitter + 2**14) >> 15
        out[h] = found.means[h].astype(np.int64).repeat(256) + ((product * share + 2**14) >> 15) + jitter
    return out


def reached_by(found: kernels.Lookup, scores: np.ndarray) -> kernels.Reached:
    bounds = np.zeros(len(scores), dtype=np.int32)
    for h, (stride, size, count) in enumerate(found.subset.tolist()):
        subset = np.sort(scores[h, ::stride])
        assert len(subset) == size
        bounds[h] = subset[-count]  # of none, the smallest: `bounds_of` says what it means
    flags = scores >= bounds[:, None]
    return kernels.Reached(
        np.packbits(flags, axis=1, bitorder="little").view(np.uint64), kernels.bounds_of(found.subset, bounds)
    )


def looked_up(q, basis, groups, budget, tail, scale, threads=2):
    return kernels.rabitq_lookup(q, basis, groups, budget=budget, tail=tail, key=KEY, scale=scale, threads=threads)


@pytest.mark.parametrize(("bits", "head_dim", "group"), [(32, 7, 1), (128, 64, 4), (160, 80, 3), (512, 128, 5)])
def test_scores_by_the_formula_are_those_of_the_kernels(isa, bits, head_dim, group):
    basis, scale = make_basis(bits, head_dim), head_dim**-0.5
    tables = [make_table(make_rows(2, 1024, head_dim, seed), "bfloat16") for seed in (0, 1)]
    groups = [make_signed(tables[0], 1024, basis, (256,)), make_signed(tables[1], 512, basis)]
    q = queries(2, 2 * group, head_dim)
    found = looked_up(q, basis, groups, budgets(2, 2 * group, 0.1), 0.25, scale)
    wanted, _ = kernels.rabitq_scores(q, basis, groups, key=KEY, scale=scale)
    for lookup, signed, scores in zip(found, groups, wanted, strict=True):
        assert np.array_equal(by_formula(lookup, signed), scores)


@pytest.mark.parametrize("tail", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("shares", [(0.02, 0.3), (0.9999, 1.0), (0.1,)])
def test_attention_to_what_was_reached_is_that_of_a_scan(isa, tail, shares):
    """Of sequences in turns, one of them without rows, and beside exact runs: not a bit differs."""
    basis, table = make_basis(64, 40), make_table(make_rows(2, 2600, 40), "bfloat16")
    groups = [make_signed(table, 2560, basis, (768,)), kernels.SignedRows(table), make_signed(table, 512, basis)]
    q, budget = queries(3, 6, 40), budgets(3, 6, *shares)
    runs = [[(table, 2560, 2600)], [(table, 0, 90)], []]
    found = looked_up(q, basis, groups, budget, tail, 0.2)
    reached = [reached_by(a, by_formula(a, b)) if b.n else None for a, b in zip(found, groups, strict=True)]
    asked = {"budget": budget, "tail": tail, "key": KEY, "scale": 0.2, "exact": runs, "threads": 2}
    wanted = kernels.rabitq_attend(q, basis, groups, WEIGHTS, **asked)
    for given in (reached, [reached[0], None, None], [None, None, reached[2]]):
        done = kernels.rabitq_attend(q, basis, groups, WEIGHTS, reached=given, **asked)
        for name in ("out", "lse", "error", "sampled"):
            assert np.array_equal(getattr(done, name), getattr(wanted, name)), name


def test_a_threshold_of_none_or_all_overrules_the_bits(isa):
    basis, table = make_basis(32, 16), make_table(make_rows(1, 768, 16))
    groups, q = [make_signed(table, 768, basis)], queries(1, 2, 16)
    bounds = np.array([TOP + 1, -TOP - 1], dtype=np.int32)
    asked = {"budget": budgets(1, 2, 0.1), "tail": 0.0, "key": KEY, "scale": 0.2, "threads": 1}
    for fill in (0, 2**64 - 1):
        given = kernels.Reached(np.full((2, 12), fill, dtype=np.uint64), bounds)
        done = kernels.rabitq_attend(q, basis, groups, WEIGHTS, reached=[given], **asked)
        assert done.sampled.tolist() == [[0, 768]]
        assert np.isneginf(done.lse[0, 0])
        assert not done.error.any()


def test_only_bits_decide_what_is_read(isa):
    """Rows that no bit names have NaN for keys and values, but for those whose signatures were made before."""
    rows = make_rows(1, 512, 24)
    basis = make_basis(64, 24)
    blocks = make_signed(make_table(rows), 512, basis).blocks
    named = np.zeros((2, 512), dtype=bool)
    named[0, [0, 63, 64, 511]] = named[1, [64, 300]] = True
    rows[0, ~named.any(axis=0)] = np.nan
    bits = np.packbits(named, axis=1, bitorder="little").view(np.uint64)
    reached = kernels.Reached(bits, np.zeros(2, dtype=np.int32))
    group, q = kernels.SignedRows(make_table(rows), blocks), queries(1, 2, 24)
    done = kernels.rabitq_attend(
        q, basis, [group], WEIGHTS, budget=budgets(1, 2, 0.1), tail=0.0, key=KEY, scale=0.2, threads=1,
        reached=[reached],
    )  # fmt: skip
    assert done.sampled.tolist() == [[4, 2]]
    assert np.isfinite(done.out).all()
    assert np.isfinite(done.lse).all()


def test_queries_that_are_no_numbers_have_finite_scores(native_isa):
    rows = make_rows(1, 512, 32)
    rows[0, 40, 0, 3] = np.inf
    basis = make_basis(64, 32)
    groups, q = [make_signed(make_table(rows), 512, basis)], queries(1, 4, 32)
    q[0, 1, 5], q[0, 2, 5], q[0, 3] = np.inf, np.nan, 0
    (found,) = looked_up(q, basis, groups, budgets(1, 4, 0.2), 0.25, 0.2)
    (wanted,), _ = kernels.rabitq_scores(q, basis, groups, key=KEY, scale=0.2)
    assert np.array_equal(by_formula(found, groups[0]), wanted)
    done = kernels.rabitq_attend(
        q, basis, groups, WEIGHTS, budget=budgets(1, 4, 0.2), tail=0.25, key=KEY, scale=0.2, threads=1,
        reached=[reached_by(found, wanted)],
    )  # fmt: skip
    assert np.isfinite(done.out).all()
    assert not np.isnan(done.lse).any()


def test_subsets_have_the_rows_that_a_threshold_needs():
    assert threshold_subset(512, 0.02) == (1, 512, 10)
    assert threshold_subset(98_304, 0.02) == (48, 2048, 41)
    assert threshold_subset(98_304, 0.001) == (3, 32_768, 33)
    assert threshold_subset(256, 0.0001) == (1, 256, 1)
    assert threshold_subset(256, 0.0)[2] == 0
    assert threshold_subset(256, 1.0) == (1, 256, 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reached": []}, "reached: want one for each of 1 sequences, got 0"),
        ({"bits": np.zeros((2, 8), np.int64)}, r"reached bits: want uint64 \[H, n/64\], got int64"),
        (
            {"bits": np.zeros((2, 7), np.uint64)},
            r"bits: want uint64 \[H, n/64\] = \(2, 8\), got uint64 \(2, 7\)",
        ),
        ({"bits": np.zeros((1, 8), np.uint64)}, r"reached bits: want uint64 \[H, n/64\] = \(2, 8\)"),
        ({"bits": np.zeros((2, 16), np.uint64)[:, ::2]}, "reached bits: .* C-contiguous"),
        ({"bounds": np.zeros(3, np.int32)}, r"reached bounds: want int32 \[H\] = \(2\), got"),
        ({"bounds": np.full(2, 40_000, np.int32)}, "reached bounds: want -32768 to 32768, got 40000 to 40000"),
        ({"bounds": np.array([0, -40_000], np.int32)}, "reached bounds: want -32768 to 32768, got -40000 to 0"),
    ],
)
def test_the_door_names_what_is_wrong(change, message):
    basis, table = make_basis(64, 16), make_table(make_rows(1, 512, 16))
    bits = change.get("bits", np.zeros((2, 8), np.uint64))
    reached = change.get("reached", [kernels.Reached(bits, change.get("bounds", np.zeros(2, np.int32)))])
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.rabitq_attend(
            queries(1, 2, 16), basis, [make_signed(table, 512, basis)], WEIGHTS, budget=budgets(1, 2, 0.1), tail=0.25,
            key=KEY, scale=1.0, threads=1, reached=reached,
        )  # fmt: skip
