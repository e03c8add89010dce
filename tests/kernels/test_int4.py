"""Products with 4-bit weights: the same bits everywhere, and float64 on what weights and vectors were rounded to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import reference
from magicpig_cli.kernels.reference.product import round_groups
from tests.kernels.data import RELAXED
from tests.kernels.test_product import parts, vectors
from tests.tolerances import U, close_product

SIZES = [32, 64, 96, 128, 160, 576, 1536]  # K: groups that do not fill four, and that do
GROUP = kernels.INT4_GROUP


def as_held(codes: np.ndarray, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K/32, 32] packed to [N, K/2], and factors, in memory that has large values and NaN behind them."""
    packed = codes[..., :16] | codes[..., 16:] << 4
    room = np.full(packed.size + 256, 0xFF, np.uint8)
    more = np.full(factors.size + 256, np.nan, np.float16)
    shape = len(codes), packed.shape[1] * packed.shape[2]
    held = room[: packed.size].reshape(shape), more[: factors.size].reshape(factors.shape)
    for array, values in zip(held, (packed.reshape(shape), factors), strict=True):
        array[:] = values
        array.flags.writeable = False
    return held


def make_int4(outers: list[int], inner: int, seed: int = 0, size: float = 0.1) -> kernels.Weights:
    """Any codes, scales around `size` and minima around −8 of them."""
    rng = np.random.default_rng(seed)
    pairs = []
    for outer in outers:
        codes = rng.integers(0, 16, (outer, inner // GROUP, GROUP), dtype=np.uint8)
        scale = rng.uniform(0.5, 1.5, (outer, inner // GROUP)) * size
        pairs.append(as_held(codes, np.stack([scale, scale * rng.normal(-8, 2, scale.shape)], -1).astype(np.float16)))
    return kernels.Weights("int4", [pair[0] for pair in pairs], [pair[1] for pair in pairs])


def rounded(x: np.ndarray) -> np.ndarray:
    """Vectors [M, K] as the kernel takes them, in float64."""
    each = [round_groups(row) for row in x]
    taken = [(integers * step[:, None].astype(np.float64)).ravel() for integers, step in each]
    return np.array(taken, dtype=np.float64).reshape(x.shape)


def term_sizes(x: np.ndarray, weights: kernels.Weights, i: int) -> np.ndarray:
    """Σ of sizes of what is added up for each product [M, N]: of codes and minima apart, which cancel each other."""
    scale, minimum = weights.scales[i].astype(np.float64).transpose(2, 0, 1)
    codes = (weights.read(i).reshape(*scale.shape, GROUP) - minimum[..., None]).reshape(len(scale), -1)
    sums = np.abs(x.reshape(len(x), x.shape[1] // GROUP, GROUP).sum(axis=2))
    return np.abs(x) @ np.abs(codes).T + sums @ np.abs(minimum).T


@RELAXED
@given(
    inner=st.sampled_from(SIZES),
    outers=st.lists(st.sampled_from([1, 2, 3, 4, 33, 192]), min_size=1, max_size=3),
    count=st.integers(0, 9),
    size=st.sampled_from([1e-4, 0.1, 2000.0]),
    seed=st.integers(0, 100),
)
def test_equals_float64_on_what_was_rounded(isa, inner, outers, count, size, seed):
    weights, x = make_int4(outers, inner, seed, size), vectors(count, inner, seed)
    got = parts(kernels.multiply(x, weights, threads=2), weights, count)
    for i, part in enumerate(got):
        wide = rounded(x)
        assert part.dtype == np.float32
        assert close_product(part, wide @ weights.read(i).astype(np.float64).T, term_sizes(wide, weights, i))


@pytest.mark.parametrize("inner", SIZES)
def test_every_instruction_set_gives_the_bits_of_the_reference(native_isa, inner):
    weights, x = make_int4([37, 130], inner, inner), vectors(5, inner, inner)
    x[1] *= np.float32(1e30)
    x[2] *= np.logspace(-30, 30, inner, dtype=np.float32)
    x[3, : inner // 2] = 0
    got = kernels.multiply(x, weights, threads=2)
    assert np.array_equal(got.view(np.uint32), reference.multiply(x, weights, 1).view(np.uint32))


def test_no_bit_depends_on_threads_neighbours_or_companions(native_isa):
    """1,000 rows of 608 are cut into items; the layers beside it and the vectors beside each are not seen."""
    weights, x = make_int4([1000, 192, 33], 608), vectors(7, 608)
    wanted = parts(kernels.multiply(x, weights, threads=1), weights, 7)
    for threads in (2, 3):
        again = parts(kernels.multiply(x, weights, threads=threads), weights, 7)
        assert all(np.array_equal(a, b) for a, b in zip(again, wanted, strict=True))
    for i, whole in enumerate(wanted):
        alone = kernels.Weights("int4", weights.weights[i : i + 1], weights.scales[i : i + 1])
        for first, last in ((0, 1), (2, 4), (1, 4), (3, 7), (2, 7)):
            some = np.ascontiguousarray(x[first:last])
            got = kernels.multiply(some, alone, threads=2).reshape(-1, whole.shape[1])
            assert np.array_equal(got, whole[first:last])


@RELAXED
@given(inner=st.sampled_from(SIZES), seed=st.integers(0, 100))
def test_rounding_the_vector_errs_by_half_a_step(inner, seed):
    """Weighed by the weights themselves: it is the rounded vector that meets the minimum."""
    weights, x = make_int4([50], inner, seed), vectors(3, inner, seed)
    exact, wide = rounded(x), weights.read(0).astype(np.float64)
    step = np.stack([np.repeat(round_groups(row)[1], GROUP) for row in x]).astype(np.float64)
    assert (np.abs(exact - x) <= step / 2 * (1 + 256 * U)).all()
    got = kernels.multiply(x, weights, threads=1).reshape(3, 50)
    slack = step / 2 @ np.abs(wide).T + 1e-5 * term_sizes(exact, weights, 0)
    assert (np.abs(got - x.astype(np.float64) @ wide.T) <= slack).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_vector(isa, value):
    weights, x = make_int4([37], 96), vectors(3, 96)
    clean = kernels.multiply(x, weights, threads=1).reshape(3, 37)
    x[1, 95] = value
    got = kernels.multiply(x, weights, threads=1).reshape(3, 37)
    assert np.isnan(got[1]).all()
    assert np.array_equal(got[[0, 2]], clean[[0, 2]])


def test_weights_that_are_no_number_stay_in_their_row(isa):
    weights, x = make_int4([9], 96), vectors(2, 96)
    clean = kernels.multiply(x, weights, threads=1).reshape(2, 9)
    factors = weights.scales[0].copy()
    factors[4] = np.nan
    got = kernels.multiply(x, kernels.Weights("int4", weights.weights, [factors]), threads=1).reshape(2, 9)
    assert np.isnan(got[:, 4]).all()
    assert np.array_equal(np.delete(got, 4, axis=1), np.delete(clean, 4, axis=1))


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38, 2.0**-101])
def test_vectors_of_nothing_give_nothing(isa, size):
    """Also where the step would underflow and its inverse overflow."""
    weights = make_int4([5], 64)
    assert np.array_equal(kernels.multiply(np.full((1, 64), size, np.float32), weights, threads=1), np.zeros(5))


@pytest.mark.parametrize("size", [2.0**-100, 1e-30, 1e36])
def test_sizes_at_the_ends_of_float32(isa, size):
    weights, x = make_int4([5], 64, size=0.01), np.full((1, 64), size, np.float32)
    wanted = weights.read(0).astype(np.float64).sum(axis=1) * x[0, 0].astype(np.float64)
    assert close_product(kernels.multiply(x, weights, threads=1)[None], wanted[None], term_sizes(x, weights, 0))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outer", "inner"), [(0, 32), (1, 32), (300, 96), (33, 1536)])
def test_widened_weights_are_minimum_plus_scale_times_code(isa, outer, inner, threads):
    weights = make_int4([outer], inner, inner)
    room = np.full(outer * inner + 64, np.nan, np.float32)
    out = room[: outer * inner].reshape(outer, inner)
    kernels.widen_int4(weights.weights[0], weights.scales[0], out, threads=threads)
    codes = weights.weights[0].reshape(outer, inner // GROUP, 16)
    pair = weights.scales[0].astype(np.float64)
    for g in range(inner // GROUP):
        for half, nibbles in ((0, codes[:, g] & 15), (16, codes[:, g] >> 4)):
            wanted = pair[:, g, 1, None] + pair[:, g, 0, None] * nibbles
            assert np.array_equal(out[:, g * GROUP + half : g * GROUP + half + 16], wanted.astype(np.float32))
    assert np.isnan(room[outer * inner :]).all()


def test_every_float16_is_read(isa):
    """As scale of code 1 and as minimum: subnormal numbers and infinities are among them."""
    numbers = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    packed = np.full((len(numbers), 16), 0x11, np.uint8)
    out = np.empty((len(numbers), 32), np.float32)
    with np.errstate(invalid="ignore"):  # said of signalling NaNs by NumPy on some machines
        wanted = numbers.astype(np.float32)
    for place in (0, 1):
        factors = np.zeros((len(numbers), 1, 2), np.float16)
        factors[:, 0, place] = numbers
        kernels.widen_int4(packed, factors, out, threads=1)
        assert np.array_equal(out[:, 31], wanted, equal_nan=True)


GOOD = (np.zeros((4, 32), np.uint8), np.zeros((4, 2, 2), np.float16))


@pytest.mark.parametrize(
    ("codes", "factors", "problem"),
    [
        ([GOOD[0]], [], "with scales if int8 or int4, got 1 with 0 scales"),
        ([np.zeros((4, 20), np.uint8)], [GOOD[1]], "K: want a multiple of 32 for int4, got 40"),
        ([np.zeros((4, 0), np.uint8)], [GOOD[1]], "K: want a multiple of 32 for int4, got 0"),
        ([GOOD[0].view(np.int8)], [GOOD[1]], r"weight: want uint8 \[N, K/2\]"),
        ([GOOD[0]], [GOOD[1].astype(np.float32)], r"scale: want float16 \[N, K/32, 2\]"),
        ([GOOD[0]], [GOOD[1][:, :1]], r"scale: want float16 \[N, K/32, 2\] = \(4, 2, 2\), got float16 \(4, 1, 2\)"),
        ([GOOD[0], GOOD[0][:, :16]], [GOOD[1], GOOD[1]], r"weight: want uint8 \[N, K/2\] = \(any, 32\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(codes, factors, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.Weights("int4", codes, factors)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"out": np.zeros((3, 64), np.float32)}, r"out: want float32 \[N, K\] = \(4, any\)"),
        ({"out": np.zeros((4, 32), np.float32)}, r"weight: want uint8 \[N, K/2\] = \(any, 16\)"),
        ({"threads": 0}, "threads: want 1 or more"),
    ],
)
def test_room_that_does_not_fit_is_refused(change, problem):
    arguments = {"codes": GOOD[0], "factors": GOOD[1], "out": np.zeros((4, 64), np.float32), "threads": 1}
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.widen_int4(**(arguments | change))
