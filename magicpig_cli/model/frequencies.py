"""One set of rotary frequencies per run, where transformers would switch them with the length.

`longrope` and `dynamic` take other frequencies once the longest sequence of a forward passes a limit. Keys that are
already stored keep the old ones, so a prompt that is prefilled in chunks across the limit, or a batch neighbour beyond
it, changes an answer (measured with tiny models: other tokens than transformers' own). Here the context of the run
decides once, for every sequence and length.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SWITCHING = ("longrope", "dynamic")
_SETTLED = "default"  # transformers never recomputes the frequencies of this type


def settle(model: PreTrainedModel, context: int) -> bool:
    """Give a model that switches frequencies those of a sequence of `context` tokens, for good.

    Returns whether there was anything to settle. Call it before the first forward.
    """
    settled = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in SWITCHING:
            _fix(module, kinds, None, context)
            module.rope_type = _SETTLED  # type: ignore[assignment]
            settled = True
        elif isinstance(kinds, dict):
            for layer_type in [name for name, kind in kinds.items() if kind in SWITCHING]:
                _fix(module, kinds[layer_type], layer_type, context)
                kinds[layer_type] = _SETTLED
                settled = True
    return settled


def _fix(module: torch.nn.Module, kind: str, layer_type: str | None, context: int) -> None:
    prefix = "" if layer_type is None else f"{layer_type}_"
    old: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    extra = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=context, **extra)
    old.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
