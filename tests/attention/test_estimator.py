"""The closed forms against high precision, against drawn collisions, and against drawn estimates."""

from __future__ import annotations

import mpmath  # comes with torch
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.attention.estimator import (
    CELLS,
    FLOOR,
    TABLE_ERROR,
    cosine,
    inclusion_probability,
    log_weight_table,
    predicted_error,
    predicted_ratio,
)

COSINES = (1.0, 1 - 1e-15, 1 - 1e-9, 0.999, 0.9, 0.5, 0.1, 0.0, -0.3, -0.7, -0.95, -0.999, -1 + 1e-12, -1.0)
BITS, TABLES = (1, 2, 8, 10, 12, 16), (2, 3, 75, 150, 300, 1000)
STANDARD_ERRORS = 4.5


def high_precision(cos: float, K: int, L: int) -> float:
    with mpmath.workdps(80):
        p = (1 - mpmath.acos(mpmath.mpf(cos)) / mpmath.pi) ** K
        return float(1 - (1 - p) ** L - L * p * (1 - p) ** (L - 1))


@pytest.mark.parametrize("K", BITS)
@pytest.mark.parametrize("L", TABLES)
def test_inclusion_probability_in_all_corners(K, L):
    got = inclusion_probability(COSINES, K, L)
    wanted = np.maximum([high_precision(cos, K, L) for cos in COSINES], FLOOR)
    relative = np.abs(got / wanted - 1)
    assert relative[np.array(COSINES) >= -0.999].max() < 1e-12
    assert relative.max() < 1e-8


@pytest.mark.parametrize(("K", "L"), [(1, 2), (10, 150), (16, 1000)])
def test_both_forms_meet_where_one_takes_over(K, L):
    """The step at L·p = 0.1 is that of the function itself."""
    theta = np.pi * (1 - (0.1 / L) ** (1 / K))
    below, above = inclusion_probability(np.cos(theta * (1 + np.array([1e-9, -1e-9]))), K, L)
    assert 0 <= above / below - 1 < 1e-6


@given(st.integers(1, 16), st.integers(2, 1000), st.floats(-1, 1), st.floats(-1, 1))
def test_grows_with_the_cosine_and_with_tables_and_shrinks_with_bits(K, L, a, b):
    slack = 1 + 1e-12
    low, high = inclusion_probability(np.sort([a, b]), K, L)
    assert FLOOR <= low <= high * slack <= slack
    assert low <= inclusion_probability(min(a, b), K, L + 1) * slack
    assert inclusion_probability(min(a, b), K + 1, L) <= low * slack


def test_cosines_that_rounding_pushed_out_of_range():
    assert inclusion_probability([1 + 1e-7, 1.0], 10, 150).tolist() == [1.0, 1.0]
    assert inclusion_probability([-1 - 1e-7, -1.0], 10, 150).tolist() == [FLOOR, FLOOR]


