"""Synthetic layers have the geometry they claim: a cone of keys, clusters, few close keys, the wanted ratio."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli import kernels
from magicpig_cli.bench.synthetic import CLUSTERS, CONE_COSINE, SyntheticLayer, SyntheticShape, calibrated

SHAPE = SyntheticShape(kv_heads=2, group=4, head_dim=128, n=4096, steps=2)


@pytest.fixture(scope="module")
def layer():
    return calibrated(SHAPE, 0.02)


def centred_keys(layer) -> tuple[np.ndarray, np.ndarray]:
    """Keys [Hkv, N, D] as stored, and their mean [Hkv, 1, D]; float64."""
    keys = layer.tensors.rows[:, :, 0].double().numpy()
    return keys, keys.mean(axis=1, keepdims=True)


def test_keys_form_a_cone(layer):
    keys, mean = centred_keys(layer)
    cosine = (keys * mean).sum(axis=-1) / np.linalg.norm(keys, axis=-1) / np.linalg.norm(mean, axis=-1)
    assert abs(cosine.mean() - CONE_COSINE) < 0.02
    assert cosine.min() > 0.7


def test_queries_point_away_from_the_mean(layer):
    _, mean = centred_keys(layer)
    q = layer.tensors.q.double().numpy().reshape(SHAPE.steps, SHAPE.kv_heads, SHAPE.group, SHAPE.head_dim)
    cosine = (q * mean).sum(axis=-1) / np.linalg.norm(q, axis=-1) / np.linalg.norm(mean, axis=-1)
    assert cosine.max() < -0.4


def test_sampled_ratio_is_within_the_band_and_is_what_lsh_attend_samples(layer):
    assert 0.018 <= layer.sampled_ratio() <= 0.022
    counted = np.mean([layer.attend(step, 1).sampled for step in range(SHAPE.steps)])
    assert counted / SHAPE.n == pytest.approx(layer.sampled_ratio(), rel=1e-12)


def test_clusters_fill_some_buckets_far_above_the_mean(layer):
    (segment,) = layer.index.segments
    sizes = np.diff(segment.offsets.astype(int), axis=-1)
    assert 7 <= sizes.max() / sizes.mean() <= 40


def test_heads_of_a_group_sample_alike(layer):
    one = layer.sampled_ratio() * SHAPE.n
    union = np.mean([len(rows) for step in range(SHAPE.steps) for rows in layer.union_rows(step)])
    assert 1.5 * one < union < 3.5 * one


def test_union_rows_are_those_of_the_heads(layer):
    heads = layer.sampled_rows()[1]
    for kv_head, rows in enumerate(layer.union_rows(1)):
        group = heads[kv_head * SHAPE.group : (kv_head + 1) * SHAPE.group]
        assert set(rows) == set().union(*map(set, group))
        assert (np.diff(rows) > 0).all()


def test_a_function_of_shape_and_seed():
    small = SyntheticShape(1, 2, 16, 300, 2)
    one, same, other = (SyntheticLayer(small, seed).tensors(1.0) for seed in (1, 1, 2))
    assert torch.equal(one.rows, same.rows)
    assert torch.equal(one.q, same.q)
    assert not torch.equal(one.rows, other.rows)
    assert one.rows.dtype == torch.bfloat16
    assert one.rows.shape == (1, 300, 2, 16)
    assert one.q.shape == (2, 2, 16)


def test_a_ratio_out_of_reach_is_refused():
    with pytest.raises(ValueError, match="can give"):
        calibrated(SyntheticShape(1, 2, 64, 2048, 1), 0.9)


def test_ratio_counts_by_brute_force():
    """Codes of rows and queries compared table by table."""
    layer = calibrated(SyntheticShape(1, 2, 64, 1500, 2), 0.04)
    (segment,) = layer.index.segments
    codes = kernels.segment_codes(segment)[0]  # [L, N]
    hits = (layer.codes[:, :, :, None] == codes).sum(axis=2) >= 2  # [S, H, N]
    assert layer.sampled_ratio() == pytest.approx(hits.mean(), rel=1e-12)


def test_shares_fall_like_zipf():
    from magicpig_cli.bench.synthetic import _shares

    shares = _shares()
    assert shares.sum() == pytest.approx(1)
    assert shares[0] / shares[CLUSTERS - 1] == pytest.approx(CLUSTERS)
