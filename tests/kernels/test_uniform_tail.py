"""The uniform tail, which both samplers have: who is in it, what that does to weights and to the estimated error."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from magicpig_cli import kernels
from magicpig_cli.kernels.reference.signature import tail_rows
from tests.kernels.data import (
    ROW_TYPES,
    inclusion,
    log_normal,
    log_weights,
    make_basis,
    make_group,
    make_projection,
    make_rows,
    make_signed,
    make_table,
)
from tests.tolerances import SUM, U, attention_bounds, close_error, dot_bound, logit_bound, weight_bound

KEY = (11, 3)


def mixed(x: int) -> int:
    """SplitMix64's finaliser, written once more."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def test_the_draw_is_the_documented_hash():
    """Saved sessions and other machines draw the same rows, so this must never change."""
    seed = mixed((KEY[0] + 4 * 0x9E3779B97F4A7C15) % 2**64)
    seed = mixed((seed + 2 * 0x9E3779B97F4A7C15) % 2**64)
    for row, in_tail in enumerate(tail_rows(300, 0.25, KEY, kv_head=1).tolist()):
        x = (row + seed) % 2**32
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        assert in_tail == ((x ^ (x >> 16) ^ (seed >> 32)) < 2**30)


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.5])
def test_rows_enter_at_the_rate_and_independently(rate):
    n, heads = 50_000, 8
    drawn = np.stack([tail_rows(n, rate, (0, layer), h) for layer in range(2) for h in range(heads)])
    spread = math.sqrt(n * rate * (1 - rate))
    assert (np.abs(drawn.sum(axis=1) - n * rate) < 5 * spread).all()
    for a, b in ((drawn[0], drawn[1]), (drawn[0], drawn[heads]), (drawn[0][1:], drawn[0][:-1])):
        assert abs((a & b).sum() - n * rate**2) < 5 * math.sqrt(n) * rate + 1
    assert (tail_rows(n, rate / 2, (0, 0), 0) <= tail_rows(n, rate, (0, 0), 0)).all()


