"""A decode step with something simple in attention's place: to see what a model's code gives it and makes of it.

Two ways to compute a step are the same if both give attention the same and make the same of what it gives back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import numpy as np
import torch

from magicpig_cli.attention.base import LogitRule


@dataclass(frozen=True, slots=True)
class Attended:
    """What a block gives to attention."""

    layer: int
    window: int | None
    rule: LogitRule
    q: torch.Tensor  # [B, H, 1, D]
    k: torch.Tensor  # [B, Hkv, 1, D]
    v: torch.Tensor

    def result(self) -> torch.Tensor:
        """[B, 1, H, D]: something that depends on all of it."""
        group = self.q.shape[1] // self.k.shape[1]
        return (self.q + (self.k - self.v).repeat_interleave(group, dim=1)).transpose(1, 2)


class StandIn(ABC):
    """Something in attention's place that works on tensors."""

    @abstractmethod
    def attend(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        rule: LogitRule,
    ) -> torch.Tensor:  # fmt: skip
        """query [B, H, T, D], key and value [B, Hkv, T, D] → [B, T, H, D]."""

    def attend_here(
        self, layer: int, window: int | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, rule: LogitRule
    ) -> np.ndarray:
        """q [B, H, D], k and v [B, Hkv, D] → [B, H, D] by `attend`."""
        query, key, value = (torch.from_numpy(part).unsqueeze(2) for part in (q, k, v))
        return self.attend(layer, window, query, key, value, rule)[:, 0].contiguous().numpy()


@dataclass(slots=True)
class Trial(StandIn):
    """Stands for attention in a forward, and notes what it was given."""

    prefill: bool = False
    seen: list[Attended] = field(default_factory=list)

    def attend(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        rule: LogitRule,
    ) -> torch.Tensor:  # fmt: skip
        self.seen.append(Attended(layer, window, rule, query, key, value))
        return self.seen[-1].result()


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether a is b up to this share of the largest value of b; never true of NaN."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max())
