"""Shapes read from configs as publishers write them: head dims, windows, rotary scaling (CASES 15–18)."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from magicpig_cli.errors import ModelError
from magicpig_cli.model.shape import VERIFIED_FAMILIES, shape_from_config, unsupported_reason
from tests.tiny import tiny_config, tiny_model

LONG_FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}


def config(family: str, **values) -> PretrainedConfig:
    return AutoConfig.for_model(family, **values)


@pytest.mark.parametrize(
    ("family", "values", "expected"),
    [
        pytest.param("qwen3", {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8,
                     "head_dim": 128}, (32, 8, 128), id="qwen3-4b"),
        pytest.param("qwen3", {"hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8,
                     "head_dim": 128}, (64, 8, 128), id="qwen3-32b"),
        pytest.param("llama", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3},
                     (9, 3, 64), id="demo"),
        pytest.param("llama", {"hidden_size": 4096, "num_attention_heads": 32}, (32, 32, 128), id="no-gqa"),
        pytest.param("phi3", {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32},
                     (32, 32, 96), id="phi3-mini"),
        pytest.param("gemma2", {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
                     "head_dim": 256}, (8, 4, 256), id="gemma2-2b"),
        pytest.param("qwen2", {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
                     (28, 4, 128), id="qwen2.5-7b"),
    ],
)  # fmt: skip
def test_head_layout(family, values, expected):
    shape = shape_from_config(config(family, **values))
    assert (shape.heads, shape.kv_heads, shape.head_dim) == expected


@pytest.mark.parametrize(
    ("family", "values", "windows"),
    [
        pytest.param("mistral", {"sliding_window": 4096}, [4096] * 4, id="mistral-0.1"),
        pytest.param("mistral", {"sliding_window": None}, [None] * 4, id="mistral-0.3"),
        pytest.param("mixtral", {"sliding_window": None}, [None] * 4, id="mixtral"),
        pytest.param("phi3", {"sliding_window": 2047}, [2047] * 4, id="phi3-mini-4k"),
        pytest.param("llama", {"sliding_window": 4096}, [None] * 4, id="llama-ignores-a-window"),
        pytest.param("granite", {}, [None] * 4, id="granite"),
        pytest.param("olmo2", {}, [None] * 4, id="olmo2"),
        pytest.param("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2},
                     [None] * 4, id="qwen2.5-has-a-window-but-does-not-use-it"),
        pytest.param("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
                     [None, None, None, 64], id="qwen2-window-in-the-last-layers"),
        pytest.param("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
                     [64] * 4, id="qwen3-window-everywhere"),
        pytest.param("gemma2", {"sliding_window": 4096}, [4096, None, 4096, None], id="gemma2-alternates"),
        pytest.param("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 3}, [512, 512, None, 512],
                     id="gemma3-pattern"),
        pytest.param("gemma3_text", {"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 2},
                     [None, 512, None, 512], id="gemma3-layer-types"),
        pytest.param("qwen2_moe", {"sliding_window": 64}, [None] * 4, id="qwen1.5-moe"),
        pytest.param("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
                     [64, None, 64, None], id="qwen2-moe-alternates"),
        pytest.param("qwen3_moe", {"sliding_window": 64}, [None] * 4, id="qwen3-moe"),
        pytest.param("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, [64] * 4,
                     id="qwen3-moe-window-everywhere"),
        pytest.param("smollm3", {"use_sliding_window": False, "sliding_window": 64}, [None] * 4, id="smollm3"),
        pytest.param("smollm3", {"use_sliding_window": True, "sliding_window": 64, "no_rope_layers": [1, 0, 1, 0]},
                     [None, 64, None, 64], id="smollm3-windows-without-rope"),
    ],
)  # fmt: skip
def test_windows(family, values, windows):
    shape = shape_from_config(config(family, num_hidden_layers=4, **values))
    assert list(shape.layer_windows) == windows
    assert shape.full_layers == tuple(n for n, window in enumerate(windows) if window is None)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("family", "positions", "scaling", "context", "trained"),
    [
        pytest.param("llama", 131072, {"name": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192}, 131072, 8192, id="llama-3.1"),
        pytest.param("qwen2", 32768, {"name": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
                     131072, 32768, id="qwen2.5-with-yarn"),
        pytest.param("qwen3", 40960, {"name": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
                     131072, 32768, id="qwen3-with-yarn"),
        pytest.param("llama", 65536, {"name": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
                     65536, 4096, id="yarn-with-scaled-positions"),
        pytest.param("llama", 4096, {"name": "yarn", "factor": 4.0}, 16384, 4096, id="yarn-without-original"),
        pytest.param("llama", 4096, {"name": "linear", "factor": 4.0}, 16384, 4096, id="vicuna-16k"),
        pytest.param("llama", 2048, {"name": "dynamic", "factor": 2.0}, 4096, 2048, id="dynamic"),
        pytest.param("llama", 4096, {"name": "default"}, 4096, None, id="default"),
    ],
)  # fmt: skip
def test_effective_context(family, positions, scaling, context, trained, type_key, key):
    written = {type_key: scaling["name"], "rope_theta": 10000.0, **{k: v for k, v in scaling.items() if k != "name"}}
    shape = shape_from_config(config(family, max_position_embeddings=positions, **{key: written}))
    assert (shape.context, shape.trained_context, shape.rope) == (context, trained, scaling["name"])


def test_longrope_positions_are_already_scaled():
    phi = config("phi3", max_position_embeddings=131072, original_max_position_embeddings=4096,
                 rope_scaling={"type": "longrope", **LONG_FACTORS})  # fmt: skip
    shape = shape_from_config(phi)
    assert (shape.context, shape.trained_context, shape.rope) == (131072, 4096, "longrope")


def test_rope_parameters_nested_by_layer_type():
    nested = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    }
    gemma = config("gemma3_text", max_position_embeddings=131072, rope_parameters=nested)
    shape = shape_from_config(gemma)
    assert (shape.context, shape.rope) == (131072, "linear")  # Gemma 3 writes the scaled length
    nested["full_attention"] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                                "rope_theta": 1e6}  # fmt: skip
    olmo = config("olmo3", max_position_embeddings=65536, rope_parameters=nested)
    assert shape_from_config(olmo).context == 65536


def test_softcap():
    assert shape_from_config(config("gemma2", attn_logit_softcapping=50.0)).softcap == 50.0
    assert shape_from_config(config("gemma2", attn_logit_softcapping=None)).softcap is None
    assert shape_from_config(config("llama")).softcap is None


@pytest.mark.parametrize(
    ("family", "values", "params"),
    [
        ("llama", {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                   "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}, 134_515_008),
        ("llama", {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "num_key_value_heads": 8}, 8_030_261_248),
        ("mixtral", {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}, 46_702_792_704),
        ("qwen2", {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4}, 7_615_616_512),
        ("qwen2_moe", {}, 14_315_784_192),  # whose defaults are Qwen1.5-MoE-A2.7B
        ("qwen3_moe", {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                       "moe_intermediate_size": 768, "num_experts": 128}, 30_532_122_624),
    ],
)  # fmt: skip
def test_parameters_are_estimated_within_a_thousandth(family, values, params):
    assert abs(shape_from_config(config(family, **values)).params / params - 1) < 1e-3


@pytest.mark.parametrize("family", sorted(VERIFIED_FAMILIES))
def test_verified_families_are_supported(family):
    assert unsupported_reason(config(family)) is None
    assert shape_from_config(config(family)).verified


@pytest.mark.parametrize("family", ["starcoder2", "olmo3", "cohere2", "glm4", "afmoe"])
def test_other_families_with_the_attention_interface_should_work(family):
    assert unsupported_reason(config(family)) is None
    assert not shape_from_config(config(family)).verified


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("t5", "encoder-decoder"),
        ("deepseek_v3", "latent attention"),
        ("mamba", "linear_attention"),
        ("jamba", "linear_attention"),
        ("qwen3_next", "linear_attention"),
        ("qwen2_vl", "vision"),
        ("gemma3", "vision"),
        ("gpt2", "no rotary"),
        ("bert", "no rotary"),
        ("modernbert", "not a causal"),
        ("bloom", "attention interface"),
        ("gpt_oss", "sinks"),
        ("diffllama", "subtracts"),
        ("stablelm", "keyword arguments"),
        ("nemotron", "keyword arguments"),
    ],
)
def test_unsupported_families_say_why(family, words):
    assert words in unsupported_reason(config(family))


def test_a_verified_family_with_an_unusual_setting_is_refused():
    assert "bidirectional" in unsupported_reason(config("gemma3_text", use_bidirectional_attention=True))


def test_a_config_without_code_is_refused():
    assert "no modeling code" in unsupported_reason(PretrainedConfig(model_type="mine", num_hidden_layers=2))


def test_a_config_that_is_no_decoder_raises_one_clear_error():
    with pytest.raises(ModelError, match="num_hidden_layers=None"):
        shape_from_config(PretrainedConfig())


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [(None, "float32"), (torch.bfloat16, "bfloat16"), ("float16", "float16"), (torch.float32, "float32")],
)
def test_number_type_of_the_checkpoint(dtype, wanted):
    assert shape_from_config(tiny_config("llama", dtype=dtype)).dtype == wanted


def test_layers_without_experts_in_a_mixture():
    """Qwen leaves some layers a plain MLP, by a list or by a step."""
    every = shape_from_config(tiny_config("qwen3_moe", num_hidden_layers=4))
    listed = shape_from_config(tiny_config("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 2]))
    stepped = shape_from_config(tiny_config("qwen3_moe", num_hidden_layers=4, decoder_sparse_step=2))
    assert listed == stepped
    assert 2 * listed.expert_params == every.expert_params
    model = tiny_model("qwen3_moe", num_hidden_layers=4, mlp_only_layers=[0, 2])
    norms = 4 * 2 * 24
    assert sum(p.numel() for p in model.parameters()) == listed.params + norms


def test_experts_are_part_of_the_parameters():
    assert shape_from_config(tiny_config("mixtral")).expert_params == 3 * 3 * 3 * 64 * 96  # layers · experts · parts
    assert shape_from_config(tiny_config("llama")).expert_params == 0