def test_both_samplers_draw_one_tail_for_all_heads_and_steps(isa):
    """Rows that only the tail takes are the same for every query head, query and sampler."""
    table = make_table(make_rows(2, 1024, 32), "bfloat16")
    basis, projection = make_basis(64, 32), make_projection(32, 12, 4)
    wanted = [np.flatnonzero(tail_rows(1024, 0.05, KEY, h)) for h in range(2)]
    for seed in (0, 1):
        q = np.random.default_rng(seed).normal(size=(1, 6, 32)).astype(np.float32)
        codes = kernels.hash_queries(q, projection, 1)
        for group in (make_group(table, 1000, projection, (300,), 77), make_group(table, 1000, projection)):
            plain, more = (kernels.lsh_sample(codes, [group], tail=tail, key=KEY)[0] for tail in (0.0, 0.05))
            for h in range(6):
                assert np.array_equal(more[h], np.union1d(plain[h], wanted[h // 3][wanted[h // 3] < 1000]))
        only = kernels.rabitq_sample(
            q, basis, [make_signed(table, 1024, basis)], budget=np.full((1, 6), 0.05, np.float32), tail=1.0, key=KEY,
            scale=0.2,
        )[0]  # fmt: skip
        for h in range(6):
            assert np.array_equal(only[h], wanted[h // 3])


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("tail", [0.0, 0.05, 1.0])
def test_weights_and_error_of_the_tables(isa, dtype, tail):
    """Output, LSE and estimated error against float64; exact rows are part of the weights, not of the error."""
    K, L, D, scale = 8, 40, 48, 0.2
    projection, weights = make_projection(D, K, L), log_weights(K, L)
    table = make_table(make_rows(2, 1500, D), dtype, block_rows=100)
    group = make_group(table, 1400, projection, (700,), 100)
    q = 2 * np.random.default_rng(3).normal(size=(1, 6, D)).astype(np.float32)
    codes = kernels.hash_queries(q, projection, 1)
    asked: dict[str, Any] = {"tail": tail, "key": KEY}
    runs = [[(table, 1400, 1500)]]
    done = kernels.lsh_attend(q, codes, [group], weights, scale=scale, threads=2, exact=runs, **asked)
    bare = kernels.lsh_attend(q, codes, [group], weights, scale=scale, threads=1, exact=runs, with_error=False, **asked)
    assert bare.error is None
    assert done.error is not None
    assert np.array_equal(bare.lse, done.lse)
    assert np.abs(bare.out - done.out).max() <= SUM * U * np.abs(done.out).max()
    found = kernels.lsh_sample(codes, [group], **asked)[0]
    for h in range(6):
        rows = np.concatenate([found[h], np.arange(1400, 1500)])
        sampled = np.arange(len(rows)) < len(found[h])
        keys, values = table.read(0, 1500)[h // 3, rows].transpose(1, 0, 2)
        query, mu = q[0, h].astype(np.float64), group.mu[h // 3].astype(np.float64)
        x = keys.astype(np.float64) - mu
        norms = np.linalg.norm(x, axis=1) * np.linalg.norm(query)
        cosine = x @ query / norms
        pi = np.where(sampled, tail + (1 - tail) * inclusion(cosine, K, L), 1.0)
        logits = scale * (keys.astype(np.float64) @ query) - np.log(pi)
        off = (dot_bound(keys, query) + dot_bound(np.broadcast_to(mu, keys.shape), query)) / norms + SUM * U
        error = logit_bound(q[0, h], keys, scale, None) + np.where(
            sampled, weight_bound(cosine, off, weights) + 1e-5, 0
        )
        out_bound, lse_bound = attention_bounds(logits, error, values)
        exps, wide = np.exp(logits - logits.max()), values.astype(np.float64)
        share = exps / exps.sum()
        o = share @ wide
        assert (np.abs(done.out[0, h] - o) <= out_bound).all()
        assert abs(done.lse[0, h] - logits.max() - np.log(exps.sum())) <= lse_bound
        distances, norm = ((wide - o) ** 2).sum(axis=1), float(np.linalg.norm(o))
        wanted = math.sqrt((share**2 * (1 - pi) * distances).sum()) / norm
        sizes = (wide**2).sum(axis=1) + o @ o
        assert close_error(float(done.error[0, h]), wanted, share, error, distances, sizes, norm)
    if tail == 1:
        assert (done.sampled == 1400).all()
        assert not done.error.any()


def test_no_bit_depends_on_threads_or_segments(native_isa):
    table, projection = make_table(make_rows(2, 20_000, 40), "bfloat16"), make_projection(40, 8, 40)
    q = np.random.default_rng(3).normal(size=(1, 6, 40)).astype(np.float32)
    codes, weights = kernels.hash_queries(q, projection, 1), log_weights(8, 40)
    group = make_group(table, 20_000, projection, (9000,), 200)
    asked: dict[str, Any] = {"tail": 0.01, "key": KEY, "scale": 0.2}
    wanted = kernels.lsh_attend(q, codes, [group], weights, threads=1, **asked)
    for threads in (2, 3):
        done = kernels.lsh_attend(q, codes, [group], weights, threads=threads, **asked)
        for name in ("out", "lse", "error", "sampled"):
            assert np.array_equal(getattr(done, name), getattr(wanted, name))
    for cuts, tail in (((64, 9001), 3), ((19_000,), 0)):
        other = make_group(table, 20_000, projection, cuts, tail)
        for a, b in zip(*(kernels.lsh_sample(codes, [g], tail=0.01, key=KEY)[0] for g in (group, other)), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tail": -0.1}, "tail: want 0 to 1, got -0.1"),
        ({"tail": math.nan}, "tail: want 0 to 1, got nan"),
        ({"key": (0, -1)}, "layer: want 0 to 2147483647, got -1"),
        ({"key": (0.5, 0)}, "hash seed: want an integer, got float"),
    ],
)
def test_the_door_names_what_is_wrong(change, message):
    table, projection = make_table(make_rows(1, 300, 16)), make_projection(16, 4, 20)
    q = np.ones((1, 2, 16), np.float32)
    group, codes = make_group(table, 300, projection), kernels.hash_queries(q, projection, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.lsh_attend(q, codes, [group], log_weights(4, 20), scale=1.0, threads=1, **change)
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.lsh_sample(codes, [group], **change)


def test_a_table_of_weights_that_everybody_agrees_on():
    from magicpig_cli.attention.estimator import log_normal_table

    assert np.abs(log_normal_table().astype(np.float64) - log_normal()).max() <= U * log_normal().max()
