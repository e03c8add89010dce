"""Products of a few vectors with stored weights against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from tests.kernels.data import RELAXED, ROW_TYPES, to_bits
from tests.tolerances import close_product


def as_weights(matrices: list[np.ndarray], dtype: str) -> kernels.Weights:
    """Float32 matrices [N, K] as stored. The memory behind each holds NaN or large values: nothing may read it."""
    stored, scales = [], []
    for matrix in matrices:
        values = matrix if dtype == "float32" else to_bits(matrix)
        behind = {"float32": np.nan, "bfloat16": 0x7FC0, "int8": 127}[dtype]
        if dtype == "int8":
            scales.append(to_bits(np.maximum(np.abs(matrix).max(axis=1, initial=0) / 127, np.float32(1e-30))))
            values = np.rint(matrix / kernels.widen(scales[-1])[:, None]).clip(-127, 127).astype(np.int8)
        memory = np.full(matrix.size + 70, behind, dtype=values.dtype)
        stored.append(memory[: matrix.size].reshape(matrix.shape))
        stored[-1][:] = values
        stored[-1].flags.writeable = False
    return kernels.Weights(dtype, stored, scales)


def make_weights(shapes: list[int], inner: int, dtype: str, seed: int = 0) -> kernels.Weights:
    rng = np.random.default_rng(seed)
    return as_weights([rng.normal(size=(outer, inner)).astype(np.float32) for outer in shapes], dtype)


def vectors(count: int, inner: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, inner)).astype(np.float32)


def parts(flat: np.ndarray, weights: kernels.Weights, count: int) -> list[np.ndarray]:
    """[M, N] of each weight."""
    ends = np.cumsum([count * outer for outer in weights.outer])
    split = np.split(flat, ends[:-1])
    return [part.reshape(count, outer) for part, outer in zip(split, weights.outer, strict=True)]


@RELAXED
@given(
    inner=st.sampled_from([1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 72, 90, 576, 1537]),
    outers=st.lists(st.sampled_from([1, 2, 3, 4, 5, 33, 192]), min_size=1, max_size=3),
    count=st.integers(0, 9),
    dtype=st.sampled_from(ROW_TYPES),
    seed=st.integers(0, 100),
)
def test_equals_float64(isa, inner, outers, count, dtype, seed):
    weights, x = make_weights(outers, inner, dtype, seed), vectors(count, inner, seed)
    got = parts(kernels.multiply(x, weights, threads=2), weights, count)
    for i, part in enumerate(got):
        wide = weights.read(i).astype(np.float64)
        assert part.dtype == np.float32
        assert close_product(part, x @ wide.T, np.abs(x) @ np.abs(wide.T))


@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_no_bit_depends_on_threads_neighbours_or_companions(native_isa, dtype):
    """1,000 rows of 600 are cut into items; the layers beside it and the vectors beside each are not seen."""
    weights, x = make_weights([1000, 192, 33], 600, dtype), vectors(7, 600)
    wanted = parts(kernels.multiply(x, weights, threads=1), weights, 7)
    for threads in (2, 3):
        again = parts(kernels.multiply(x, weights, threads=threads), weights, 7)
        assert all(np.array_equal(a, b) for a, b in zip(again, wanted, strict=True))
    for i, whole in enumerate(wanted):
        alone = kernels.Weights(dtype, weights.weights[i : i + 1], weights.scales[i : i + 1])
        for first, last in ((0, 1), (2, 4), (1, 4), (3, 7), (2, 7)):
            some = np.ascontiguousarray(x[first:last])
            assert np.array_equal(
                kernels.multiply(some, alone, threads=2).reshape(-1, whole.shape[1]), whole[first:last]
            )


@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_what_is_no_number_stays_in_its_row(isa, dtype):
    weights, x = make_weights([37], 65, dtype), vectors(3, 65)
    clean = kernels.multiply(x, weights, threads=1).reshape(3, 37)
    x[1, 64] = np.nan
    got = kernels.multiply(x, weights, threads=1).reshape(3, 37)
    assert np.isnan(got[1]).all()
    assert np.array_equal(got[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": np.zeros((1, 8))}, "x: want float32"),
        ({"x": np.zeros((1, 7), np.float32)}, r"x: want float32 \[M, K\] = \(any, 8\), got float32 \(1, 7\)"),
        ({"threads": 0}, "threads: want 1 or more, got 0"),
    ],
)
def test_the_door_says_what_is_wrong(change, problem):
    weights = make_weights([4], 8, "float32")
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.multiply(**({"x": np.zeros((1, 8), np.float32), "weights": weights, "threads": 1} | change))


@pytest.mark.parametrize(
    ("dtype", "arrays", "scales", "problem"),
    [
        ("float32", [], [], "want one or more float32"),
        ("int8", [np.zeros((4, 8), np.int8)], [], "with scales if int8 or int4, got 1 with 0 scales"),
        ("float32", [np.zeros((4, 8), np.float32)], [np.zeros(4, np.uint16)], "got 1 with 1 scales"),
        ("int8", [np.zeros((4, 8), np.int8)], [np.zeros(5, np.uint16)], r"scale: want uint16 \[N\] = \(4\)"),
        ("bfloat16", [np.zeros((4, 8), np.float32)], [], "weight: want uint16"),
        ("float32", [np.zeros((4, 8), np.float32), np.zeros((4, 9), np.float32)], [], r"= \(any, 8\), got"),
        ("float32", [np.zeros((4, 8), np.float32).T], [], "C-contiguous"),
    ],
)
def test_weights_that_do_not_fit_are_refused(dtype, arrays, scales, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.Weights(dtype, arrays, scales)
