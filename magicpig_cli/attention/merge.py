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
