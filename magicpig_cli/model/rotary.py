"""Moving stored keys to other positions: rotary embeddings compose, R(p + Δ) = R(Δ)·R(p)."""

from __future__ import annotations

import sys

import torch
from transformers import PreTrainedModel

# Frequencies of these do not depend on the length processed, so a key's rotation is a function of position alone.
_FIXED_FREQUENCIES = {"default", "linear", "llama3", "yarn", "proportional"}


class RotaryShift:
    """Rotates keys by a number of positions, for models with one set of frequencies and half-split rotation.

    `possible` is False for any other model; `shift` then returns keys as they are. basis: an orthogonal [D, D] by
    which the keys that are given and returned have been multiplied, as int8 rows are (`attention.rotation`).
    """

    def __init__(self, model: PreTrainedModel, basis: torch.Tensor | None = None) -> None:
        rotary = getattr(model.base_model, "rotary_emb", None)
        frequencies = getattr(rotary, "inv_freq", None)
        kind = getattr(rotary, "rope_type", None)
        self.possible = frequencies is not None and kind in _FIXED_FREQUENCIES and _splits_in_halves(model)
        self._frequencies = frequencies
        self._basis = basis

    def shift(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        """keys [..., D] of any float type, as if each stood `by` positions later."""
        if not self.possible or by == 0:
            return keys
        if self._basis is None:
            return self._turn(keys, by)
        basis = self._basis.to(keys.device)
        return (self._turn(keys.float() @ basis.T, by) @ basis).to(keys.dtype)

    def _turn(self, keys: torch.Tensor, by: int) -> torch.Tensor:
        assert self._frequencies is not None
        angle = by * self._frequencies.double().to(keys.device)
        cos, sin = angle.cos(), angle.sin()
        half = angle.shape[0]
        a, b = keys[..., :half].double(), keys[..., half : 2 * half].double()
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(keys.dtype)
        return torch.cat([turned, keys[..., 2 * half :]], dim=-1)  # a partial rotary leaves the rest alone


def _splits_in_halves(model: PreTrainedModel) -> bool:
    """Whether the model's own code rotates dimension d with d + D/2, not with its neighbour."""
    rotate_half = getattr(sys.modules[type(model).__module__], "rotate_half", None)
    if rotate_half is None:
        return False
    probe = torch.arange(1.0, 5.0)
    return torch.equal(rotate_half(probe), torch.tensor([-3.0, -4.0, 1.0, 2.0]))
