"""Sizes that signatures, their scores and the table of −ln Φ agree on: here, in cyext/simd/signature.h, and above."""

from __future__ import annotations

import math

from magicpig_cli.kernels.checks import want_int

SIGNATURE_ROWS = 256  # of a cell, which has one mean
SIGNATURE_GROUP = 32  # rows whose bits stand side by side
MAX_SIGNATURE_BITS = 512
_BITS_STEP = 32
TOP_SCORE = 32767  # the largest score; a threshold one above takes no row, one below −TOP_SCORE all
JITTER_ROWS = 2**17  # of the pool of jitter
JITTER_NATS = 12.5  # above the largest of it, 12.48
SUBSET, EXPECTED = 2048, 32  # rows that the threshold is taken from, and how many are expected above it: at least
Z_LOW, Z_HIGH = -11.0, 7.0  # first and last z of the table of −ln Φ(z)


def want_signature_bits(bits: int) -> None:
    """A multiple of 32, 32 to 512."""
    want_int("bits", bits, _BITS_STEP, MAX_SIGNATURE_BITS)
    if bits % _BITS_STEP:
        raise ValueError(f"bits: want a multiple of {_BITS_STEP}, got {bits}")


def signature_bytes(bits: int) -> int:
    """Of one key: its bits and a 16-bit factor."""
    return bits // 8 + 2


def rotation_share(bits: int, head_dim: int) -> float:
    """Σ (B_j / B)² of B = `bits` bits, B_j of them from rotation j, which has `head_dim` rows or is cut: 1/m for m
    whole rotations."""
    whole, cut = divmod(bits, head_dim)
    return (whole * head_dim**2 + cut**2) / bits**2


def threshold_subset(n: int, share: float) -> tuple[int, int, int]:
    """(stride, size, count): the threshold that a share of n > 0 rows reaches is the count-th largest score of every
    stride-th row, of which there are `size`. count = 0: no row is to be taken; count = size: all."""
    if share <= 0:
        return n, 1, 0
    stride = max(1, n // max(SUBSET, math.ceil(EXPECTED / share)))
    size = -(-n // stride)
    return stride, size, min(size, max(1, math.floor(share * size + 0.5)))