@pytest.mark.parametrize(
    ("cos", "K", "L"), [(0.3, 1, 2), (-0.5, 2, 3), (0.5, 4, 10), (0.95, 16, 20), (0.6, 8, 75), (0.4, 10, 150)]
)
def test_equals_the_frequency_of_drawn_collisions(cos, K, L):
    draws = 6000
    rng = np.random.default_rng(K * 1000 + L)
    query, key = np.array([1.0, 0.0]), np.array([cos, np.sqrt(1 - cos**2)])
    hits = 0
    for _ in range(10):  # in parts: the directions of all draws at once would need a gigabyte
        directions = rng.standard_normal((draws // 10, L, K, 2))
        equal = ((directions @ query > 0) == (directions @ key > 0)).all(axis=-1)
        hits += int((equal.sum(axis=-1) >= 2).sum())
    u = float(inclusion_probability(cos, K, L))
    assert abs(hits / draws - u) < STANDARD_ERRORS * np.sqrt(u * (1 - u) / draws)


def table_error(table: np.ndarray, cos: np.ndarray, positions: np.ndarray, K: int, L: int) -> float:
    """Largest error of −ln u read from `table` at fractional cells `positions`."""
    read = np.interp(positions, np.arange(len(table)), table.astype(np.float64))
    return float(np.abs(read + np.log(inclusion_probability(cos, K, L))).max())


def dense_cosines(lowest: float) -> np.ndarray:
    return np.concatenate([np.linspace(lowest, 1, 20_011), 1 - np.geomspace(1e-12, 1, 20_000)])


def over_half_angle(K: int, L: int, lowest: float, cells: int = CELLS) -> float:
    cos = dense_cosines(lowest)
    return table_error(log_weight_table(K, L, cells), cos, np.sqrt((1 - cos) / 2) * cells, K, L)


def over_cosine(K: int, L: int, lowest: float, cells: int) -> float:
    """The layout that docs/decisions/001 rejects."""
    cos, grid = dense_cosines(lowest), np.linspace(-1, 1, cells + 1)
    table = (-np.log(inclusion_probability(grid, K, L))).astype(np.float32)
    return table_error(table, cos, (cos + 1) / 2 * cells, K, L)


@pytest.mark.parametrize("K", range(1, 17))
def test_weight_table_is_within_its_contract(K):
    tables = (2, 3, 4, 5, 7, 10, 20, 50, 75, 120, 150, 200, 300, 500, 700, 1000)
    assert max(over_half_angle(K, L, lowest=-0.5) for L in tables) <= TABLE_ERROR


def test_a_table_over_the_cosine_would_not_be():
    """Numbers of docs/decisions/001: more cells hardly help where the slope is infinite."""
    assert over_cosine(16, 2, lowest=-0.5, cells=2048) > 0.1
    assert over_cosine(16, 2, lowest=-0.5, cells=1 << 16) > 0.01


def test_weight_table_ends():
    table = log_weight_table(10, 150)
    assert table.dtype == np.float32
    assert table.shape == (CELLS + 1,)
    assert table[0] == 0  # a key in the query's direction is always sampled
    assert table[-1] == np.float32(-np.log(FLOOR))
    assert (np.diff(table) >= 0).all()


def test_cosine_of_a_zero_vector_is_a_right_angle():
    keys = np.array([[0.0, 0.0], [3.0, 4.0], [-1.0, 0.0]])
    assert cosine(np.array([2.0, 0.0]), keys).tolist() == [0.0, 0.6, -1.0]
    assert cosine(np.zeros(2), keys).tolist() == [0.0, 0.0, 0.0]


def test_predicted_ratio_is_the_mean_over_keys():
    cos = np.array([[1.0, -1.0], [1.0, 1.0]])
    assert predicted_ratio(cos, 10, 150) == pytest.approx([0.5, 1.0])


def test_predicted_error_agrees_with_drawn_estimates():
    """Independent keys: the case that the formula is made for. 2% of slack is the noise of 4,000 draws."""
    rng = np.random.default_rng(5)
    count, head_dim, draws = 600, 16, 4000
    values = rng.normal(size=(count, head_dim)) + 1
    weights = rng.dirichlet(np.full(count, 0.5))
    offloaded = np.arange(count) >= 100  # the others are sink and window
    u = np.where(offloaded, rng.uniform(0.2, 0.9, count), 1.0)
    exact = weights @ values
    scaled = (rng.random((draws, count)) < u) * (weights / u)
    estimates = (scaled @ values) / scaled.sum(axis=1, keepdims=True)
    measured = np.sqrt(((estimates - exact) ** 2).sum(axis=1).mean()) / np.linalg.norm(exact)
    predicted = predicted_error(weights[offloaded], u[offloaded], values[offloaded], exact)
    assert measured / predicted == pytest.approx(1, rel=0.05)


def test_predicted_error_at_the_ends():
    values, weights = np.eye(2), np.array([0.5, 0.5])
    assert predicted_error(weights, np.ones(2), values, np.array([0.5, 0.5])) == 0
    assert predicted_error(weights, np.ones(2), values, np.zeros(2)) == 0
    assert predicted_error(weights, np.full(2, 0.5), values, np.zeros(2)) == np.inf
    both = predicted_error(np.stack([weights] * 3), np.full((3, 2), 0.5), np.stack([values] * 3), np.full((3, 2), 0.5))
    assert both.shape == (3,)
