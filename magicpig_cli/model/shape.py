"""What the planner and the cache need to know of a model, read from its config alone: no weights, no torch.

Sources of truth: the modeling code of transformers 5.24 (which layers attend through a window), its
`modeling_rope_utils.py` (what the rotary scaling does) and the config fields themselves.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.errors import ModelError
from magicpig_cli.model import published, sizes
from magicpig_cli.model.as_stored import InFile
from magicpig_cli.model.published import Published

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Proven by tests: greedy tokens with exact attention equal transformers' own (docs/families.md).
VERIFIED_FAMILIES = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "smollm3", "mixtral",
    "qwen2_moe", "qwen3_moe",
})  # fmt: skip

# Families whose attention passes `config.sliding_window` in every layer and never looks at `layer_types`.
_WINDOW_IN_EVERY_LAYER = frozenset({"mistral", "ministral3", "mixtral", "olmoe", "phi3", "qwen3_moe", "starcoder2"})

# Families whose `max_position_embeddings` already holds the length after linear scaling.
_LINEAR_ALREADY_APPLIED = ("gemma3",)

# How a decoder block calls its attention in modeling code, up to the closing parenthesis.
_ATTENTION_CALL = re.compile(r"self\.(?:self_attn|attn|attention|self_attention)(\((?:[^()]|\([^()]*\))*\))")

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a decoder-only model. Letters as everywhere: H heads, Hkv kv_heads, D head_dim."""

    family: str  # transformers' model_type
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer_windows: tuple[int | None, ...]  # per layer: a key is seen iff distance < window; None = sees everything
    context: int  # tokens, rotary scaling included
    softcap: float | None = None  # attention logits become c·tanh(logit / c)
    rope: str = "default"  # transformers' rope_type of the full-attention layers
    trained_context: int | None = None  # tokens before rotary scaling, where the config tells
    params: int = 0  # estimate from the config
    expert_params: int = 0  # of these, in experts of a mixture
    linear_params: int = 0  # of `params`, in linear layers of the blocks: what is quantized on a GPU
    linear_rows: int = 0  # output rows of these layers
    intermediate: int = 0  # width of a gated MLP, or of an expert; 0 = not known
    lookup_params: int = 0  # of `params`, an embedding that is looked up in and shares nothing with the output layer
    experts_used: float = 1.0  # share of the experts that one token goes through
    int4_params: int = 0  # of `linear_params`, what int4 on a CPU can take: rows of whole groups
    int4_rows: int = 0  # output rows of these layers
    int8_extra_bytes: int = 0  # what int8 weights but experts take beyond a byte each: scales, and what stays float32
    dtype: str = "float32"  # number type in which the checkpoint was published; float32 if the config does not tell
    published: Published | None = None  # the form of weights that were published quantized
    in_file: InFile | None = None  # linear layers as a GGUF file stores them

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window of their own."""
        return tuple(layer for layer, window in enumerate(self.layer_windows) if window is None)

    @property
    def inner(self) -> int:
        """Width of the MLP; taken as 4 · hidden where the config does not tell."""
        return self.intermediate or 4 * self.hidden

    def step_experts(self, batch: int) -> int:
        """Weights of experts that one decode step of `batch` sequences multiplies by, each with tokens of its own."""
        return round(min(1.0, batch * self.experts_used) * self.expert_params)

    def step_params(self, batch: int) -> int:
        """Weights that one decode step of `batch` sequences multiplies by, those of experts included."""
        return self.params - self.lookup_params - self.expert_params + self.step_experts(batch)

    def scaled(self, share: float) -> ModelShape:
        """A model like this one with so many of its weights."""

        def part(count: int) -> int:
            return round(share * count)

        published = self.published
        if published is not None:
            published = replace(published, bytes=part(published.bytes), wide_bytes=part(published.wide_bytes))
        return replace(
            self, params=part(self.params), expert_params=part(self.expert_params), published=published,
            linear_params=part(self.linear_params), linear_rows=part(self.linear_rows),
            int4_params=part(self.int4_params), int4_rows=part(self.int4_rows),
            int8_extra_bytes=part(self.int8_extra_bytes), in_file=self.in_file and self.in_file.scaled(share),
        )  # fmt: skip

    def as_in_file(self) -> ModelShape:
        """With int4 for nothing but what the file has in 4 bits."""
        assert self.in_file is not None
        return replace(self, int4_params=self.in_file.int4_params, int4_rows=self.in_file.int4_rows)

    @property
    def verified(self) -> bool:
        """Whether this family is proven by tests against transformers' own generate."""
        return self.family in VERIFIED_FAMILIES


