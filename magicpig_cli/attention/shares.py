"""How the query heads of a model share one budget of the signature sampler (docs/decisions/021).

At one budget some heads err thirty times as much as others, on any text the same ones. A head's squared error falls
nearly with the square of its budget, so their sum is least where budgets go with about the cube root of squared errors
at one budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

Shares = Mapping[int, tuple[float, ...]]  # layer → of each query head, over the mean of all layers and heads

LEAST, MOST = 0.125, 8.0  # of a share: as far as --target-error moves the default budget
_DIGITS = 2


def head_shares(squares: Mapping[int, NDArray[np.float64]]) -> dict[int, tuple[float, ...]]:
    """Shares by layer, from squared errors [H] of all heads at one budget; none where no head errs."""
    roots = np.array([np.cbrt(of_heads) for of_heads in squares.values()])
    if not roots.any():
        return {}
    shares = np.clip(roots / roots.mean(), LEAST, MOST)
    return {
        layer: tuple(of_heads.tolist())
        for layer, of_heads in zip(squares, (shares / shares.mean()).round(_DIGITS), strict=True)
    }


def head_budgets(budget: float, shares: Shares, layers: Iterable[int]) -> dict[int, NDArray[np.float32]]:
    """Budgets [H] of each of these layers: in proportion to the shares, `budget` on average, none above 1.

    A layer without shares has 1 for each head. Nothing is returned where there are no shares at all.
    """
    layers = list(layers)
    if not shares or not layers:
        return {}
    even = (1.0,) * len(next(iter(shares.values())))
    wanted = np.array([shares.get(layer, even) for layer in layers], dtype=np.float64)
    budgets = wanted * (budget / wanted.mean())
    while (budgets > 1).any():  # what is too much for a head goes to the others
        full = budgets >= 1
        others = wanted * ~full
        left = max(budget * wanted.size - int(full.sum()), 0.0)
        budgets = np.where(full, 1.0, others * (left / (others.sum() or 1.0)))
    return dict(zip(layers, budgets.astype(np.float32), strict=True))
