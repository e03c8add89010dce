"""Signatures of rows: signs of rotated keys, whatever the calls, threads, blocks or instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import isa as tiers
from tests.kernels.data import RELAXED, ROW_TYPES, make_basis, make_rows, make_table, signature_bits
from tests.tolerances import BF16_STEP, DOT, U, factor_bound


def assert_same(a: kernels.SignatureBlock, b: kernels.SignatureBlock) -> None:
    assert np.array_equal(a.codes, b.codes)
    assert np.array_equal(a.factors, b.factors)
    assert np.array_equal(a.means, b.means)


@RELAXED
@given(
    head_dim=st.sampled_from([1, 7, 8, 9, 16, 31, 33, 64, 80, 96, 128, 129, 256]),
    bits=st.sampled_from([32, 64, 96, 128, 512]),
    cells=st.integers(1, 2),
    dtype=st.sampled_from(ROW_TYPES),
    seed=st.integers(0, 1000),
)
def test_bits_are_signs_of_rotated_keys(isa, head_dim, bits, cells, dtype, seed):
    count = 256 * cells
    table, basis = (
        make_table(make_rows(2, count, head_dim, seed), dtype, block_rows=100),
        make_basis(bits, head_dim, seed),
    )
    block = kernels.sign_rows(table, 0, count, basis, 1)
    keys = table.read(0, count)[:, :, 0].astype(np.float64)
    means = keys.reshape(2, cells, 256, head_dim).mean(axis=2)
    mu = kernels.widen(block.means).astype(np.float64)
    assert (np.abs(mu - means) <= (BF16_STEP / 2 + U) * np.abs(means) + 1e-30).all()
    x = keys - mu.repeat(256, axis=1)
    matrix = basis.matrix.astype(np.float64)
    projected, error = x @ matrix.T, DOT * U * (np.abs(x) + np.abs(keys)) @ np.abs(matrix).T
    wrong = signature_bits(block) != (projected > 0)
    assert not (wrong & (np.abs(projected) > error)).any()
    assert wrong.mean() <= 0.01
    size = np.abs(projected).sum(axis=2)
    factors = np.divide((x**2).sum(axis=2), size, out=np.zeros_like(size), where=size > 0)
    away = size > 100 * error.sum(axis=2)  # a key that is nearly the mean is known by rounding only
    assert away.mean() > 0.9
    off = np.abs(kernels.widen(block.factors) - factors)[away]
    assert (off <= factor_bound(factors)[away] + (factors * error.sum(axis=2) / np.where(away, size, 1))[away]).all()


@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_no_bit_depends_on_calls_threads_blocks_or_alignment(native_isa, dtype):
    rows, basis = make_rows(3, 1024, 72), make_basis(96, 72)
    table = make_table(rows, dtype)
    whole = kernels.sign_rows(table, 0, 1024, basis, 1)
    for threads in (2, 3):
        assert_same(kernels.sign_rows(table, 0, 1024, basis, threads), whole)
    for block_rows, shift in ((64, 1), (37, 3), (1024, 5)):
        assert_same(kernels.sign_rows(make_table(rows, dtype, block_rows, shift), 0, 1024, basis, 2), whole)
    for start, stop in ((0, 256), (256, 1024), (768, 1024), (512, 512)):
        part = kernels.sign_rows(table, start, stop, basis, 2)
        assert np.array_equal(part.codes, whole.codes[:, start // 32 : stop // 32])
        assert np.array_equal(part.factors, whole.factors[:, start:stop])
        assert np.array_equal(part.means, whole.means[:, start // 256 : stop // 256])


@pytest.mark.parametrize("dtype", ROW_TYPES)
@pytest.mark.parametrize("head_dim", [1, 17, 64, 128, 200, 512])
def test_fused_tiers_agree_to_the_bit(monkeypatch, head_dim, dtype):
    found = []
    for tier in (tier for tier in tiers.runnable() if tier != "portable"):
        monkeypatch.setattr(tiers, "_backend", tiers.load(tier))
        table = make_table(make_rows(2, 512, head_dim), dtype)
        found.append(kernels.sign_rows(table, 0, 512, make_basis(128, head_dim), 2))
    for block in found[1:]:
        assert_same(block, found[0])


def test_zeros_duplicates_and_infinities(isa):
    rows = make_rows(1, 1024, 32)
    rows[0, :256, 0] = 0
    rows[0, 256:512, 0] = np.float32(1.5)  # the mean is each of them
    rows[0, 600] = rows[0, 700]
    rows[0, 900, 0, 3] = np.inf
    rows[0, 901, 0, :2] = np.nan, -np.inf
    block = kernels.sign_rows(make_table(rows), 0, 1024, make_basis(64, 32), 1)
    bits = signature_bits(block)[0]
    assert not block.factors[0, :512].any()
    assert not bits[:512].any()
    assert np.array_equal(bits[600], bits[700])
    assert block.factors[0, 600] == block.factors[0, 700] > 0
    assert np.isfinite(kernels.widen(block.factors)).all()
    assert np.isfinite(kernels.widen(block.means)).all()
    assert not block.factors[0, [900, 901]].any()  # what has no size has no direction


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_per_row(head_dim):
    """Must show: at most 20 bytes per token and KV head."""
    table = make_table(make_rows(2, 512, head_dim), "bfloat16")
    block = kernels.sign_rows(table, 0, 512, make_basis(128, head_dim), 1)
    assert block.nbytes == block.codes.nbytes + block.factors.nbytes + block.means.nbytes
    assert block.nbytes / 512 / 2 == 16 + 2 + 2 * head_dim / 256
    assert block.nbytes / 512 / 2 <= 20


def test_rotation_share_is_that_of_the_rotations():
    assert kernels.rotation_share(128, 128) == 1
    assert kernels.rotation_share(128, 64) == 0.5
    assert kernels.rotation_share(128, 96) == (96**2 + 32**2) / 128**2
    assert kernels.rotation_share(64, 256) == 1
    assert make_basis(128, 64).share == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 1}, r"rows: want multiples of 256, got \[1, 512\)"),
        ({"stop": 300}, r"rows: want multiples of 256, got \[0, 300\)"),
        ({"stop": 1024}, r"rows: want rows within \[0, 512\)"),
        ({"threads": 0}, "threads: want 1 or more, got 0"),
        ({"basis": make_basis(64, 8)}, "basis: want a head dim of 16, got 8"),
    ],
)
def test_the_door_names_what_is_wrong(change, message):
    table = make_table(make_rows(1, 512, 16), block_rows=512)
    good = {"table": table, "start": 0, "stop": 512, "basis": make_basis(64, 16), "threads": 1}
    with pytest.raises((TypeError, ValueError), match=message):
        kernels.sign_rows(**{**good, **change})


def test_a_basis_has_bits_in_multiples_of_32():
    for bits, message in ((48, "bits: want a multiple of 32, got 48"), (544, "want 32 to 512"), (0, "want 32 to 512")):
        with pytest.raises(ValueError, match=message):
            kernels.SignatureBasis(np.zeros((bits, 16), np.float32))
    with pytest.raises(TypeError, match=r"basis: want float32 \[bits, D\]"):
        kernels.SignatureBasis(np.zeros((64, 16)))


def test_blocks_that_do_not_fit_are_refused():
    table = make_table(make_rows(2, 512, 16), block_rows=512)
    block, other = (kernels.sign_rows(table, 0, 256, make_basis(bits, 16), 1) for bits in (64, 32))
    with pytest.raises(ValueError, match="blocks: want 64 bits in all, got 32"):
        kernels.SignedRows(table, [block, other])
    with pytest.raises(ValueError, match=r"blocks: want rows within \[0, 512\), got \[0, 768\)"):
        kernels.SignedRows(table, [block, block, block])
    with pytest.raises(ValueError, match="blocks: want signatures of 1 kv heads of 16, got 2 of 16"):
        kernels.SignedRows(make_table(make_rows(1, 512, 16)), [block])
    with pytest.raises(ValueError, match="codes: want rows in multiples of 256, got 224"):
        kernels.SignatureBlock(block.codes[:, :7].copy(), block.factors[:, :224].copy(), block.means)
    with pytest.raises(ValueError, match=r"factors: want uint16 \[Hkv, n\]"):
        kernels.SignatureBlock(block.codes, block.factors[:, :224].copy(), block.means)