def shape_from_config(config: PretrainedConfig) -> ModelShape:
    """Read the shape of a decoder-only text model. Raises ModelError if the config lacks what every such model has."""
    family = getattr(config, "model_type", None) or "unknown"
    layers = _whole(config, "num_hidden_layers")
    hidden = _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    context, trained, rope = effective_context(config)
    int4_params, int4_rows = sizes.int4_layers(config)
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,  # CASES 16: not always hidden / heads
        vocab=_whole(config, "vocab_size"),
        layer_windows=_layer_windows(config, family, layers),
        context=context,
        softcap=getattr(config, "attn_logit_softcapping", None),
        rope=rope,
        trained_context=trained,
        params=sizes.params(config),
        expert_params=sizes.expert_params(config),
        linear_params=sizes.linear_params(config),
        linear_rows=sizes.linear_rows(config),
        intermediate=sizes.intermediate(config),
        lookup_params=0 if getattr(config, "tie_word_embeddings", False) else config.vocab_size * hidden,
        experts_used=min(1.0, (getattr(config, "num_experts_per_tok", None) or 1) / sizes.experts(config)),
        int4_params=int4_params,
        int4_rows=int4_rows,
        int8_extra_bytes=sizes.int8_extra_bytes(config),
        dtype=published_dtype(config),
        published=published.estimated(config),
    )


def published_dtype(config: PretrainedConfig) -> str:
    """Number type that the config names for the checkpoint: float32, bfloat16, float16, …; float32 if it names none."""
    return str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")


def read_dtype(asked: str, published: str, *, on_gpu: bool) -> str:
    """Number type in which weights are read: what was asked for, or what `auto` means.

    On a GPU bfloat16. On a CPU bfloat16 if the checkpoint is bfloat16, so that nothing is lost and half the bytes are
    read per token; else float32 (float16 has more digits than a bfloat16, and no product worth having on CPUs).
    """
    if asked != "auto":
        return asked
    return "bfloat16" if on_gpu or published == "bfloat16" else "float32"


def _whole(config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"the config of this {getattr(config, 'model_type', 'unknown')!r} model has {name}={value!r}, "
            "not a positive whole number",
            hint="only decoder-only text models of one head layout can be used",
        )
    return value


def _layer_windows(config: PretrainedConfig, family: str, layers: int) -> tuple[int | None, ...]:
    """Sliding window per layer, as the family's attention module passes it on (CASES 18).

    Three ways in transformers. One window for all layers (Mistral, Mixtral, Phi-3): `layer_types` is ignored. By
    `layer_types`: Qwen 2 and 3 (whose config drops the window unless `use_sliding_window`, and counts
    `max_window_layers`), Gemma 2 and 3, SmolLM3 (whose layers ask `use_sliding_window` themselves). None at all,
    whatever the config says: Llama, Granite, OLMo 2.
    """
    window = getattr(config, "sliding_window", None)
    if family in _WINDOW_IN_EVERY_LAYER:
        return (window,) * layers
    types = getattr(config, "layer_types", None)
    if not types or (family == "smollm3" and not config.use_sliding_window):
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def effective_context(config: PretrainedConfig) -> tuple[int, int | None, str]:
    """(tokens the model can use, tokens before rotary scaling or None, rope type) (CASES 15).

    What `max_position_embeddings` (m) means depends on the scaling, o being `original_max_position_embeddings`:
    - default, llama3, longrope and anything else: m; publishers write the scaled length (Llama 3.1: 131,072 from
      o = 8,192 and factor 8; Phi-3-128k: 131,072 from o = 4,096).
    - yarn: o · factor. Publishers leave m at o (Qwen 2.5: 32,768 · 4) or write the product; transformers takes m for
      an o that is missing.
    - linear, dynamic: m · factor, as transformers documents it ("don't update max_position_embeddings"), or o · factor
      where o is given. Gemma 3 writes the scaled length into m: m.
    """
    longest = _max_positions(config)
    scaling = _rope_parameters(config)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    original = scaling.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    factor = scaling.get("factor")
    if kind in ("llama3", "longrope"):
        return longest, original, kind
    family = getattr(config, "model_type", "") or ""
    scaled = kind == "yarn" or (kind in ("linear", "dynamic") and not family.startswith(_LINEAR_ALREADY_APPLIED))
    if not scaled or not isinstance(factor, (int, float)) or factor <= 0:
        return longest, None, kind
    original = original or longest
    return round(original * factor), original, kind


