"""Weights rounded to 4 bits: how far they are off, and that what was 4 bits before comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import reference
from tests.kernels.data import RELAXED, to_bits

GROUP = kernels.INT4_GROUP
HALF_U, HALF_STEP = 2.0**-11, 2.0**-24  # of float16: unit roundoff, and the distance of its smallest numbers


def rounded(values: np.ndarray, threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Codes and factors of [N, K], in memory that ends where they do."""
    outer, inner = values.shape
    room, more = np.full(values.size // 2 + 64, 0xAA, np.uint8), np.full(values.size // 16 + 64, np.nan, np.float16)
    codes = room[: values.size // 2].reshape(outer, inner // 2)
    factors = more[: values.size // 16].reshape(outer, inner // GROUP, 2)
    held = values.astype(np.float32)
    held.flags.writeable = False
    kernels.round_int4(held, codes, factors, threads=threads)
    assert (room[values.size // 2 :] == 0xAA).all()
    assert np.isnan(more[values.size // 16 :]).all()
    return codes, factors


def restored(values: np.ndarray) -> np.ndarray:
    """What int4 makes of [N, K], in float64."""
    out = np.empty(values.shape, np.float32)
    kernels.widen_int4(*rounded(values), out, threads=1)
    return out.astype(np.float64)


def ranges(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distance from the smallest to the largest value of each group, and the largest size, for each of its values."""
    groups = values.astype(np.float64).reshape(len(values), -1, GROUP)
    span, size = np.ptp(groups, axis=2), np.abs(groups).max(axis=2)
    return np.repeat(span, GROUP, axis=1), np.repeat(size, GROUP, axis=1)


def bound(values: np.ndarray) -> np.ndarray:
    """Half a step, and what rounding scale and minimum to float16 adds at the ends of the range."""
    span, size = ranges(values)
    return span / 30 + HALF_U * (span + size) + 16 * HALF_STEP


def normal(outer: int, inner: int, seed: int = 0, size: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(outer, inner)) * size).astype(np.float32)


@RELAXED
@given(
    inner=st.sampled_from([32, 64, 96, 576, 1536]), outer=st.sampled_from([1, 2, 33, 300]),
    size=st.sampled_from([1e-9, 1e-6, 1e-3, 0.02, 1.0, 1e4]), seed=st.integers(0, 100),
)  # fmt: skip
def test_values_are_off_by_half_a_step(isa, inner, outer, size, seed):
    values = normal(outer, inner, seed, size)
    assert (np.abs(restored(values) - values) <= bound(values)).all()


@pytest.mark.parametrize("inner", [32, 96, 1536])
def test_every_instruction_set_gives_the_bits_of_the_reference(native_isa, inner):
    values = normal(70, inner) * np.logspace(-9, 6, 70, dtype=np.float32)[:, None]
    values[3] = 0
    values[4] = 1.5
    values[5:20] = on_grid(15, inner, 3, 12)
    for threads in (1, 2, 3):
        codes, factors = rounded(values, threads)
        wanted = np.empty_like(codes), np.empty_like(factors)
        reference.round_int4(values, *wanted, 1)
        assert np.array_equal(codes, wanted[0])
        assert np.array_equal(factors, wanted[1])


# What was 4 bits before


def on_grid(outer: int, inner: int, lowest: int, highest: int, seed: int = 1, low: float = -8.0) -> np.ndarray:
    """Codes from `lowest` to `highest`, each group with a float16 step: (low + code) · step, as GGUF's Q4_0 has it."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(lowest, highest + 1, (outer, inner // GROUP, GROUP))
    step = rng.uniform(0.5, 1.5, (outer, inner // GROUP, 1)).astype(np.float16).astype(np.float32) * np.float32(0.01)
    step = step.astype(np.float16).astype(np.float32)
    return ((codes + np.float32(low)) * step).reshape(outer, inner).astype(np.float32)


def steps_of(values: np.ndarray) -> np.ndarray:
    """Scale of the group of each value."""
    return np.repeat(rounded(values)[1][..., 0].astype(np.float64), GROUP, axis=1)


def test_q4_1_comes_back_as_it_was(isa):
    """Step and minimum are float16, and both ends of the range are taken: nothing is lost."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (40, 6, GROUP))
    codes[..., 3], codes[..., 30] = 0, 15
    pair = rng.uniform(0.001, 0.1, (40, 6, 2)).astype(np.float16).astype(np.float32)
    values = (pair[..., :1] * codes.astype(np.float32) - pair[..., 1:]).reshape(40, -1)
    assert np.array_equal(restored(values), values)


@pytest.mark.parametrize(("lowest", "highest"), [(0, 15), (0, 14), (1, 15), (0, 12), (3, 11), (5, 7), (8, 8)])
def test_q4_0_comes_back_where_its_ends_are_not_taken(isa, lowest, highest):
    """Up to the rounding of the minimum, a product of a float16 and up to 8: less than a hundredth of a step."""
    values = on_grid(40, 192, lowest, highest)
    assert (np.abs(restored(values) - values) <= 2 * HALF_U * ranges(values)[1]).all()


@pytest.mark.parametrize(("lowest", "highest"), [(0, 15), (1, 13), (2, 11)])
def test_q4_k_comes_back_where_its_ends_are_not_taken(isa, lowest, highest):
    """Steps and minima are products of float16 and 6 bits: they are rounded, the codes are the same."""
    rng = np.random.default_rng(4)
    codes = rng.integers(lowest, highest + 1, (64, 8, GROUP)).astype(np.float32)
    codes[..., 0], codes[..., 1] = lowest, highest
    d = rng.uniform(1e-4, 2e-4, (64, 1, 2)).astype(np.float16).astype(np.float32)
    sub = rng.integers(20, 64, (64, 8, 2)).astype(np.float32) * d
    values = (sub[..., :1] * codes - 7 * sub[..., 1:]).reshape(64, -1).astype(np.float32)
    packed, _ = rounded(values)
    halves = packed.reshape(64, 8, 16)
    assert np.array_equal(np.concatenate([halves & 15, halves >> 4], axis=2), codes - lowest)
    span, size = ranges(values)
    assert (np.abs(restored(values) - values) <= HALF_U * (span + size)).all()


def test_grids_are_found_in_bfloat16_too(isa):
    values = kernels.widen(to_bits(on_grid(64, 64, 0, 13)))
    step = steps_of(values)
    assert np.median(np.abs(restored(values) - values) / step) < 0.02  # without the grid a quarter step


# Corners


@pytest.mark.parametrize("value", [0.0, 1.0, -0.375, 60000.0, -60000.0, 2.0**-24])
def test_groups_of_one_value_keep_it(isa, value):
    assert (restored(np.full((2, 64), value)) == value).all()


def test_minima_are_rounded_to_the_nearest_float16(isa):
    """Halves to even, small numbers and infinity included: what lies between two float16, in groups of one value."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float64)
    halves[-1] = 65536.0  # where float16 would go on
    middle = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate([halves[:-1], middle, np.nextafter(middle.astype(np.float32), 0)]).astype(np.float32)
    values = np.concatenate([values, -values])
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float16)
    _, factors = rounded(np.repeat(values[:, None], GROUP, axis=1))
    assert np.array_equal(factors[:, 0, 1], wanted)


def test_one_large_value_spoils_its_own_group_only(isa):
    values = normal(4, 96)
    values[2, 40] = 5000
    again = restored(values)
    rest = np.ones(values.shape, bool)
    rest[2, 32:64] = False
    assert np.array_equal(again[rest], restored(normal(4, 96))[rest])
    assert abs(again[2, 40] - 5000) <= bound(values)[2, 40]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 70000.0, -3e38])
def test_what_float16_does_not_have_stays_in_its_group(isa, value):
    """The caller has looked before; nothing becomes a number by chance."""
    values = normal(3, 96)
    values[1, 33] = value
    again = restored(values)
    spoiled = np.zeros(values.shape, bool)
    spoiled[1, 32:64] = True
    assert np.array_equal(again[~spoiled], restored(normal(3, 96))[~spoiled])
    if not np.isfinite(value) or value < 0:
        assert not np.isfinite(again[spoiled]).any()


GOOD = {
    "values": np.zeros((4, 64), np.float32), "codes": np.zeros((4, 32), np.uint8),
    "factors": np.zeros((4, 2, 2), np.float16), "threads": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"values": np.zeros((4, 64))}, "values: want float32"),
        ({"values": np.zeros((3, 64), np.float32)}, r"values: want float32 \[N, K\] = \(4, any\)"),
        ({"values": np.zeros((4, 72), np.float32)}, "K: want a multiple of 32 for int4, got 72"),
        ({"codes": np.zeros((4, 32), np.int8)}, r"weight: want uint8 \[N, K/2\]"),
        ({"factors": np.zeros((4, 2), np.float16)}, r"scale: want float16 \[N, K/32, 2\]"),
        ({"threads": 0}, "threads: want 1 or more"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.round_int4(**(GOOD | change))
