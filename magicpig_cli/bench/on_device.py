"""Exact decode attention over keys and values that all lie on the device: what a GPU with room for them could do.

The engine itself keeps the long middle of a context in host memory. This is the other end of the comparison: windows as
long as the context, and torch's own attention over them, the heads of a group folded into rows.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.cache.device import Device
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.store import TORCH_DTYPE, as_array
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.kernels import window_type
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan


class _OnDevice(Attention):
    """Decode steps over windows from which nothing has ever left."""

    def step(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> torch.Tensor:  # fmt: skip
        assert rule.softcap is None, "torch's attention knows no soft cap"
        with record.stage("dense"):
            self._take(caches, key, value)
            outs = [_attend(query, cache.window.valid, rule.scale) for query, cache in zip(q, caches, strict=True)]
        return torch.stack(outs).unsqueeze(1)

    def step_here(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: np.ndarray,
        key: np.ndarray, value: np.ndarray, rule: LogitRule, record: StepRecorder,
    ) -> np.ndarray:  # fmt: skip
        """Of blocks that the kernels compute, where the device is a CPU."""
        asked, k, v = (torch.from_numpy(part).unsqueeze(2) for part in (q, key, value))
        return as_array(self.step(layer, caches, sampled, asked, k, v, rule, record)[:, 0].contiguous())


def _attend(q: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, 1, D], rows [Hkv, n, 2, D] → [H, D] in q's dtype."""
    heads, _, dim = q.shape
    folded = q.reshape(1, rows.shape[0], -1, dim).to(rows.dtype)
    out = scaled_dot_product_attention(folded, rows[None, :, :, 0], rows[None, :, :, 1], scale=scale)
    return out.reshape(heads, dim).to(q.dtype)


class DeviceRunner(ModelRunner):
    """A runner whose sequences never leave the device, for exact steps up to the context of the plan."""

    def __init__(self, model: PreTrainedModel, shape: ModelShape, plan: Plan, device: torch.device | Device) -> None:
        super().__init__(model, shape, replace(plan, mode="exact", local=plan.context), device, hash_seed=0)
        self._whole = _OnDevice(None, TORCH_DTYPE[window_type(plan.row_dtype)], plan.threads, self.staging)

    def _attention(self, mode: str | None = None) -> Attention:
        return self._whole
