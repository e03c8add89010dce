"""The signature sampler: scores, which rows they take, and what becomes of them (against float64)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels.jitter import jitter_pool, jitter_start
from magicpig_cli.kernels.reference.signature import Scores, jittered_log_weight, tail_rows
from tests.kernels.data import (
    RELAXED,
    ROW_TYPES,
    budgets,
    log_normal,
    make_basis,
    make_rows,
    make_signed,
    make_table,
    queries,
    signature_bits,
)
from tests.tolerances import (
    BUDGET,
    DOT,
    SUM,
    U,
    attention_bounds,
    close_error,
    deviation_error,
    dot_bound,
    jittered_bound,
    logit_bound,
)

TOP = 32767
WEIGHTS = log_normal()
KEY = (5, 2)
AT_THE_END = (13477, 2)  # the pool of jitter ends within the first 256 rows of kv heads 0 and 1


def rates_of(budget: float, tail: float) -> tuple[float, float]:
    """Rate of the uniform tail, and the share that the threshold takes."""
    if budget >= 1:
        return 1.0, 1.0
    rate = tail * float(budget)
    return rate, (float(budget) - rate) / (1 - rate)


def brute_force(scores: np.ndarray, unit: float, budget: float, tail: float, kv_head: int):
    """Rows, τ and rate by the definition, from the scores int16 [n] of a head."""
    n = len(scores)
    rate, share = rates_of(budget, tail)
    if share <= 0:
        return np.flatnonzero(tail_rows(n, rate, KEY, kv_head)), math.inf, rate
    stride = max(1, n // max(2048, math.ceil(32 / share)))
    subset = np.sort(scores[::stride].astype(int))[::-1]
    count = max(1, math.floor(share * len(subset) + 0.5))
    if count >= len(subset):
        return np.arange(n), -math.inf, 1.0
    bound = subset[count - 1]
    assert stride == 1 or len(subset) >= 2048
    taken = (scores >= bound) | tail_rows(n, rate, KEY, kv_head)
    return np.flatnonzero(taken), (float(bound) - 0.5) * unit, rate


def assert_rows_and_estimate(q, basis, groups, budget, tail, scale, softcap, done, found) -> None:
    """Rows by brute force from the scores of the same kernels; output, LSE and error in float64, within rounding."""
    scores, units = kernels.rabitq_scores(q, basis, groups, key=KEY, scale=scale)
    for b, h in np.ndindex(*q.shape[:2]):
        kv_head = h * groups[b].table.kv_heads // q.shape[1]
        rows, tau, rate = brute_force(scores[b][h], float(units[b, h]), float(budget[b, h]), tail, kv_head)
        assert np.array_equal(found[b][h], rows)
        assert done.sampled[b, h] == len(rows)
        if len(rows) == 0:
            assert not done.out[b, h].any()
            assert np.isneginf(done.lse[b, h])
            continue
        keys, values = groups[b].table.read(0, int(rows[-1]) + 1)[kv_head, rows].transpose(1, 0, 2)
        log_pi, log_error = log_weight(q[b, h], basis, groups[b], kv_head, rows, keys, tau, rate, scale, units[b, h])
        logits = scale * (keys.astype(np.float64) @ q[b, h].astype(np.float64))
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        logits, error = logits + log_pi, log_error + logit_bound(q[b, h], keys, scale, softcap)
        exps = np.exp(logits - logits.max())
        out_bound, lse_bound = attention_bounds(logits, error, values)
        weights, wide = exps / exps.sum(), values.astype(np.float64)
        assert (np.abs(done.out[b, h] - weights @ wide) <= out_bound).all()
        assert abs(done.lse[b, h] - logits.max() - np.log(exps.sum())) <= lse_bound
        o = weights @ wide
        distances, norm = ((wide - o) ** 2).sum(axis=1), float(np.linalg.norm(o))
        wanted = math.sqrt((weights**2 * (1 - np.exp(-log_pi)) * distances).sum()) / norm
        sizes = (wide**2).sum(axis=1) + o @ o
        assert close_error(float(done.error[b, h]), wanted, weights, error, distances, sizes, norm)


def log_weight(q, basis, group, kv_head, rows, keys, tau, rate, scale, unit) -> tuple[np.ndarray, np.ndarray]:
    """−ln π in float64, and what rounding can do to it."""
    q = q.astype(np.float64) * scale
    means = np.concatenate([kernels.widen(block.means)[kv_head] for block in group.blocks]).astype(np.float64)
    f = np.concatenate([kernels.widen(block.factors)[kv_head] for block in group.blocks])[rows].astype(np.float64)
    x, s = keys.astype(np.float64) - means[rows // 256], keys.astype(np.float64) @ q
    squares, along = (x**2).sum(axis=1), x @ q
    across = q @ q - np.divide(along**2, squares, out=np.zeros_like(along), where=squares > 0)
    spread = np.maximum(across, 0) * np.maximum(basis.bits * f**2 - basis.share * squares, 0)
    half = np.abs(basis.matrix.astype(np.float64) @ q).reshape(-1, 4).sum(axis=1)
    noise = len(half) * (2 * half.max() / 31) ** 2 / 12
    sigma = np.sqrt(spread / max(len(q) - 1, 1) + noise * f**2 + float(unit) ** 2 / 3)
    above = s - tau
    off = dot_bound(keys, q) + dot_bound(means[rows // 256], q) + DOT * U * (np.abs(s) + min(abs(tau), 1e30))
    log_u = jittered_log_weight(above, sigma, WEIGHTS)
    error = jittered_bound(above, sigma, off, deviation_error(q, x, f, basis.bits, sigma), WEIGHTS)
    return -np.log(rate + (1 - rate) * np.exp(-log_u)), error + DOT * U * (1 + log_u)


@RELAXED
@given(
    head_dim=st.sampled_from([1, 7, 8, 9, 16, 31, 33, 64, 80, 96, 128, 129, 256]),
    bits=st.sampled_from([32, 64, 128, 160, 512]),
    counts=st.lists(st.sampled_from([0, 256, 512, 768]), min_size=1, max_size=2),
    group=st.sampled_from([1, 2, 3, 4, 5, 7, 8]),
    budget=st.sampled_from([0.0025, 0.02, 0.16, 0.6, 0.9999, 1.0]),
    tail=st.sampled_from([0.0, 0.25, 1.0]),
    dtype=st.sampled_from(ROW_TYPES),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 100),
)
def test_rows_and_estimate(isa, head_dim, bits, counts, group, budget, tail, dtype, softcap, seed):
    basis, scale = make_basis(bits, head_dim, seed), head_dim**-0.5
    groups = []
    for i, count in enumerate(counts):
        table = make_table(make_rows(2, max(count, 1), head_dim, seed + i), dtype, block_rows=100)
        groups.append(make_signed(table, count, basis, (256,) if count > 256 else ()))
    q, wanted = queries(len(counts), 2 * group, head_dim, seed), budgets(len(counts), 2 * group, budget, 0.05)
    asked: dict[str, Any] = {"budget": wanted, "tail": tail, "key": KEY, "scale": scale, "threads": 2}
    done = kernels.rabitq_attend(q, basis, groups, WEIGHTS, softcap=softcap, **asked)
    found = kernels.rabitq_sample(q, basis, groups, **asked)
    assert_rows_and_estimate(q, basis, groups, wanted, tail, scale, softcap, done, found)
    assert set(done.stage_ns) == {"retrieve", "attend", "window", "merge"}


@pytest.mark.parametrize("budget", [0.001, 0.02])
def test_the_threshold_of_many_rows_comes_from_a_subset(isa, budget):
    """40,960 rows: every 20th, or at a budget of 0.001 every single one in a subset of over 32,000."""
    basis, table = make_basis(64, 16), make_table(make_rows(1, 40_960, 16), "bfloat16")
    groups, q = [make_signed(table, 40_960, basis, (256, 10_240))], queries(1, 3, 16)
    wanted = budgets(1, 3, budget)
    asked: dict[str, Any] = {"budget": wanted, "tail": 0.25, "key": KEY, "scale": 0.25, "threads": 2}
    done = kernels.rabitq_attend(q, basis, groups, WEIGHTS, **asked)
    found = kernels.rabitq_sample(q, basis, groups, **asked)
    assert_rows_and_estimate(q, basis, groups, wanted, 0.25, 0.25, None, done, found)


@RELAXED
@given(
    head_dim=st.sampled_from([1, 8, 33, 64, 128, 200]),
    bits=st.sampled_from([32, 128, 512]),
    heads=st.sampled_from([1, 3, 4, 9, 33]),
    seed=st.integers(0, 100),
)
def test_scores_are_estimates_from_the_bits_and_jitter(isa, head_dim, bits, heads, seed):
    """Within the rounding of look-up tables (half a step per nibble) and of the scores themselves (five units)."""
    basis = make_basis(bits, head_dim, seed)
    groups = [make_signed(make_table(make_rows(1, 512, head_dim, seed)), 512, basis, (256,))]
    q = queries(1, heads, head_dim, seed)
    (scores,), units = kernels.rabitq_scores(q, basis, groups, key=KEY, scale=0.3, threads=2)
    blocks = groups[0].blocks
    signs = 2.0 * np.concatenate([signature_bits(block)[0] for block in blocks]) - 1
    f = np.concatenate([kernels.widen(block.factors)[0] for block in blocks]).astype(np.float64)
    means = np.concatenate([kernels.widen(block.means)[0] for block in blocks]).astype(np.float64)
    jitter = jitter_pool()[(jitter_start(KEY, 0) + np.arange(512)) % kernels.JITTER_ROWS] * (12.5 / TOP)  # nats
    for h in range(heads):
        query = 0.3 * q[0, h].astype(np.float64)
        projected = basis.matrix.astype(np.float64) @ query
        half = np.abs(projected).reshape(-1, 4).sum(axis=1)
        wanted = f * (signs @ projected) + (means @ query).repeat(256) + jitter
        step, unit = 2 * half.max() / 31, float(units[0, h])
        rounding = DOT * U * (f * half.sum() * 2 + np.abs(means).repeat(256, axis=0) @ np.abs(query)) + U * TOP * unit
        off = scores[h] * unit - wanted
        assert (np.abs(off) <= f * step * len(half) / 2 + 5 * unit + rounding).all()
        noise = np.sqrt(f**2 * len(half) * step**2 / 12 + unit**2 / 3)
        assert np.sqrt(np.mean((off / noise) ** 2)) < 2.5  # and no worse than its variance says, nearly
        assert np.abs(scores[h]).max() <= TOP


@pytest.mark.parametrize("key", [KEY, AT_THE_END])
def test_scores_equal_the_reference(native_isa, key):
    """But where a look-up table or a score is within rounding of another one."""
    basis, table = make_basis(128, 80), make_table(make_rows(2, 1024, 80), "bfloat16")
    groups, q = [make_signed(table, 1024, basis)], queries(1, 6, 80)
    (scores,), units = kernels.rabitq_scores(q, basis, groups, key=key, scale=0.1)
    for h in range(6):
        wanted = Scores(
            q[0, h].astype(np.float64) * np.float32(0.1),
            basis.matrix.astype(np.float64),
            groups[0],
            jitter_pool(),
            key,
            h // 3,
        )
        assert abs(units[0, h] / wanted.unit - 1) < DOT * U
        assert (scores[h] != wanted.values).mean() < 0.02


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_everything_sampled_is_exact_attention(isa, dtype, head_dim):
    rows = make_rows(2, 2560, head_dim)
    table, basis = make_table(rows, dtype), make_basis(128, head_dim)
    q = queries(1, 6, head_dim)
    for tail in (0.0, 0.25, 1.0):
        done = kernels.rabitq_attend(
            q, basis, [make_signed(table, 2560, basis, (256,))], WEIGHTS, budget=budgets(1, 6, 1.0), tail=tail,
            key=KEY, scale=0.1, threads=2,
        )  # fmt: skip
        assert (done.sampled == 2560).all()
        assert not done.error.any()
        exact = kernels.exact_attend(q, [[(table, 0, 2560)]], scale=0.1, threads=2)
        for h in range(6):
            keys, values = table.read(0, 2560)[h // 3].transpose(1, 0, 2)
            logits = 0.1 * (keys.astype(np.float64) @ q[0, h])
            out_bound, lse_bound = attention_bounds(logits, logit_bound(q[0, h], keys, 0.1, None), values)
            assert (np.abs(done.out[0, h] - exact.out[0, h]) <= 2 * out_bound).all()
            assert abs(done.lse[0, h] - exact.lse[0, h]) <= 2 * lse_bound


def test_no_bit_depends_on_threads_neighbours_blocks_or_alignment(native_isa):
    count = 20_480  # three pieces
    rows, basis, q = make_rows(2, count, 72), make_basis(96, 72), queries(2, 6, 72)
    wanted_budget = budgets(2, 6, 0.02, 0.05, 0.005)
    asked: dict[str, Any] = {"tail": 0.25, "key": KEY, "scale": 0.2}
    for dtype in ROW_TYPES:
        table = make_table(rows, dtype)
        group = make_signed(table, count, basis)
        wanted = kernels.rabitq_attend(q, basis, [group, group], WEIGHTS, budget=wanted_budget, threads=1, **asked)
        assert wanted.sampled.min() > 50
        small = make_signed(table, count, basis, tuple(range(256, count, 256)))
        for threads, block_rows, shift in ((2, 1024, 0), (3, 1000, 1), (2, count, 3), (1, 37, 5)):
            other = kernels.SignedRows(make_table(rows, dtype, block_rows, shift), small.blocks)
            done = kernels.rabitq_attend(
                q, basis, [other, other], WEIGHTS, budget=wanted_budget, threads=threads, **asked
            )  # fmt: skip
            assert np.array_equal(done.out, wanted.out)
            assert np.array_equal(done.lse, wanted.lse)
            assert np.array_equal(done.error, wanted.error)
            assert np.array_equal(done.sampled, wanted.sampled)
        alone = kernels.rabitq_attend(
            q[1:].copy(), basis, [group], WEIGHTS, budget=wanted_budget[1:].copy(), threads=1, **asked
        )  # fmt: skip
        assert np.array_equal(alone.out[0], wanted.out[1])
        assert np.array_equal(alone.error[0], wanted.error[1])


def test_without_the_error_nothing_else_changes(native_isa):
    basis, table = make_basis(64, 40), make_table(make_rows(2, 1024, 40), "bfloat16")
    group, q = make_signed(table, 1024, basis), queries(1, 4, 40)
    asked: dict[str, Any] = {"budget": budgets(1, 4, 0.1), "tail": 0.25, "key": KEY, "scale": 0.2, "threads": 1}
    done, bare = (kernels.rabitq_attend(q, basis, [group], WEIGHTS, with_error=flag, **asked) for flag in (True, False))
    assert bare.error is None
    assert done.error is not None
    assert (done.error > 0).all()
    assert np.array_equal(done.sampled, bare.sampled)
    assert np.abs(done.out - bare.out).max() <= SUM * U * np.abs(bare.out).max()
    assert np.array_equal(done.lse, bare.lse)


def test_keys_and_queries_without_direction(isa):
    rows = make_rows(1, 768, 32)
    rows[0, :256, 0] = 1.5  # equal to their mean
    rows[0, 300:310, 0] = 0
    rows[0, 600] = rows[0, 700]
    basis, table = make_basis(64, 32), make_table(rows)
    group, q = make_signed(table, 768, basis), queries(1, 4, 32)
    q[0, 1] = 0
    q[0, 2] *= 1e-20
    q[0, 3] = 50 * rows[0, 500, 0]
    asked: dict[str, Any] = {"budget": budgets(1, 4, 0.1), "tail": 0.0, "key": KEY, "scale": 0.2, "threads": 1}
    done = kernels.rabitq_attend(q, basis, [group], WEIGHTS, **asked)
    assert np.isfinite(done.out).all()
    assert np.isfinite(done.lse).all()
    assert np.isfinite(done.error).all()


def test_infinite_keys_and_queries_give_finite_numbers(native_isa):
    rows = make_rows(1, 512, 32)
    rows[0, 40, 0, 3] = np.inf
    basis = make_basis(64, 32)
    group, q = make_signed(make_table(rows), 512, basis), queries(1, 3, 32)
    q[0, 2, 5] = np.inf
    done = kernels.rabitq_attend(
        q, basis, [group], WEIGHTS, budget=budgets(1, 3, 0.2), tail=0.25, key=KEY, scale=0.2, threads=1
    )
    assert np.isfinite(done.out).all()
    assert not np.isnan(done.lse).any()


def test_exact_runs_beside_samples_weigh_as_their_keys_do(isa):
    """Merged in one call as by hand; a sequence may have runs alone, samples alone, or neither."""
    basis, table = make_basis(64, 40), make_table(make_rows(2, 600, 40), "bfloat16", block_rows=64)
    near = make_table(make_rows(2, 90, 40, seed=5), "bfloat16", block_rows=90)
    group, nothing, q = make_signed(table, 512, basis), kernels.SignedRows(table), queries(4, 6, 40)
    groups, runs = [group, nothing, group, nothing], [[(near, 0, 90), (table, 512, 600)], [(near, 5, 80)], [], []]
    asked: dict[str, Any] = {"budget": budgets(4, 6, 0.1), "tail": 0.25, "key": KEY, "scale": 0.2}
    done = kernels.rabitq_attend(q, basis, groups, WEIGHTS, threads=2, exact=runs, **asked)
    far = kernels.rabitq_attend(q, basis, groups, WEIGHTS, threads=1, **asked)
    beside = kernels.exact_attend(q, runs, scale=0.2, threads=1)
    assert done.error is not None
    assert far.error is not None
    assert np.array_equal(done.sampled, far.sampled)
    assert np.array_equal(done.out[1], beside.out[1])
    assert np.array_equal(done.out[2], far.out[2])
    assert not done.error[[1, 3]].any()
    assert not done.out[3].any()
    assert np.isneginf(done.lse[3]).all()
    share = np.exp(far.lse[0].astype(np.float64) - done.lse[0])[:, None]
    merged = share * far.out[0] + (1 - share) * beside.out[0]
    assert np.abs(merged - done.out[0]).max() <= SUM * U * max(np.abs(far.out[0]).max(), np.abs(beside.out[0]).max())
    assert (done.error[0] > 0).all()


def test_many_short_sequences_in_one_call(isa):
    """More query heads than cells in a batch of scores: each sequence as if it were alone."""
    B, basis = 60, make_basis(32, 8)
    table = make_table(make_rows(4, 512, 8), "bfloat16")
    kinds = [make_signed(table, count, basis) for count in (0, 256, 512)]
    groups, q = [kinds[b % 3] for b in range(B)], queries(B, 16, 8)
    asked: dict[str, Any] = {"tail": 0.25, "key": KEY, "scale": 0.3, "threads": 2}
    done = kernels.rabitq_attend(q, basis, groups, WEIGHTS, budget=budgets(B, 16, 0.1), **asked)
    for b in (0, 1, 2, 58, 59):
        one = slice(b, b + 1)
        alone = kernels.rabitq_attend(q[one].copy(), basis, groups[one], WEIGHTS, budget=budgets(1, 16, 0.1), **asked)
        assert np.array_equal(done.out[one], alone.out)
        assert np.array_equal(done.sampled[one], alone.sampled)
    none = kernels.rabitq_attend(q[:0], basis, [], WEIGHTS, budget=budgets(0, 16, 0.1), **asked)
    assert none.out.shape == (0, 16, 8)


def test_a_budget_is_kept_on_average(isa):
    basis, table = make_basis(128, 64), make_table(make_rows(2, 5120, 64), "bfloat16")
    group, q = make_signed(table, 5120, basis), queries(1, 32, 64)
    for budget in (0.01, 0.02, 0.08):
        for tail in (0.0, 0.25, 1.0):
            found = kernels.rabitq_sample(
                q, basis, [group], budget=budgets(1, 32, budget), tail=tail, key=KEY, scale=0.125
            )  # fmt: skip
            assert np.mean([len(rows) for rows in found[0]]) / 5120 == pytest.approx(budget, rel=BUDGET)


def test_read_only_input(isa):
    basis, table = make_basis(64, 16), make_table(make_rows(1, 512, 16))
    group, q, budget = make_signed(table, 512, basis), queries(1, 2, 16), budgets(1, 2, 0.1)
    asked: dict[str, Any] = {"tail": 0.25, "key": KEY, "scale": 0.2, "threads": 1}
    wanted = kernels.rabitq_attend(q, basis, [group], WEIGHTS, budget=budget, **asked)
    weights = WEIGHTS.copy()
    for array in (q, budget, weights, *(x for b in group.blocks for x in (b.codes, b.factors, b.means))):
        array.flags.writeable = False
    again = kernels.SignedRows(table, group.blocks)
    assert np.array_equal(kernels.rabitq_attend(q, basis, [again], weights, budget=budget, **asked).out, wanted.out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": np.full((1, 2), 0.1)}, r"budget: want float32 \[B, H\], got float64"),
        ({"budget": np.full((1, 3), 0.1, np.float32)}, r"budget: want float32 \[B, H\] = \(1, 2\)"),
        ({"budget": np.full((1, 2), 0, np.float32)}, "budget: want more than 0, at most 1, got 0.0"),
        ({"budget": np.full((1, 2), 1.1, np.float32)}, "budget: want more than 0, at most 1"),
        ({"budget": np.full((1, 2), np.nan, np.float32)}, "budget: want more than 0, at most 1, got nan"),
        ({"tail": 1.1}, "tail: want 0 to 1, got 1.1"),
        ({"tail": math.nan}, "tail: want 0 to 1, got nan"),
        ({"key": (-1, 0)}, "hash seed: want 0 to 18446744073709551615, got -1"),
        ({"groups": []}, "groups: want one for each of 1 sequences, got 0"),
        ({"basis": make_basis(32, 16)}, "groups: want 32 bits, as the basis has, got 64"),
        ({"q": np.zeros((1, 2, 15), np.float32)}, "q: want float32"),
        ({"weights": np.zeros(1, np.float32)}, "weights: want at least 2 entries, got 1"),
        ({"scale": math.inf}, "scale: want a finite number"),
        ({"softcap": 0.0}, "softcap: want None or a positive number"),
        ({"threads": 0}, "threads: want 1 or more, got 0"),
    ],
)
def test_the_door_names_what_is_wrong(change, message):
    basis, table = make_basis(64, 16), make_table(make_rows(1, 512, 16))
    good = {
        "q": queries(1, 2, 16), "basis": basis, "groups": [make_signed(table, 512, basis)], "weights": WEIGHTS,
        "budget": budgets(1, 2, 0.1), "tail": 0.25, "key": KEY, "scale": 1.0, "threads": 1,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.rabitq_attend(**{**good, **change})
