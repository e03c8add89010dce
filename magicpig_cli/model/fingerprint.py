"""What keys and values depend on, in a form that can be written down and compared.

Weights are known by a sample of their values, not by files: the same model is the same from the Hub, a copied directory
or a GGUF file, and one that was trained further is another, though its files have the same names, sizes and shapes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from magicpig_cli.model.quantized import is_quantized, tensors_of

_SAMPLES = 64  # values of each weight; training further changes all of them, a merged adapter all of some weights
_IRRELEVANT = frozenset({  # of a config: keys and values are the same whatever they say
    "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip


def of_weights(model: PreTrainedModel) -> str:
    """16 hex digits of samples of all weights, rounded to bfloat16: in which type they were read does not matter.

    Of weights that quantizers hold it does: their integers are taken as they are, packed, and their scales too.
    """
    digest = hashlib.sha256()
    for name, weight in tensors_of(model) if is_quantized(model) else model.named_parameters():
        flat = weight.detach().reshape(-1)
        step = max(1, len(flat) // _SAMPLES) | 1  # odd: not the same column of every row
        sample = flat[::step][:_SAMPLES].to("cpu")
        if sample.is_floating_point():
            sample = sample.to(torch.bfloat16).view(torch.int16)
        digest.update(f"{name} {list(weight.shape)}\n".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def of_rotary(model: PreTrainedModel) -> str:
    """16 hex digits of the rotary frequencies and scalings that are in use (`frequencies.settle` may have set them)."""
    digest = hashlib.sha256()
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq"):
            digest.update(f"{name}\n".encode())
            digest.update(buffer.detach().to("cpu", torch.float32).numpy().tobytes())
    for name, module in model.named_modules():
        for attribute in sorted(vars(module)):
            if attribute.endswith("attention_scaling"):
                digest.update(f"{name}.{attribute} {float(getattr(module, attribute)):.9g}\n".encode())
    return digest.hexdigest()[:16]


def of_config(config: PretrainedConfig) -> dict[str, Any]:
    """What the config says, as plain JSON values, without what changes no key and no value."""
    plain = json.loads(json.dumps(config.get_text_config().to_dict(), default=str))
    return {key: value for key, value in plain.items() if key not in _IRRELEVANT and not key.startswith("_")}
