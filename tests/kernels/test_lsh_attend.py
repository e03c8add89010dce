"""The sampler: which rows it takes (bit-equal to the reference) and what it makes of them (against float64)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import reference
from tests.kernels.data import RELAXED, ROW_TYPES, log_weights, make_group, make_projection, make_rows, make_table
from tests.tolerances import DOT, SUM, U, attention_bounds, dot_bound, logit_bound, weight_bound


def queries(B: int, H: int, D: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, H, D)).astype(np.float32)


def assert_estimate(
    done: kernels.Sampled,
    q: np.ndarray,
    codes: np.ndarray,
    groups: list[kernels.SampledRows],
    weights: np.ndarray,
    scale: float,
    softcap: float | None = None,
) -> None:
    """The output over the rows that the reference samples, in float64, within rounding."""
    wanted = reference.lsh_sample(codes, groups, 1)
    for b, h in np.ndindex(*q.shape[:2]):
        ids, table = wanted[b][h], groups[b].table
        assert done.sampled[b, h] == len(ids)
        if len(ids) == 0:
            assert not done.out[b, h].any()
            assert np.isneginf(done.lse[b, h])
            continue
        kv_head = h * table.kv_heads // q.shape[1]
        keys, values = table.read(0, int(ids[-1]) + 1)[kv_head, ids].transpose(1, 0, 2)
        mu, query = groups[b].mu[kv_head], q[b, h]
        logits, extra, error = logits_in_float64(query, keys, mu, weights, scale, softcap)
        error += logit_bound(query, keys, scale, softcap)
        logits = logits + extra
        exps = np.exp(logits - logits.max())
        out_bound, lse_bound = attention_bounds(logits, error, values)
        assert (np.abs(done.out[b, h] - exps @ values.astype(np.float64) / exps.sum()) <= out_bound).all()
        assert abs(done.lse[b, h] - logits.max() - np.log(exps.sum())) <= lse_bound


def logits_in_float64(query, keys, mu, weights, scale, softcap):
    """Logits, −ln u, and what rounding of the angle can do to it."""
    query, centred = query.astype(np.float64), keys.astype(np.float64) - mu.astype(np.float64)
    logits = scale * (keys.astype(np.float64) @ query)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    norms = np.linalg.norm(query) * np.linalg.norm(centred, axis=1)
    safe = np.where(norms > 0, norms, 1)
    cosine = np.where(norms > 0, centred @ query / safe, 0.0)
    error = (dot_bound(keys, query) + dot_bound(np.broadcast_to(mu, keys.shape), query)) / safe + DOT * U
    sine = np.sqrt((1 - np.clip(cosine, -1, 1)) / 2) * (len(weights) - 1)
    return logits, np.interp(sine, np.arange(len(weights)), weights), weight_bound(cosine, error, weights)


@RELAXED
@given(
    head_dim=st.sampled_from([1, 7, 8, 9, 16, 31, 33, 64, 80, 96, 128, 129, 256]),
    kl=st.sampled_from([(1, 2), (8, 2), (8, 150), (10, 150), (10, 300), (12, 300), (16, 300), (16, 2)]),
    counts=st.lists(st.sampled_from([1, 31, 64, 65, 500]), min_size=1, max_size=2),
    group=st.sampled_from([1, 2, 3, 5, 6, 7, 8, 16]),
    tail=st.sampled_from([0, 1, 63, 64, 65]),
    dtype=st.sampled_from(ROW_TYPES),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 100),
)
def test_rows_and_estimate(isa, head_dim, kl, counts, group, tail, dtype, softcap, seed):
    K, L = kl
    projection = make_projection(head_dim, K, L, seed)
    groups = []
    for i, count in enumerate(counts):
        table = make_table(make_rows(2, count, head_dim, seed + i), dtype, block_rows=100)
        here = min(tail, count)
        cuts = ((count - here) // 3,) if count - here > 2 else ()
        groups.append(make_group(table, count, projection, cuts, here))
    q = queries(len(counts), 2 * group, head_dim, seed)
    codes, weights = kernels.hash_queries(q, projection, 1), log_weights(K, L)
    done = kernels.lsh_attend(q, codes, groups, weights, scale=head_dim**-0.5, softcap=softcap, threads=2)
    assert_estimate(done, q, codes, groups, weights, head_dim**-0.5, softcap)
    found = kernels.lsh_sample(codes, groups, threads=2)
    for here, wanted in zip(found, reference.lsh_sample(codes, groups, 1), strict=True):
        for a, b in zip(here, wanted, strict=True):
            assert np.array_equal(a, b)
    assert set(done.stage_ns) == {"retrieve", "attend", "window", "merge"}


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", [505, 511, 512])
def test_the_longest_heads(isa, head_dim, dtype):
    projection = make_projection(head_dim, 4, 30)
    groups = [make_group(make_table(make_rows(2, 300, head_dim), dtype, block_rows=100), 300, projection, (100,), 20)]
    q = queries(1, 6, head_dim)
    codes, weights = kernels.hash_queries(q, projection, 1), log_weights(4, 30)
    done = kernels.lsh_attend(q, codes, groups, weights, scale=head_dim**-0.5, threads=2)
    assert done.sampled.min() > 20
    assert_estimate(done, q, codes, groups, weights, head_dim**-0.5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("tail", [0, 300])
def test_everything_sampled_without_weights_is_exact_attention(isa, tail, dtype):
    """K = 1 and L = 300 sample every key that is not opposite to the query."""
    rows = make_rows(2, 5000, 64)
    table, projection = make_table(rows, dtype), make_projection(64, 1, 300)
    group = make_group(table, 5000, projection, (1000, 2000), tail)
    q = queries(1, 4, 64)
    codes = kernels.hash_queries(q, projection, 1)
    done = kernels.lsh_attend(q, codes, [group], np.zeros(9, np.float32), scale=0.125, threads=2)
    assert (done.sampled == 5000).all()
    exact = kernels.exact_attend(q, [[(table, 0, 5000)]], scale=0.125, threads=2)
    for h in range(4):
        keys, values = table.read(0, 5000)[h // 2].transpose(1, 0, 2)
        logits = 0.125 * (keys.astype(np.float64) @ q[0, h])
        out_bound, lse_bound = attention_bounds(logits, logit_bound(q[0, h], keys, 0.125, None), values)
        assert (np.abs(done.out[0, h] - exact.out[0, h]) <= 2 * out_bound).all()
        assert abs(done.lse[0, h] - exact.lse[0, h]) <= 2 * lse_bound


def test_no_bit_depends_on_threads_neighbours_blocks_or_alignment(native_isa):
    rows, projection, q = make_rows(2, 20_000, 72), make_projection(72, 6, 80), queries(2, 6, 72)
    codes, weights = kernels.hash_queries(q, projection, 1), log_weights(6, 80)
    for dtype in ROW_TYPES:
        group = make_group(make_table(rows, dtype), 20_000, projection, (5000,), 500)  # 14,500 rows: two pieces
        wanted = kernels.lsh_attend(q, codes, [group, group], weights, scale=0.2, threads=1)
        assert wanted.sampled.min() > 50
        for threads, block_rows, shift in ((2, 1024, 0), (3, 1000, 1), (2, 20_000, 3), (1, 37, 5)):
            table = make_table(rows, dtype, block_rows, shift)
            other = kernels.SampledRows(table, group.mu, group.segments, group.tail)
            done = kernels.lsh_attend(q, codes, [other, other], weights, scale=0.2, threads=threads)
            assert np.array_equal(done.out, wanted.out)
            assert np.array_equal(done.lse, wanted.lse)
            assert np.array_equal(done.sampled, wanted.sampled)
        alone = kernels.lsh_attend(q[1:].copy(), codes[1:].copy(), [group], weights, scale=0.2, threads=1)
        assert np.array_equal(alone.out[0], wanted.out[1])
        assert np.array_equal(alone.lse[0], wanted.lse[1])


def test_pieces_of_which_nothing_is_sampled(isa):
    """What one thread walks as one item, others cut into items; whole pieces are empty, at either end and between."""
    count, heads, projection = 45_000, 8, make_projection(8, 5, 12)  # six pieces per kv head
    table = make_table(make_rows(heads, count, 8), block_rows=1000)
    mu = np.zeros((heads, 8), np.float32)
    codes = kernels.hash_rows(table, 0, count, projection, None, 1)
    codes[:, :, :9000] = codes[:, :, 20_000:33_000] = 31
    codes[3] = codes[7, :, 16_000:] = 31
    groups = [kernels.SampledRows(table, mu, [kernels.build_segment(codes, 5, 0, 1)])]
    q = queries(1, 2 * heads, 8)
    asked = kernels.hash_queries(q, projection, 1)
    asked[asked == 31] = 30
    weights = log_weights(5, 12)
    wanted = kernels.lsh_attend(q, asked, groups, weights, scale=0.3, threads=1)
    assert not wanted.sampled[0, 6:8].any()
    assert wanted.sampled[0, 8:].min() > 50
    assert_estimate(wanted, q, asked, groups, weights, 0.3)
    for threads in (2, 3, 40):
        done = kernels.lsh_attend(q, asked, groups, weights, scale=0.3, threads=threads)
        assert np.array_equal(done.out, wanted.out)
        assert np.array_equal(done.lse, wanted.lse)


def test_segments_and_tails_sample_the_same_rows(isa):
    table, projection = make_table(make_rows(2, 3000, 32)), make_projection(32, 8, 60)
    codes = kernels.hash_queries(queries(1, 6, 32), projection, 1)
    wanted = kernels.lsh_sample(codes, [make_group(table, 3000, projection)])
    for cuts, tail in (((1,), 0), ((64, 65, 2000), 0), ((1500,), 1000), ((), 3000)):
        found = kernels.lsh_sample(codes, [make_group(table, 3000, projection, cuts, tail)])
        assert all(np.array_equal(a, b) for a, b in zip(found[0], wanted[0], strict=True))
    assert sum(map(len, wanted[0])) > 100


def test_the_longest_segment_and_the_one_after_it(isa):
    """Ids up to 65,471 and a segment that starts where 16 bits end."""
    count, longest = kernels.MAX_SEGMENT_ROWS + 70, kernels.MAX_SEGMENT_ROWS
    rows = np.random.default_rng(0).normal(size=(1, count, 2, 4)).astype(np.float32)
    table, projection = make_table(rows), make_projection(4, 8, 3)
    groups = [make_group(table, count, projection, (longest,))]
    q = queries(1, 1, 4)
    codes = kernels.hash_queries(q, projection, 1)
    codes[0, 0] = kernels.segment_codes(groups[0].segments[0])[0, :, -1]
    done = kernels.lsh_attend(q, codes, groups, log_weights(8, 3), scale=0.5, threads=2)
    assert_estimate(done, q, codes, groups, log_weights(8, 3), 0.5)
    assert longest - 1 in kernels.lsh_sample(codes, groups)[0][0]


@pytest.mark.parametrize("L", [255, 256, 257, 300, 512, 600])
@pytest.mark.parametrize("tail", [0, 9])
def test_a_key_in_every_bucket_is_not_lost(isa, L, tail):
    """Case 33: 256 hits wrap a byte to 0. Row 5 shares all codes, row 7 exactly one, row 8 two, late ones."""
    codes = np.full((1, L, 9), 3, dtype=np.uint16)
    codes[0, :, 5] = 1
    codes[0, L - 1, 7] = 1
    codes[0, [0, L - 1], 8] = 1
    table = make_table(make_rows(1, 9, 8))
    segments = [] if tail else [kernels.build_segment(codes, 4, 0, 1)]
    group = kernels.SampledRows(
        table, np.zeros((1, 8), np.float32), segments, kernels.Tail(0, codes, 9) if tail else None
    )
    found = kernels.lsh_sample(np.ones((1, 1, L), dtype=np.uint16), [group])
    assert found[0][0].tolist() == [5, 8]


def test_a_key_in_the_direction_of_the_query_and_zero_keys(isa):
    rows = make_rows(1, 200, 32)
    q = queries(1, 1, 32)
    rows[0, 17, 0] = 2 * q[0, 0]
    rows[0, 18, 0] = -q[0, 0]
    rows[0, 19:23, 0] = 0
    for K, L in ((1, 2), (8, 150), (10, 300), (16, 300)):
        projection = make_projection(32, K, L)
        mu = np.zeros((1, 32), dtype=np.float32)
        table = make_table(rows)
        codes = kernels.hash_rows(table, 0, 200, projection, projection.bias(mu), 1)
        groups = [kernels.SampledRows(table, mu, [kernels.build_segment(codes, K, 0, 1)])]
        own, weights = kernels.hash_queries(q, projection, 1), log_weights(K, L)
        assert 17 in kernels.lsh_sample(own, groups)[0][0]
        done = kernels.lsh_attend(q, own, groups, weights, scale=0.2, threads=1)
        assert np.isfinite(done.out).all()
        assert_estimate(done, q, own, groups, weights, 0.2)
        zero = kernels.lsh_attend(np.zeros_like(q), np.zeros_like(own), groups, weights, scale=0.2, threads=1)
        assert zero.sampled[0, 0] >= 4  # keys and query without a direction have code 0
        assert np.isfinite(zero.out).all()
        assert_estimate(zero, np.zeros_like(q), np.zeros_like(own), groups, weights, 0.2)


def test_duplicate_keys_are_sampled_together(isa):
    rows = np.repeat(make_rows(1, 50, 16), 5, axis=1)
    projection = make_projection(16, 4, 20)
    groups = [make_group(make_table(rows), 250, projection, (100,), 30)]
    found = kernels.lsh_sample(kernels.hash_queries(queries(1, 3, 16), projection, 1), groups)
    for ids in found[0]:
        assert np.array_equal(ids, (np.unique(ids // 5)[:, None] * 5 + np.arange(5)).ravel())


def test_nothing_to_sample(isa):
    table, projection = make_table(make_rows(1, 40, 8)), make_projection(8, 16, 2)
    mu = np.zeros((1, 8), np.float32)
    codes = kernels.hash_rows(table, 0, 40, projection, None, 1)
    unused = next(c for c in range(2**16) if c not in codes)
    away = np.full((1, 1, 2), unused, dtype=np.uint16)
    groups = [kernels.SampledRows(table, mu, [kernels.build_segment(codes, 16, 0, 1)]), kernels.SampledRows(table, mu)]
    q = queries(2, 1, 8)
    done = kernels.lsh_attend(q, np.concatenate([away, away]), groups, log_weights(16, 2), scale=1.0, threads=1)
    assert not done.out.any()
    assert np.isneginf(done.lse).all()
    assert not done.sampled.any()
    none = kernels.lsh_attend(q[:0], away[:0], [], log_weights(16, 2), scale=1.0, threads=1)
    assert none.out.shape == (0, 1, 8)


def test_read_only_input(isa):
    table, projection = make_table(make_rows(1, 300, 16)), make_projection(16, 4, 20)
    group = make_group(table, 300, projection, (), 50)
    q, weights = queries(1, 2, 16), log_weights(4, 20)
    codes = kernels.hash_queries(q, projection, 1)
    wanted = kernels.lsh_attend(q, codes, [group], weights, scale=1.0, threads=1)
    tail = group.tail
    assert tail is not None
    for array in (q, codes, weights, group.mu, tail.codes, *(x for s in group.segments for x in (s.ids, s.offsets))):
        array.flags.writeable = False
    assert np.array_equal(kernels.lsh_attend(q, codes, [group], weights, scale=1.0, threads=1).out, wanted.out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": np.zeros((1, 2, 20), np.int32)}, r"codes: want uint16 \[B, H, L\], got int32"),
        ({"codes": np.zeros((1, 2, 19), np.uint16)}, r"segments: want K, L, Hkv = \(4, 19, 1\), got \(4, 20, 1\)"),
        ({"codes": np.full((1, 2, 20), 16, np.uint16)}, "want 4-bit codes, got 16"),
        ({"codes": np.zeros((2, 2, 20), np.uint16)}, r"codes: want uint16 \[B, H, L\] = \(1, 2, any\)"),
        ({"groups": []}, "groups: want one for each of 1 sequences, got 0"),
        ({"q": np.zeros((1, 2, 15), np.float32)}, "q: want float32"),
        ({"weights": np.zeros(1, np.float32)}, "weights: want at least 2 entries, got 1"),
        ({"weights": np.zeros(5)}, r"weights: want float32 \[cells \+ 1\], got float64"),
        ({"scale": float("inf")}, "scale: want a finite number"),
        ({"threads": 0}, "threads: want 1 or more, got 0"),
    ],
)
def test_the_door_names_what_is_wrong(change, message):
    table, projection = make_table(make_rows(1, 300, 16)), make_projection(16, 4, 20)
    q = queries(1, 2, 16)
    good = {
        "q": q,
        "codes": kernels.hash_queries(q, projection, 1),
        "groups": [make_group(table, 300, projection, (), 50)],
        "weights": log_weights(4, 20),
        "scale": 1.0,
        "threads": 1,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.lsh_attend(**{**good, **change})


def test_a_segment_beyond_the_rows_is_refused():
    table, projection = make_table(make_rows(1, 300, 16), block_rows=300), make_projection(16, 4, 20)
    group = make_group(table, 300, projection)
    moved = kernels.Segment(1, 300, 4, 20, group.segments[0].offsets, group.segments[0].ids)
    codes = np.zeros((1, 2, 20), np.uint16)
    with pytest.raises(ValueError, match=r"segment: want rows within \[0, 300\), got \[1, 301\)"):
        kernels.lsh_sample(codes, [kernels.SampledRows(table, group.mu, [moved])])


@pytest.mark.parametrize(
    ("dtype", "near_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "bfloat16")]
)
def test_exact_runs_beside_samples_weigh_as_their_keys_do(isa, dtype, near_dtype):
    """Merged in one call as by hand in float64; a sequence may have runs alone, samples alone, or neither."""
    projection, weights = make_projection(40, 4, 30), log_weights(4, 30)
    table = make_table(make_rows(2, 300, 40), dtype, block_rows=64)
    near = make_table(make_rows(2, 90, 40, seed=5), near_dtype, block_rows=90)
    group = make_group(table, 250, projection, cuts=(100,), tail=20)
    nothing = kernels.SampledRows(table, np.zeros((2, 40), dtype=np.float32))
    q = queries(4, 6, 40)
    codes = kernels.hash_queries(q, projection, 1)
    groups = [group, nothing, group, nothing]
    runs = [[(near, 0, 4), (near, 30, 90), (table, 250, 300)], [(near, 5, 80)], [], [(near, 7, 7)]]
    done = kernels.lsh_attend(q, codes, groups, weights, scale=0.2, threads=2, exact=runs)
    far = kernels.lsh_attend(q, codes, groups, weights, scale=0.2, threads=1)
    beside = kernels.exact_attend(q, runs, scale=0.2, threads=1)
    assert np.array_equal(done.sampled, far.sampled)
    assert done.sampled[[1, 3]].sum() == 0
    assert done.sampled[0].min() > 0
    assert np.array_equal(done.out[1], beside.out[1])  # alone, a part keeps its bits
    assert np.array_equal(done.out[2], far.out[2])
    assert not done.out[3].any()
    assert np.isneginf(done.lse[3]).all()
    share = np.exp(far.lse[0].astype(np.float64) - done.lse[0])[:, None]
    merged = share * far.out[0] + (1 - share) * beside.out[0]
    assert np.abs(np.logaddexp(far.lse[0], beside.lse[0]) - done.lse[0]).max() <= SUM * U * np.abs(done.lse[0]).max()
    assert np.abs(merged - done.out[0]).max() <= SUM * U * max(np.abs(far.out[0]).max(), np.abs(beside.out[0]).max())
    for threads in (1, 3):
        again = kernels.lsh_attend(q, codes, groups, weights, scale=0.2, threads=threads, exact=runs)
        assert np.array_equal(again.out, done.out)
        assert np.array_equal(again.lse, done.lse)
