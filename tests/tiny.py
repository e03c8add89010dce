"""Tiny random models of the verified families: made from configs, seeded, float32. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from magicpig_cli.model import hook  # noqa: F401  registers the attention function

_COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "gemma2": {"head_dim": 24, "sliding_window": 48, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
    "gemma3_text": {"head_dim": 24, "sliding_window": 48, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
    "phi3": {"sliding_window": None},
    "granite": {"attention_multiplier": 0.2},
    "olmo2": {},
    "smollm3": {},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
        "sliding_window": 48, "use_sliding_window": False,
    },
    "qwen3_moe": {
        "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 24,
        "use_sliding_window": False,
    },
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


def tiny_config(family: str, **overrides: Any) -> PretrainedConfig:
    """A config of the family with small sizes."""
    return AutoConfig.for_model(family, **{**_COMMON, **_FAMILIES.get(family, {}), **overrides})


def tiny_model(family: str, **overrides: Any) -> PreTrainedModel:
    """A random model of that config, seeded, in eval mode, with this project's attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), dtype=torch.float32)
    model.set_attn_implementation("magicpig")
    return model.eval()
