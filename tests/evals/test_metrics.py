"""Figures and their intervals, against cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from magicpig_cli.evals.metrics import (
    Mean,
    divergence,
    jackknife,
    log_probabilities,
    mean,
    mean_of_blocks,
    share,
    share_found,
)


def test_share_of_references_in_an_answer():
    assert share_found("It is 12345.", ["12345"]) == 1
    assert share_found("abc and DEF", ["ABC", "def", "ghi"]) == pytest.approx(2 / 3)
    assert share_found("", ["1"]) == 0


def test_divergence_of_known_distributions():
    p, q = torch.tensor([0.5, 0.25, 0.25]).double().log(), torch.tensor([0.25, 0.25, 0.5]).double().log()
    assert divergence(p, q) == pytest.approx(0.25 * math.log(2))
    assert divergence(p, p) == 0
    logits = torch.tensor([1.0, 2.0, 3.0])
    assert log_probabilities(logits).dtype == torch.float64
    assert float(log_probabilities(logits).exp().sum()) == pytest.approx(1)
    assert float(log_probabilities(logits)[2]) == pytest.approx(-math.log(1 + math.exp(-1) + math.exp(-2)))


@pytest.mark.parametrize(
    ("scores", "low", "high"),
    [  # Wilson 1927; as statsmodels and R's prop.test(correct = FALSE) give it
        ([1] * 8 + [0] * 2, 0.490162, 0.943318),
        ([1] * 10, 0.722467, 1.0),
        ([0] * 10, 0.0, 0.277533),
        ([1], 0.206549, 1.0),
    ],
)
def test_wilson(scores, low, high):
    found = share(scores)
    assert found.ci95 == pytest.approx((low, high), abs=1e-6)
    assert found.n == len(scores)
    assert found.value == sum(scores) / len(scores)


def test_shares_of_an_answer_count_as_their_mean():
    assert share([0.5, 1.0]) == share([0.75, 0.75])


def test_student():
    found = mean([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.ci95 == pytest.approx((2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)))
    assert mean([5.0]) == Mean(5.0, None, 1)
    assert mean([1.0, 1.0]).ci95 == (1, 1)


def test_neighbours_are_one_observation():
    values = [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    blocks = mean_of_blocks(values, 2)
    assert blocks.ci95 == mean([1.0, 2.0, 3.0]).ci95
    assert blocks.n == 6
    assert mean_of_blocks(values, 6) == Mean(2.0, None, 6)
    assert mean_of_blocks([1.0, 1.0, 4.0], 2).value == 2  # a shorter last block does not weigh more


def test_an_interval_goes_through_a_function():
    found = mean([1.0, 2.0, 3.0])
    assert found.map(math.exp).ci95 == pytest.approx(tuple(math.exp(end) for end in found.ci95))
    assert Mean(0.0, None, 1).map(math.exp) == Mean(1.0, None, 1)


def test_the_jackknife_of_a_mean_is_students_interval():
    values = np.array([[1.0], [2.0], [4.0], [9.0]])
    found = jackknife(lambda blocks: float(blocks.mean()), values, 64)
    assert found.ci95 == pytest.approx(mean(values.ravel()).ci95)
    assert (found.value, found.n) == (4, 64)
    assert jackknife(lambda blocks: float(blocks.mean()), values[:1], 16) == Mean(1.0, None, 16)