def _max_positions(config: PretrainedConfig) -> int:
    for name in _CONTEXT_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(
        f"the config of this {getattr(config, 'model_type', 'unknown')!r} model does not say how long a context it has",
        hint="add max_position_embeddings to its config.json",
    )


def _rope_parameters(config: PretrainedConfig) -> Mapping[str, Any]:
    """Rotary parameters of the full-attention layers, from any of the places where configs keep them."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = {name: value for name, value in found.items() if isinstance(value, Mapping)}
    if not nested:
        return found
    return nested.get("full_attention") or next(iter(nested.values()))


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """Why a model with this config cannot be used, as the end of a sentence; None if it can.

    Families outside VERIFIED_FAMILIES pass if their modeling code goes through transformers' attention interface
    with rotary embeddings and a causal mask: they should work, but no test proves it.
    """
    for reason in _reasons(config):
        return reason
    return None


def _reasons(config: PretrainedConfig) -> Iterable[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoder-only text models can be used"
    for part in ("vision_config", "audio_config"):
        if getattr(config, part, None) is not None:
            yield f"it is a {part.split('_')[0]}-language model; only text models can be used"
    if getattr(config, "text_config", None) is not None:
        yield "it is a multimodal model; only text models can be used"
    if getattr(config, "kv_lora_rank", None):
        yield "it keeps compressed keys (multi-head latent attention), which cannot be sampled"
    yield from _unusual_layers(config)
    if getattr(config, "model_type", None) not in VERIFIED_FAMILIES:
        yield from _unusual_code(config)


def _unusual_layers(config: PretrainedConfig) -> Iterable[str]:
    known = {"full_attention", "sliding_attention"}
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        yield f"it has layers of type {', '.join(other)}; every layer must be full or sliding attention"
    for field in ("layers_block_type", "attn_type_list", "linear_attn_config", "mamba_d_state", "state_size"):
        if getattr(config, field, None):
            yield f"it mixes attention with recurrent or linear layers ({field})"
    for field in ("num_kv_shared_layers", "global_head_dim", "block_configs"):
        if getattr(config, field, None):
            yield f"its layers differ in head layout or share keys ({field})"
    if getattr(config, "is_heterogeneous", False):
        yield "its layers differ in head layout"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention is bidirectional; only causal models generate text token by token"
    if getattr(config, "alibi", False):
        yield "it uses ALiBi position biases; only rotary models can be used"


def _unusual_code(config: PretrainedConfig) -> Iterable[str]:
    """What the family's modeling code, read as text, says about its attention."""
    family = getattr(config, "model_type", "unknown")
    code = _modeling_code(config)
    if code is None:
        yield f"no modeling code for {family!r} is at hand"
    elif "ALL_ATTENTION_FUNCTIONS" not in code:
        yield f"{family!r} does not use transformers' attention interface"
    elif "rotary" not in code:
        yield f"{family!r} has no rotary position embeddings"
    elif "create_causal_mask" not in code or "CausalLM(" not in code:
        yield f"{family!r} is not a causal language model"
    elif "s_aux=" in code:
        yield f"{family!r} adds attention sinks to the softmax, which the sampler does not know"
    elif "lambda_init" in code:
        yield f"{family!r} subtracts one attention from another"
    elif (calls := _ATTENTION_CALL.findall(code)) and not any("kwargs" in call for call in calls):
        yield f"{family!r} does not pass keyword arguments on to its attention"


def _modeling_code(config: PretrainedConfig) -> str | None:
    """Source of the modeling file next to the family's configuration file, built-in or remote."""
    try:
        source = Path(inspect.getfile(type(config)))
    except (TypeError, OSError):
        return None
    modeling = source.with_name(source.name.replace("configuration_", "modeling_"))
    if modeling == source or source.name == "configuration_utils.py" or not modeling.is_file():
        return None
    return modeling.read_text(encoding="utf-8")
