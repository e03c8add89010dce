"""The rotation of keys and queries under int8 rows: orthogonal, spreading, and invisible in the results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.attention.rotation import rotation
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.quantize import quantize
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.kernels import widen
from tests.tolerances import DOT, U, close_attention

STAGING = Staging(torch.device("cpu"))


@pytest.mark.parametrize("head_dim", [1, 2, 3, 24, 64, 80, 96, 100, 127, 128, 256])
def test_orthogonal_and_spreading(head_dim):
    matrix = rotation(head_dim)
    assert matrix.dtype == np.float32
    assert np.abs(matrix.astype(np.float64) @ matrix.T - np.eye(head_dim)).max() <= DOT * U
    assert np.abs(matrix).max() * head_dim**0.5 <= 2**0.5 * (1 + DOT * U)  # no channel: more than √2 of its share


def test_one_large_channel_costs_the_others_little():
    keys = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    keys[:, 17] += 30
    matrix = torch.from_numpy(rotation(64))

    def error(x: torch.Tensor) -> float:
        return float((torch.from_numpy(widen(quantize(x).numpy())) - x).norm())

    assert error(keys @ matrix) < error(keys) / 3


def attended(matrix: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prompt in two chunks and one more token through float32 rows: outputs of second chunk and token, and rows."""
    attention = Attention(None, torch.float32, 1, STAGING, matrix)
    cache = LayerCache(LayerSpec(2, 24), WindowShape(2, 4, 4), BlockPool(2, 24, "float32", 16), STAGING)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, heads, 61, 24, generator=generator) for heads in (4, 2, 2))
    rule = LogitRule(24**-0.5)
    attention.chunk(cache, q[:, :, :40], k[:, :, :40], v[:, :, :40], rule)
    chunk = attention.chunk(cache, q[:, :, 40:60], k[:, :, 40:60], v[:, :, 40:60], rule)
    step = attention.step(0, [cache], [False], q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], rule, StepRecorder())
    return chunk, step, cache.copy_rows()


def test_attention_does_not_notice():
    matrix = torch.from_numpy(rotation(24))
    plain_chunk, plain_step, plain_rows = attended(None)
    chunk, step, rows = attended(matrix)
    assert torch.equal(rows[:, :, 1], plain_rows[:, :, 1])
    assert not torch.allclose(rows[:, :, 0], plain_rows[:, :, 0])
    assert close_attention(chunk[0].transpose(0, 1), plain_chunk[0].transpose(0, 1), plain_rows)
    assert close_attention(step[0].transpose(0, 1), plain_step[0].transpose(0, 1), plain_rows)
