"""SimHash codes: signs of projections, whatever the tiling, threads, blocks or instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import isa as tiers
from tests.kernels.data import RELAXED, ROW_TYPES, make_projection, make_rows, make_table
from tests.tolerances import DOT, U

WIDTHS = [1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 96, 127, 128, 129, 256]


def margins(x: np.ndarray, mu: np.ndarray, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x − mu)·R in float64 [n, L·K], and how far float32 can be from it."""
    x, mu, matrix = (a.astype(np.float64) for a in (x, mu, matrix))
    return (x - mu) @ matrix, DOT * U * ((np.abs(x) + np.abs(mu)) @ np.abs(matrix))


def bits_of(codes: np.ndarray, K: int) -> np.ndarray:
    """uint16 [L, n] → bool [n, L·K]."""
    return (codes.T[:, :, None] >> np.arange(K) & 1).astype(bool).reshape(codes.shape[1], -1)


@RELAXED
@given(
    head_dim=st.sampled_from(WIDTHS),
    count=st.sampled_from([1, 3, 4, 5, 127, 128, 129, 300]),
    K=st.sampled_from([1, 8, 10, 12, 16]),
    L=st.sampled_from([2, 8, 9, 24, 25, 49, 150]),
    dtype=st.sampled_from(ROW_TYPES),
    seed=st.integers(0, 1000),
)
def test_bits_are_signs_of_projections(isa, head_dim, count, K, L, dtype, seed):
    table = make_table(make_rows(2, count, head_dim, seed), dtype, block_rows=100)
    projection = make_projection(head_dim, K, L, seed)
    keys = table.read(0, count)[:, :, 0]
    mu = np.ascontiguousarray(keys.mean(axis=1))
    codes = kernels.hash_rows(table, 0, count, projection, projection.bias(mu), 1)
    for h in range(2):
        projected, error = margins(keys[h], mu[h], projection.matrix)
        wrong = bits_of(codes[h], K) != (projected > 0)
        assert not (wrong & (np.abs(projected) > error)).any()
        assert wrong.mean() <= 0.01


def test_bias_is_the_projection_of_the_mean(isa):
    mu = np.ascontiguousarray(make_rows(3, 1, 80)[:, 0, 0])
    projection = make_projection(80, 10, 30)
    wanted, error = margins(mu, np.zeros_like(mu), projection.matrix)
    assert (np.abs(projection.bias(mu) - wanted) <= error).all()


def test_a_key_equal_to_the_mean_has_code_zero(isa):
    rows = make_rows(1, 5, 64)
    rows[:, 2] = rows[:, 4]
    table, projection = make_table(rows), make_projection(64, 10, 40)
    codes = kernels.hash_rows(table, 0, 5, projection, projection.bias(np.ascontiguousarray(rows[:, 4, 0])), 1)
    assert not codes[0, :, [2, 4]].any()
    assert codes[0, :, [0, 1, 3]].any()


@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_no_bit_depends_on_tiling_threads_blocks_or_alignment(native_isa, dtype):
    rows = make_rows(3, 700, 72)
    projection = make_projection(72, 9, 50)
    table = make_table(rows, dtype)
    bias = projection.bias(np.ascontiguousarray(table.read(0, 700)[:, :, 0].mean(axis=1)))
    whole = kernels.hash_rows(table, 0, 700, projection, bias, 1)
    for threads in (2, 3):
        assert np.array_equal(kernels.hash_rows(table, 0, 700, projection, bias, threads), whole)
    for block_rows, shift in ((64, 1), (37, 3), (700, 5)):
        other = make_table(rows, dtype, block_rows, shift)
        assert np.array_equal(kernels.hash_rows(other, 0, 700, projection, bias, 2), whole)
    for start, stop in ((0, 1), (1, 2), (5, 133), (699, 700), (350, 350)):
        part = kernels.hash_rows(table, start, stop, projection, bias, 2)
        assert np.array_equal(part, whole[:, :, start:stop])


def test_queries_and_rows_have_one_code(native_isa):
    rows = make_rows(1, 260, 96)
    projection = make_projection(96, 10, 150)
    codes = kernels.hash_rows(make_table(rows), 0, 260, projection, None, 2)
    q = np.ascontiguousarray(rows[0, :, 0].reshape(20, 13, 96))
    assert np.array_equal(kernels.hash_queries(q, projection, 3).reshape(260, 150), codes[0].T)
    one = np.ascontiguousarray(q[7:8, 4:5])
    assert np.array_equal(kernels.hash_queries(one, projection, 1)[0, 0], codes[0, :, 7 * 13 + 4])


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", [1, 17, 64, 128, 200])
def test_fused_tiers_agree_to_the_bit(monkeypatch, head_dim, dtype):
    fused = [tier for tier in tiers.runnable() if tier != "portable"]
    rows, found = make_rows(2, 500, head_dim), []
    for tier in fused:
        monkeypatch.setattr(tiers, "_backend", tiers.load(tier))
        table, projection = make_table(rows, dtype), make_projection(head_dim, 10, 150)
        bias = projection.bias(np.ascontiguousarray(table.read(0, 500)[:, :, 0].mean(axis=1)))
        found.append((bias, kernels.hash_rows(table, 0, 500, projection, bias, 2)))
    for bias, codes in found[1:]:
        assert np.array_equal(bias, found[0][0])
        assert np.array_equal(codes, found[0][1])


def test_zeros_and_infinities_give_codes(isa):
    rows = np.zeros((1, 4, 2, 32), dtype=np.float32)
    rows[0, 1, 0, 3] = np.inf
    rows[0, 2, 0, :2] = np.inf, -np.inf
    rows[0, 3, 0] = np.nan
    projection = make_projection(32, 8, 20)
    codes = kernels.hash_rows(make_table(rows), 0, 4, projection, None, 1)
    assert not codes[0, :, [0, 3]].any()
    signs = (projection.matrix[3] > 0).reshape(20, 8) << np.arange(8)
    assert np.array_equal(codes[0, :, 1], signs.sum(axis=1))


def test_codes_are_written_where_asked(isa):
    table, projection = make_table(make_rows(2, 10, 16)), make_projection(16, 4, 5)
    out = np.full((2, 5, 7), 9, dtype=np.uint16)
    assert kernels.hash_rows(table, 2, 9, projection, None, 1, out=out) is out
    assert np.array_equal(out, kernels.hash_rows(table, 2, 9, projection, None, 1))


def test_codes_of_some_heads_into_part_of_a_larger_array(isa):
    table, projection = make_table(make_rows(3, 300, 16)), make_projection(16, 4, 5)
    bias = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
    whole = kernels.hash_rows(table, 0, 300, projection, bias, 1)
    room = np.full((2, 5, 400), 9, dtype=np.uint16)
    kernels.hash_rows(table, 100, 240, projection, bias, 2, out=room[:, :, 30:170], first_head=1)
    assert np.array_equal(room[:, :, 30:170], whole[1:, :, 100:240])
    room[:, :, 30:170] = 9
    assert (room == 9).all()
    with pytest.raises(ValueError, match="first_head: want 0 to 1, got 2"):
        kernels.hash_rows(table, 0, 7, projection, bias, 1, out=room[:, :, :7], first_head=2)
