"""int8 rows: how far they are from what they were made of, and that making them again changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.quantize import quantize
from magicpig_cli.cache.store import RowStore
from tests.kernels.data import to_int8


def back(stored: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(kernels.widen(stored.numpy()))


def scales(stored: torch.Tensor) -> torch.Tensor:
    """float64 [..., 1]."""
    return stored[..., -2:].contiguous().view(torch.bfloat16).double()


def random_rows(seed: int, *shape: int, spread: float = 0.0) -> torch.Tensor:
    """bfloat16, with magnitudes e^±spread."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(spread * torch.randn(*shape[:-1], 1, generator=generator))
    return (torch.randn(*shape, generator=generator) * size).bfloat16()


@given(
    st.integers(0, 1000),
    st.sampled_from([1, 2, 3, 7, 63, 64, 65, 80, 128, 129, 512]),
    st.sampled_from([0.0, 3.0, 15.0]),
)
def test_no_value_is_off_by_more_than_half_the_scale(seed, head_dim, spread):
    rows = random_rows(seed, 5, 9, 2, head_dim, spread=spread)
    stored = quantize(rows)
    assert stored.shape == (5, 9, 2, head_dim + 2)
    exact = stored[..., :-2].double() * scales(stored)
    assert torch.equal(exact.float(), back(stored))  # 15 bits: the product is exact in float32
    assert ((exact - rows.double()).abs() <= scales(stored) / 2).all()
    assert (stored[..., :-2].abs().amax(dim=-1) == 127).all()  # no level is wasted
    assert torch.equal(quantize(back(stored)), stored)


def test_every_significand_comes_back_as_it_was():
    """All 128 bfloat16 numbers between two powers of two as the largest of a row, and every level below it."""
    for exponent in (-118, -1, 0, 1, 120):
        largest = ((1 + torch.arange(128) / 128) * 2.0**exponent).unsqueeze(1)
        rows = (largest * torch.arange(-127, 128) / 127).bfloat16()
        stored = quantize(rows)
        assert ((stored[:, :-2].double() * scales(stored) - rows.double()).abs() <= scales(stored) / 2).all()
        assert torch.equal(quantize(back(stored).bfloat16()), stored)


def test_zeros_stay_zero_and_tiny_rows_are_rounded_to_the_smallest_scale():
    rows = torch.tensor([[0.0, -0.0, 0.0], [2.0**-126, 0.0, -(2.0**-125)], [2.0**-128, 0.0, 0.0]])
    assert back(quantize(rows)).tolist() == [[0.0] * 3, [2.0**-126, 0.0, -(2.0**-125)], [0.0] * 3]


def test_an_outlier_takes_the_levels_of_its_own_half_only():
    rows = torch.ones(1, 1, 2, 64)
    rows[0, 0, 0, 5] = 1e6
    keys, values = back(quantize(rows))[0, 0]
    assert keys[5] == pytest.approx(1e6, rel=2**-8)
    assert not keys[:5].any()  # 1 is less than half of 1e6 / 127
    assert (values - 1).abs().max() <= 2**-8


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3.4e38])  # the last is ∞ in bfloat16
def test_what_is_no_number_is_not_hidden(bad):
    rows = torch.ones(2, 2, 8)
    rows[1, 0, 3] = bad
    read = back(quantize(rows))
    assert read[1, 0].isnan().all()
    assert read[0].isfinite().all()
    assert read[1, 1].isfinite().all()


@pytest.mark.parametrize("spread", [0.0, 3.0, 40.0])
def test_the_rows_of_the_kernel_tests_are_made_the_same_way(spread):
    rows = random_rows(2, 300, 2, 33, spread=spread).float()
    rows[:4, 0, 0] = torch.tensor([0.0, float("nan"), float("inf"), 3.4e38])
    rows[4] = 0
    made, wanted = torch.from_numpy(to_int8(rows.numpy())), quantize(rows)
    assert torch.equal(made[..., :-2], wanted[..., :-2])
    assert np.array_equal(scales(made), scales(wanted), equal_nan=True)  # "not a number" has many bit patterns


def test_the_largest_numbers_do_not_overflow():
    rows = torch.full((1, 4), torch.finfo(torch.bfloat16).max)
    assert back(quantize(rows)).isfinite().all()


@pytest.mark.parametrize("head_dim", [1, 5, 64])
def test_a_store_reads_what_its_table_reads(head_dim):
    store = RowStore(BlockPool(3, head_dim, "int8", block_rows=16))
    rows = random_rows(1, 3, 70, 2, head_dim)
    assert store.read(0, 0).shape == (3, 0, 2, head_dim)
    for start, stop in ((0, 1), (1, 40), (40, 70)):
        store.append(rows[:, start:stop])
    store.truncate(50)
    store.append(rows[:, 50:60])
    read = store.read(0, store.length)
    assert torch.equal(read, back(quantize(rows[:, :60])))
    assert np.array_equal(store.table.read(7, 60), read[:, 7:].numpy())
    assert torch.equal(torch.cat(list(store.views(3, 60, at_most=10)), dim=1), read[:, 3:])
    assert store.nbytes == 5 * 16 * 3 * 2 * (head_dim + 2)  # 60 of 64 rows used: the next block is being made ready
