"""Merging attention over disjoint sets of keys."""

from __future__ import annotations

import torch

from magicpig_cli.attention.base import Partial


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over both parts: each output weighs exp(its LSE). A part with LSE −inf contributes nothing."""
    lse = torch.logaddexp(a.lse, b.lse)
    # Both empty: −inf − −inf is NaN; the outputs are 0 then, so any finite weight gives 0.
    base = lse.masked_fill(torch.isneginf(lse), 0.0)
    out = a.out * torch.exp(a.lse - base).unsqueeze(-1) + b.out * torch.exp(b.lse - base).unsqueeze(-1)
    return Partial(out, lse)


def share_of(part: Partial, merged: Partial) -> torch.Tensor:
    """By what a relative error [B, H] of the part is to be multiplied to be one of what it was merged into.

    Its own output moves by so much less, and the other part does not move; the spread of values is taken around the
    part's output instead of the merged one's.
    """
    tiny = torch.finfo(torch.float32).tiny
    weight = torch.exp(part.lse - merged.lse.clamp_min(torch.finfo(torch.float32).min))
    share: torch.Tensor = weight * part.out.norm(dim=-1) / merged.out.norm(dim=-1).clamp_min(tiny)
    return share
