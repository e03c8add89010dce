"""The formulas of the signature sampler and of the uniform tail: against high precision and against drawn rotations."""

from __future__ import annotations

import mpmath  # comes with torch
import numpy as np
import pytest

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import (
    CELLS,
    FLOOR,
    NORMAL_ERROR,
    estimated_error,
    log_normal_table,
    mean_alignment,
    normal_probability,
    predicted_error,
    predicted_threshold,
    signature_deviation,
    signature_probability,
    with_tail,
)
from tests.kernels.data import make_basis

STANDARD_ERRORS = 4.5


def test_normal_probability_far_below_zero():
    for z in (-11.0, -6.0, -1.0, 0.0, 0.5, 3.0, 8.0):
        with mpmath.workdps(50):
            wanted = float(mpmath.ncdf(mpmath.mpf(z)))
        assert float(normal_probability(z)) == pytest.approx(wanted, rel=1e-12)
    assert normal_probability([-50.0, -np.inf, np.inf]).tolist() == [FLOOR, FLOOR, 1.0]


def test_the_table_is_within_its_contract():
    z = np.linspace(kernels.Z_LOW, kernels.Z_HIGH, 200_003)
    at = (z - kernels.Z_LOW) / (kernels.Z_HIGH - kernels.Z_LOW) * CELLS
    read = np.interp(at, np.arange(CELLS + 1), log_normal_table().astype(np.float64))
    assert np.abs(read + np.log(normal_probability(z))).max() <= NORMAL_ERROR
    assert log_normal_table().dtype == np.float32
    assert (np.diff(log_normal_table()) <= 0).all()


def rotated(head_dim: int, bits: int, draws: int):
    """Keys x [n, D], a query, and per rotation: A [n], and the error of the estimated q·x with its deviation."""
    rng = np.random.default_rng(head_dim)
    x, q = rng.normal(size=(30, head_dim)), rng.normal(size=head_dim)
    alignment, errors, sigma = [], [], []
    for seed in range(draws):
        projected = x @ make_basis(bits, head_dim, seed).matrix.astype(np.float64).T
        query = make_basis(bits, head_dim, seed).matrix.astype(np.float64) @ q
        factors = (x**2).sum(axis=1) / np.abs(projected).sum(axis=1)
        alignment.append(np.linalg.norm(x, axis=1) / factors)
        errors.append(factors * (np.sign(projected) @ query) - x @ q)
        sigma.append(signature_deviation(q, x, bits, factors))
    return x, q, np.array(alignment), np.array(errors), np.array(sigma)


@pytest.mark.parametrize(("head_dim", "bits"), [(64, 128), (32, 32), (48, 128), (96, 64)])
def test_the_deviation_is_that_of_drawn_rotations(head_dim, bits):
    """Whole, several, cut, and less than one rotation. Keys share a rotation, so the mean over draws counts."""
    draws = 150
    x, q, alignment, errors, sigma = rotated(head_dim, bits, draws)
    per_draw = ((errors / sigma) ** 2).mean(axis=1)
    assert abs(per_draw.mean() - 1) < STANDARD_ERRORS * per_draw.std(ddof=1) / np.sqrt(draws)
    assert abs(alignment.mean() / mean_alignment(bits, head_dim) - 1) < 0.01
    about = signature_deviation(q, x, bits)  # before there is an index
    assert np.abs(sigma.mean(axis=0) / about - 1).max() < 0.05


def test_deviation_of_keys_without_direction():
    x, q = np.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]]), np.array([3.0, 0.0, 0.0])
    assert signature_deviation(q, x, 64).tolist() == [0.0, 0.0]  # no size; q along it
    assert signature_deviation(q, x, 64, unit=3.0).tolist() == pytest.approx([3**0.5] * 2)
    stacked = signature_deviation(np.stack([q, q]), np.stack([x, x + 1]), 64)
    assert stacked.shape == (2, 2)


@pytest.mark.parametrize("sigma", [1e-3, 0.3, 1.0, 4.0, 40.0])
def test_the_probability_is_the_expectation_over_what_is_drawn(sigma):
    """E[min(1, exp(s − τ + σε))] by high precision, from far below the threshold to far above it."""
    for above in (-60.0, -12.0, -3.0, -0.5, 0.0, 0.7, 5.0, 30.0):
        with mpmath.workdps(60):
            s, t = mpmath.mpf(sigma), mpmath.mpf(above)
            wanted = mpmath.ncdf(t / s) + mpmath.exp(t + s**2 / 2) * mpmath.ncdf(-t / s - s)
        got = float(signature_probability([above + 2.0], 2.0, sigma)[0])
        assert got == pytest.approx(float(wanted), rel=1e-9)


def test_the_closed_form_is_that_expectation():
    sigma, above = 0.8, -1.3
    with mpmath.workdps(30):
        wanted = mpmath.quad(
            lambda e: min(1, mpmath.exp(above + sigma * e)) * mpmath.npdf(e), [-12, -above / sigma, 12]
        )
    assert float(signature_probability([above], 0.0, sigma)[0]) == pytest.approx(float(wanted), rel=1e-12)


def test_probability_without_deviation_or_threshold():
    assert signature_probability([1.0, 0.0, 5.0], 1.0, 0.0).tolist() == pytest.approx([1.0, np.exp(-1), 1.0])
    assert signature_probability([5.0], np.inf, 1.0).tolist() == [FLOOR]
    assert signature_probability([5.0], -np.inf, 1.0).tolist() == [1.0]


def test_predicted_threshold_takes_the_share():
    rng = np.random.default_rng(0)
    s, sigma = rng.normal(size=5000), rng.uniform(0.1, 1, size=5000)
    for share in (0.002, 0.02, 0.5):
        tau = predicted_threshold(s, sigma, share)
        assert signature_probability(s, tau, sigma).mean() == pytest.approx(share, rel=1e-3)


def test_the_tail_adds_to_any_probability():
    assert with_tail([0.0, 0.5, 1.0], 0.1).tolist() == pytest.approx([0.1, 0.55, 1.0])
    assert with_tail([0.2], 0.0).tolist() == [0.2]


def test_estimated_error_is_the_predicted_one_on_average():
    """Of independent keys, from the sample alone, over drawn samples."""
    rng = np.random.default_rng(5)
    count, head_dim, draws = 600, 16, 2000
    values = rng.normal(size=(count, head_dim)) + 1
    weights, pi = rng.dirichlet(np.full(count, 0.5)), rng.uniform(0.2, 1.0, count)
    exact = weights @ values
    squares = []
    for _ in range(draws):
        taken = rng.random(count) < pi
        scaled = weights[taken] / pi[taken]
        share = scaled / scaled.sum()
        squares.append(estimated_error(share, pi[taken], values[taken], share @ values[taken]) ** 2)
    assert np.sqrt(np.mean(squares)) == pytest.approx(predicted_error(weights, pi, values, exact), rel=0.05)


def test_estimated_error_of_certain_keys_is_zero():
    assert estimated_error([0.5, 0.5], [1.0, 1.0], np.eye(2), [0.5, 0.5]) == 0
