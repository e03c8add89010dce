"""What people type for --grid, and what they are told when it is wrong."""

from __future__ import annotations

import pytest

from magicpig_cli.errors import UsageError
from magicpig_cli.tuning.grid import DEFAULT_GRID, parse_grid


@pytest.mark.parametrize(
    ("text", "K", "L"),
    [
        ("K=8..12,L=50..80", (8, 9, 10, 11, 12), (50, 60, 70, 80)),
        (" l = 50..300:125 , k = 10 ", (10,), (50, 175, 300)),
        ("K=10,L=150", (10,), (150,)),
        ("L=2..1000:998,K=1..16:15", (1, 16), (2, 1000)),
        ("L=75", parse_grid(DEFAULT_GRID).K, (75,)),
        ("K=4", (4,), parse_grid(DEFAULT_GRID).L),
    ],
)
def test_grids(text, K, L):
    grid = parse_grid(text)
    assert (grid.K, grid.L) == (K, L)
    assert grid.sizes == [(k, l) for k in K for l in L]  # noqa: E741


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the grid is empty"),
        (",", "the grid is empty"),
        ("10,150", "'10' names neither K nor L"),
        ("M=3", "'M=3' names neither K nor L"),
        ("K", "'K' names neither K nor L"),
        ("K=8,K=9", "K is given twice"),
        ("K=8-12", "K=8-12 is neither a number nor a range"),
        ("K=", "K= is neither a number nor a range"),
        ("K=1²", "neither a number nor a range"),
        ("L=-5", "L=-5 is neither"),
        ("K=0..4", "K=0..4 is not between 1 and 16"),
        ("K=8..17", "K=8..17 is not between 1 and 16"),
        ("L=1..5", "L=1..5 is not between 2 and 1,000"),
        ("L=50..1001", "L=50..1001 is not between 2 and 1,000"),
        ("K=12..8", "K=12..8 goes down"),
        ("L=50..300:0", "L=50..300:0 has steps of 0"),
        ("L=5" + "0" * 40, "is neither a number nor a range"),
        ("K=1..16,L=2..1000:1", "are 15,984 pairs of K and L, more than 4,096"),
    ],
)
def test_what_is_wrong_is_named(text, says):
    with pytest.raises(UsageError) as caught:
        parse_grid(text)
    assert says in caught.value.message
    assert caught.value.hint
