"""How many weights a config makes, by what is done with them. Read from the config alone: no weights, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_INT4_GROUP = 32  # as in kernels/product.py, which a config can do without


def params(config: PretrainedConfig) -> int:
    """Parameters of a gated-MLP decoder with these sizes; within a few per cent for the verified families."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    routers = len(_mixed_layers(config)) * hidden * experts(config)
    matrices = embeddings(config) + linear_params(config)
    return int(matrices + routers + layers * 2 * hidden + expert_params(config) + hidden)


def embeddings(config: PretrainedConfig) -> int:
    """Weights of the token embedding, and of an output layer that does not share them."""
    return int(_embedding_rows(config) * config.hidden_size)


def _embedding_rows(config: PretrainedConfig) -> int:
    return int(config.vocab_size) * (1 if getattr(config, "tie_word_embeddings", False) else 2)


def linear_params(config: PretrainedConfig) -> int:
    """Weights of the linear layers of all blocks, without experts."""
    return int(sum(rows * length for rows, length in _linear_layers(config)))


def linear_rows(config: PretrainedConfig) -> int:
    """Output rows of these layers: so many scales they have, where a row has one."""
    return int(sum(rows for rows, _ in _linear_layers(config)))


def int4_layers(config: PretrainedConfig) -> tuple[int, int]:
    """Weights of those linear layers that int4 on a CPU can take, whose rows are whole groups, and their rows."""
    fitting = [(rows, length) for rows, length in _linear_layers(config) if length % _INT4_GROUP == 0]
    return sum(rows * length for rows, length in fitting), sum(rows for rows, _ in fitting)


def _linear_layers(config: PretrainedConfig) -> list[tuple[int, int]]:
    """Linear layers of all blocks without experts, as (rows, length of a row); what is alike is one."""
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    found = [(layers * (heads + 2 * kv_heads) * head_dim, hidden), (layers * hidden, heads * head_dim)]
    mixed = len(_mixed_layers(config))
    if shared := mixed and getattr(config, "shared_expert_intermediate_size", None):  # every token goes through it
        found += [(mixed * 2 * shared, hidden), (mixed * hidden, shared), (mixed, hidden)]
    if dense := layers - mixed:
        inner = getattr(config, "intermediate_size", None) or 4 * hidden
        found += [(dense * 2 * inner, hidden), (dense * hidden, inner)]
    return found


def int8_extra_bytes(config: PretrainedConfig) -> int:
    """What int8 on a CPU takes beyond a byte per value: two per row for its scale, three more per norm and router."""
    rest = params(config) - expert_params(config) - embeddings(config) - linear_params(config)
    return int(2 * (_embedding_rows(config) + linear_rows(config)) + 3 * rest)


def experts(config: PretrainedConfig) -> int:
    """Experts per layer; 1 where there is no choice among them."""
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1


def _mixed_layers(config: PretrainedConfig) -> list[int]:
    """Layers that choose among experts: all of a mixture, but for those that Qwen's configs leave an MLP."""
    if experts(config) == 1:
        return []
    step, dense = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    return [n for n in range(config.num_hidden_layers) if n not in dense and (n + 1) % step == 0]


def expert_params(config: PretrainedConfig) -> int:
    """Parameters of all experts of all layers; 0 where there is no choice among them."""
    return int(len(_mixed_layers(config)) * 3 * config.hidden_size * intermediate(config) * experts(config))


def intermediate(config: PretrainedConfig) -> int:
    """Width of the gated MLP, or of one expert; 4 · hidden where the config does not tell."""
    names = ("moe_intermediate_size", "intermediate_size") if experts(config) > 1 else ("intermediate_size",)
    return next((value for name in names if (value := getattr(config, name, None))), 4 * int(config.hidden_size))
