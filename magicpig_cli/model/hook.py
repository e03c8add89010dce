"""One hook for all model families: an attention function registered with transformers, and a cache that keeps nothing.

The model's own code does everything up to rotary embedding; then our function takes over with what transformers hands
it. Which sequences a forward belongs to travels along as the keyword argument `magicpig` of the model call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.errors import ModelError
from magicpig_cli.model import linear


@dataclass(slots=True)
class Forward:
    """One call of the model: a prompt chunk of one sequence (sampled is None), or one token for each of several.

    lane: 1 for the second half of a batch, whose forward runs beside that of the first one.
    """

    attention: Attention
    sequences: list[Sequence]
    sampled: list[list[bool]] | None = None  # per layer, per sequence
    taken: Callable[[int, LayerCache], None] | None = None  # told of each layer that has taken in the rows of a chunk
    record: StepRecorder = field(default_factory=StepRecorder)
    lane: int = 0

    @property
    def prefill(self) -> bool:
        """Whether this is a prompt chunk: then every layer is exact and products are those of many rows."""
        return self.sampled is None

    def attend(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        rule: LogitRule,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of one layer: query [B, H, T, D], key and value [B, Hkv, T, D] → [B, T, H, D]."""
        caches = self._caches(layer, window)
        if self.sampled is not None:
            return self.attention.step(layer, caches, self.sampled[layer], query, key, value, rule, self.record)
        out = self.attention.chunk(caches[0], query, key, value, rule)
        if self.taken is not None:
            self.taken(layer, caches[0])
        return out

    def attend_here(
        self, layer: int, window: int | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, rule: LogitRule
    ) -> np.ndarray:
        """The same of a decode step in host memory, float32: q [B, H, D], k and v [B, Hkv, D] → [B, H, D]."""
        assert self.sampled is not None
        caches = self._caches(layer, window)
        return self.attention.step_here(layer, caches, self.sampled[layer], q, k, v, rule, self.record)

    def _caches(self, layer: int, window: int | None) -> list[LayerCache]:
        """Those of a layer, which must have the window that the model's code attends to."""
        caches = [sequence.layers[layer] for sequence in self.sequences]
        if window != caches[0].spec.window:
            raise ModelError(f"layer {layer} attends to a window of {window}, its config says {caches[0].spec.window}")
        return caches


class Attends(Protocol):
    """What travels through a model's forward as `magicpig`."""

    @property
    def prefill(self) -> bool: ...

    def attend(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        rule: LogitRule,
    ) -> torch.Tensor: ...  # fmt: skip

    def attend_here(
        self, layer: int, window: int | None, q: np.ndarray, k: np.ndarray, v: np.ndarray, rule: LogitRule
    ) -> np.ndarray: ...


class PassThroughCache(Cache):
    """Satisfies the models' cache protocol; keys and values go straight to the attention function."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # position ids are always given, masks never built

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return 0, 0


def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, *,
    magicpig: Attends | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention signature: query [B, H, T, D], key and value [B, Hkv, T, D] → [B, T, H, D]."""
    if magicpig is None:
        raise ModelError(
            "this model does not pass keyword arguments on to attention", hint="magicpig models check MODEL"
        )
    window = kwargs.get("sliding_window", getattr(module, "sliding_window", None))
    rule = LogitRule(scaling if scaling is not None else query.shape[-1] ** -0.5, kwargs.get("softcap"))
    out = magicpig.attend(int(module.layer_idx), window, query, key, value, rule)  # type: ignore[arg-type]
    return out.contiguous(), None  # as transformers' own functions give it: some families take a view of it


AttentionInterface.register("magicpig", _attend)


@functools.cache
def _cache_argument(model: type[PreTrainedModel]) -> str:
    """transformers renamed the argument: `past_key_values` up to 5.17, `cache` in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def run(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, forward: Attends) -> torch.Tensor:
    """One forward over ids and positions, both [B, T] on the model's device → logits of the last position [B, V]."""
    with linear.phase(model, prefill=forward.prefill):
        output = model(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            magicpig=forward,
            **{_cache_argument(type(model)): PassThroughCache()},  # type: ignore[arg-type]
        )
    logits: torch.Tensor = output.logits[:, -1]
    return logits
