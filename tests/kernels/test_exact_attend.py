"""Exact attention over stored rows against one softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import reference
from tests.kernels.data import RELAXED, ROW_TYPES, make_rows, make_table, queries
from tests.tolerances import attention_bounds, logit_bound


def assert_exact(done: kernels.Attended, q: np.ndarray, rows: list[np.ndarray], scale: float, softcap: float | None):
    """rows: per sequence float32 [Hkv, n, 2, D], as stored."""
    for b, h in np.ndindex(*q.shape[:2]):
        keys, values = rows[b][h * rows[b].shape[0] // q.shape[1]].transpose(1, 0, 2)
        if len(keys) == 0:
            assert not done.out[b, h].any()
            assert np.isneginf(done.lse[b, h])
            continue
        logits = scale * (keys.astype(np.float64) @ q[b, h].astype(np.float64))
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        weights = np.exp(logits - logits.max())
        out = weights @ values.astype(np.float64) / weights.sum()
        out_bound, lse_bound = attention_bounds(logits, logit_bound(q[b, h], keys, scale, softcap), values)
        assert (np.abs(done.out[b, h] - out) <= out_bound).all()
        assert abs(done.lse[b, h] - logits.max() - np.log(weights.sum())) <= lse_bound


@RELAXED
@given(
    head_dim=st.sampled_from([1, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 80, 96, 127, 128, 129, 256, 512]),
    counts=st.lists(st.sampled_from([0, 1, 3, 31, 32, 33, 64, 200]), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 16]),
    dtype=st.sampled_from(ROW_TYPES),
    softcap=st.sampled_from([None, 5.0, 50.0]),
    seed=st.integers(0, 100),
)
def test_equals_softmax(isa, head_dim, counts, group, dtype, softcap, seed):
    tables = [make_table(make_rows(2, count, head_dim, seed + i), dtype, 50) for i, count in enumerate(counts)]
    q = queries(len(counts), 2 * group, head_dim, seed)
    runs = [[(table, 0, count)] for table, count in zip(tables, counts, strict=True)]
    done = kernels.exact_attend(q, runs, scale=head_dim**-0.5, softcap=softcap, threads=2)
    assert_exact(done, q, [t.read(0, n) for t, n in zip(tables, counts, strict=True)], head_dim**-0.5, softcap)


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_head_dims_of_every_number_of_vectors(isa, dtype, group):
    """Sums take a row in blocks of as many vectors as there are registers for, then of fewer."""
    for head_dim in (*range(16, 513, 16), 120, 248, 500):
        table, q = make_table(make_rows(1, 70, head_dim), dtype, 50), queries(1, group, head_dim)
        done = kernels.exact_attend(q, [[(table, 0, 70)]], scale=head_dim**-0.5, threads=1)
        assert_exact(done, q, [table.read(0, 70)], head_dim**-0.5, None)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("count", [4095, 4096, 4097, 9000])
def test_long_runs_are_cut_and_merged(isa, count, dtype):
    table, q = make_table(make_rows(1, count, 64), dtype), queries(1, 3, 64)
    done = kernels.exact_attend(q, [[(table, 0, count)]], scale=0.125, threads=2)
    assert_exact(done, q, [table.read(0, count)], 0.125, None)


@pytest.mark.parametrize(("near", "far"), [("float32", "bfloat16"), ("bfloat16", "int8"), ("int8", "float32")])
def test_several_runs_are_one_softmax_whatever_their_row_types(isa, near, far):
    near, far = make_table(make_rows(2, 70, 96), near, 70), make_table(make_rows(2, 300, 96, 1), far, 64)
    q = queries(2, 4, 96)
    runs = [[(near, 0, 4), (near, 4, 4), (far, 17, 290), (near, 5, 70)], []]
    done = kernels.exact_attend(q, runs, scale=0.1, threads=2)
    seen = np.concatenate([near.read(0, 4), far.read(17, 290), near.read(5, 70)], axis=1)
    assert_exact(done, q, [seen, seen[:, :0]], 0.1, None)


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", [72, 128])
def test_no_bit_depends_on_threads_neighbours_blocks_or_alignment(native_isa, head_dim, dtype):
    rows, q = make_rows(2, 6000, head_dim), queries(2, 6, head_dim)
    table = make_table(rows, dtype)
    wanted = kernels.exact_attend(q, [[(table, 3, 5999)]] * 2, scale=0.1, threads=1)
    for threads, block_rows, shift in ((2, 1024, 0), (3, 1000, 1), (2, 6000, 3), (1, 37, 5)):
        other = make_table(rows, dtype, block_rows, shift)
        done = kernels.exact_attend(q, [[(other, 3, 5999)]] * 2, scale=0.1, threads=threads)
        assert np.array_equal(done.out, wanted.out)
        assert np.array_equal(done.lse, wanted.lse)
    alone = kernels.exact_attend(q[1:].copy(), [[(table, 3, 5999)]], scale=0.1, threads=1)
    assert np.array_equal(alone.out[0], wanted.out[1])
    assert np.array_equal(alone.lse[0], wanted.lse[1])


def test_overflow_and_infinite_keys_give_no_nan(isa):
    rows = make_rows(1, 40, 24)
    rows[0, 5, 0] = 0
    rows[0, 6, 0, :2] = np.inf, -np.inf
    rows[0, 7, 0] = 3e38
    for softcap in (None, 30.0):
        done = kernels.exact_attend(
            queries(1, 4, 24), [[(make_table(rows), 0, 40)]], scale=1.0, softcap=softcap, threads=1
        )
        assert np.isfinite(done.out).all()
        assert np.isfinite(done.lse).all()


def test_extreme_logits_pick_one_row(isa):
    rows = np.zeros((1, 100, 2, 8), dtype=np.float32)
    rows[0, :, 1] = np.arange(100)[:, None]
    rows[0, :, 0, 0] = -1
    rows[0, 41, 0, 0] = 1
    q = np.full((1, 1, 8), 1e4, dtype=np.float32)
    done = kernels.exact_attend(q, [[(make_table(rows), 0, 100)]], scale=1.0, threads=1)
    assert np.array_equal(done.out[0, 0], np.full(8, 41, dtype=np.float32))
    assert done.lse[0, 0] == 1e4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 4, 8))}, r"q: want float32 \[B, H, D\], got float64 \(1, 4, 8\)"),
        ({"q": np.zeros((1, 4, 9), np.float32)}, r"\(any, any, 8\), got float32 \(1, 4, 9\)"),
        ({"q": np.zeros((1, 3, 8), np.float32)}, "multiples of 2 kv heads, got 3"),
        ({"q": np.zeros((2, 4, 8), np.float32)}, "one list for each of 2 sequences, got 1"),
        ({"q": np.zeros((1, 8, 4), np.float32).transpose(0, 2, 1)}, "C-contiguous"),
        ({"q": [[0.0]]}, "got list"),
        ({"stop": 31}, r"want rows within \[0, 30\), got \[0, 31\)"),
        ({"scale": float("nan")}, "scale: want a finite number"),
        ({"softcap": -1.0}, "softcap: want None or a positive number"),
        ({"threads": 0}, "threads: want 1 or more, got 0"),
        ({"threads": 1.5}, "threads: want an integer, got float"),
    ],
)
def test_the_door_names_what_is_wrong(change, message):
    table = make_table(make_rows(2, 30, 8), block_rows=10)
    given_q = change.pop("q", queries(1, 4, 8))
    stop = change.pop("stop", 30)
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.exact_attend(given_q, [[(table, 0, stop)]], **{"scale": 1.0, "threads": 1, **change})


def test_blocks_are_checked():
    table = kernels.RowTable(2, 8, "bfloat16", 16)
    with pytest.raises(TypeError, match=r"block: want bf16 bits \(uint16\) \[Hkv, block_rows, 2, D\], got float32"):
        table.append_block(np.zeros((2, 16, 2, 8), np.float32))
    with pytest.raises(ValueError, match=r"= \(2, 16, 2, 8\), got uint16 \(2, 17, 2, 8\)"):
        table.append_block(np.zeros((2, 17, 2, 8), np.uint16))
    with pytest.raises(
        ValueError, match=r"block: want int8 values and scale \[Hkv, block_rows, 2, D \+ 2\] = .*, 10\)"
    ):
        kernels.RowTable(2, 8, "int8", 16).append_block(np.zeros((2, 16, 2, 8), np.int8))
    with pytest.raises(ValueError, match="dtype: want float32, bfloat16 or int8, got 'float16'"):
        kernels.RowTable(2, 8, "float16", 16)
    with pytest.raises(ValueError, match="head_dim: want 1 to 512, got 513"):
        kernels.RowTable(2, 513, "float32", 16)


def test_a_table_grows_shrinks_and_keeps_its_blocks(isa):
    table = kernels.RowTable(1, 4, "float32", 2)
    for i in range(20):  # nobody else holds these blocks
        table.append_block(np.full((1, 2, 2, 4), i, dtype=np.float32))
    assert table.rows == 40
    table.drop_blocks(13)
    assert table.rows == 26
    assert len(table.addresses) == 13
    done = kernels.exact_attend(np.zeros((1, 1, 4), np.float32), [[(table, 0, 26)]], scale=1.0, threads=1)
    assert np.array_equal(done.out[0, 0], np.full(4, 6, dtype=np.float32))


def test_reference_reads_bfloat16_as_the_upper_half_of_float32():
    assert kernels.widen(np.array([0x3F80, 0xC040], np.uint16)).tolist() == [1.0, -3.0]
    assert reference.TIER == "reference"


def test_reference_reads_int8_times_the_scale_behind_it():
    two, minus_three = (0x00, 0x40), (0x40, 0xC0)  # bfloat16, lower byte first
    rows = np.array([[1, -127, 0, *two], [5, 2, -1, *minus_three]]).astype(np.int8)
    assert kernels.widen(rows).tolist() == [[2.0, -254.0, 0.0], [-15.0, -6.0, 3.0]]
