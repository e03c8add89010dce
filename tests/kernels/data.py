"""Rows, projections and the closed form that the kernel tests share. No torch: they run where there is none."""

from __future__ import annotations

import math
import os

import numpy as np
from hypothesis import HealthCheck, settings

from magicpig_cli import kernels

# An emulated CPU takes 20 times as long for an example (scripts/test_neon.sh).
RELAXED = settings(
    max_examples=int(os.environ.get("MAGICPIG_TEST_EXAMPLES", "30")), deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip

ROW_TYPES = ("float32", "bfloat16", "int8")


def to_bits(x: np.ndarray) -> np.ndarray:
    """float32 → bfloat16 bits, rounded to nearest even; infinities stay."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isfinite(x), rounded, bits >> 16).astype(np.uint16)


def to_int8(rows: np.ndarray) -> np.ndarray:
    """`cache.quantize` in NumPy: float32 [..., D] → int8 [..., D + 2]."""
    rows = kernels.widen(to_bits(rows))
    largest = np.abs(rows).max(axis=-1, keepdims=True)
    scale = to_bits(np.maximum(largest / np.float32(127), np.float32(2.0**-126)))
    scale[~np.isfinite(kernels.widen(scale))] = 0x7FC0
    with np.errstate(invalid="ignore"):
        values = np.rint(rows / kernels.widen(scale)).clip(-127, 127)
    return np.concatenate([np.nan_to_num(values).astype(np.int8), scale.astype("<u2").view(np.int8)], axis=-1)


def as_stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Rows [..., D] in the layout of a row type: [..., W]."""
    rows = rows.astype(np.float32)
    if dtype == "int8":
        return to_int8(rows)
    return rows if dtype == "float32" else to_bits(rows)


def make_table(rows: np.ndarray, dtype: str = "float32", block_rows: int = 1024, shift: int = 0) -> kernels.RowTable:
    """Rows float32 [Hkv, N, 2, D] as a table whose blocks start `shift` elements after an aligned address.

    The room behind the rows holds NaN: nothing may read it.
    """
    heads, count, _, head_dim = rows.shape
    table = kernels.RowTable(heads, head_dim, dtype, block_rows)
    stored = as_stored(rows, dtype)
    width = stored.shape[-1]
    nan = {"float32": np.float32(np.nan), "bfloat16": np.uint16(0x7FC0), "int8": np.int8(-1)}[dtype]
    for start in range(0, count, block_rows):
        part = stored[:, start : start + block_rows]
        memory = np.full(heads * block_rows * 2 * width + shift, nan, dtype=stored.dtype)
        block = memory[shift:].reshape(heads, block_rows, 2, width)
        block[:, : part.shape[1]] = part
        block.flags.writeable = False
        table.append_block(block)
    return table


def make_rows(heads: int, count: int, head_dim: int, seed: int = 0) -> np.ndarray:
    """Keys around a common direction, so that centring matters; float32 [Hkv, N, 2, D]."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(heads, count, 2, head_dim)).astype(np.float32)
    rows[:, :, 0] += rng.normal(size=(heads, 1, head_dim)).astype(np.float32)
    return rows


def queries(B: int, H: int, D: int, seed: int = 9) -> np.ndarray:
    """float32 [B, H, D], large enough that some keys matter more than others."""
    return 2 * np.random.default_rng(seed).normal(size=(B, H, D)).astype(np.float32)


def budgets(B: int, H: int, *values: float) -> np.ndarray:
    """float32 [B, H]: the values in turns over the heads."""
    return np.resize(np.array(values, dtype=np.float32), (B, H))


def make_projection(head_dim: int, K: int, L: int, seed: int = 0) -> kernels.Projection:
    matrix = np.random.default_rng(seed).normal(size=(head_dim, L * K)).astype(np.float32)
    return kernels.Projection(matrix, K, L)


def make_group(
    table: kernels.RowTable, count: int, projection: kernels.Projection, cuts: tuple[int, ...] = (), tail: int = 0
) -> kernels.SampledRows:
    """Index rows [0, count): segments that end at `cuts` and before the tail of `tail` rows."""
    mu = np.ascontiguousarray(table.read(0, count)[:, :, 0].mean(axis=1))
    codes = kernels.hash_rows(table, 0, count, projection, projection.bias(mu), 1)
    ends = [*cuts, count - tail]
    segments = [
        kernels.build_segment(np.ascontiguousarray(codes[:, :, start:stop]), projection.K, start, 1)
        for start, stop in zip([0, *ends[:-1]], ends, strict=True)
        if stop > start
    ]
    rest = np.ascontiguousarray(codes[:, :, count - tail :])
    return kernels.SampledRows(table, mu, segments, kernels.Tail(count - tail, rest, tail) if tail else None)


def inclusion(cosine: np.ndarray, K: int, L: int) -> np.ndarray:
    """P(at least two of L codes of K bits are equal), by its binomial series in float64."""
    p = (1 - np.arccos(np.clip(np.asarray(cosine, dtype=np.float64), -1, 1)) / math.pi) ** K
    inside = np.clip(p, 1e-300, 1 - 1e-16)
    total = np.zeros_like(inside)
    for j in range(2, L + 1):
        choose = math.lgamma(L + 1) - math.lgamma(j + 1) - math.lgamma(L - j + 1)
        total += np.exp(choose + j * np.log(inside) + (L - j) * np.log1p(-inside))
    return np.where(p == 1, 1.0, np.clip(total, 1e-30, 1))


def log_weights(K: int, L: int, cells: int = 4096) -> np.ndarray:
    """−ln u over uniform cells of sin(θ/2); float32 [cells + 1]."""
    sine = np.arange(cells + 1) / cells
    return (-np.log(inclusion(1 - 2 * sine**2, K, L))).astype(np.float32)


def make_basis(bits: int, head_dim: int, seed: int = 0) -> kernels.SignatureBasis:
    """Random rotations on top of each other, cut to `bits` rows."""
    rng = np.random.default_rng(seed)
    rotations = []
    for _ in range(-(-bits // head_dim)):
        rotation, triangle = np.linalg.qr(rng.normal(size=(head_dim, head_dim)))
        rotations.append(rotation * np.sign(np.diag(triangle)))
    return kernels.SignatureBasis(np.ascontiguousarray(np.concatenate(rotations)[:bits], dtype=np.float32))


def make_signed(
    table: kernels.RowTable, count: int, basis: kernels.SignatureBasis, cuts: tuple[int, ...] = ()
) -> kernels.SignedRows:
    """Signatures of rows [0, count): blocks that end at `cuts` and at the end."""
    ends = [*cuts, count]
    blocks = [
        kernels.sign_rows(table, start, stop, basis, 1)
        for start, stop in zip([0, *ends[:-1]], ends, strict=True)
        if stop > start
    ]
    return kernels.SignedRows(table, blocks)


def signature_bits(block: kernels.SignatureBlock) -> np.ndarray:
    """bool [Hkv, n, bits], as the layout of the codes says."""
    nibbles = np.stack([block.codes & 15, block.codes >> 4], axis=2)  # [Hkv, n/32, 2, bits/4, 16]
    nibbles = nibbles.swapaxes(3, 4).reshape(*block.factors.shape, -1)  # [Hkv, n, bits/4]
    return (nibbles[..., None] >> np.arange(4) & 1).astype(bool).reshape(*block.factors.shape, -1)


def log_normal(cells: int = 4096) -> np.ndarray:
    """−ln Φ over uniform cells of z from Z_LOW to Z_HIGH; float32 [cells + 1]."""
    z = np.linspace(kernels.Z_LOW, kernels.Z_HIGH, cells + 1)
    return np.array([-math.log(math.erfc(-x / math.sqrt(2)) / 2) for x in z.tolist()], dtype=np.float32)
