"""Rounding rows to int8 with a scale for each half (`kernels.rows` has the layout and `widen`, the way back).

One scale for the D values of K and one for those of V. Keys reach the store rotated (`attention.rotation`), so that
no channel is much larger than the others and one scale serves them all.
"""

from __future__ import annotations

import torch

from magicpig_cli.kernels.rows import SCALE_BYTES

_LEVELS = 127
_SMALLEST_SCALE = 2.0**-126  # the smallest normal number: rows of zeros need no case of their own


def quantize(rows: torch.Tensor) -> torch.Tensor:
    """Rows [..., D], rounded to bfloat16, as int8 [..., D + 2]: values, then the bytes of their bfloat16 scale.

    The scale is max|x| / 127, at least 2⁻¹²⁶, rounded to the nearest bfloat16. No rounded x is off by more than half
    of it (rounding it down leaves max|x| below 127.5 scales), and a result that was read back and rounded to bfloat16
    gives the same bytes again. Where one of D elements is infinite or not a number, all of them read as NaN.
    """
    rows = rows.bfloat16().float()
    scale = (rows.abs().amax(dim=-1, keepdim=True) / _LEVELS).clamp_min(_SMALLEST_SCALE).bfloat16()
    scale = scale.masked_fill(scale.isinf(), torch.nan)
    values = (rows / scale.float()).round_().clamp_(-_LEVELS, _LEVELS).nan_to_num_(nan=0.0).to(torch.int8)
    return torch.cat([values, scale.view(torch.int8)], dim=-1)


def as_numbers(rows: torch.Tensor) -> torch.Tensor:
    """Stored rows [..., W] as the numbers [..., D] that they mean, on any device: int8 ones as float32."""
    if rows.dtype != torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return rows[..., :-SCALE_BYTES].float() * scale.float()
