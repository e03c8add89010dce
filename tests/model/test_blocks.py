"""Decoder blocks by the kernels: which are taken over, and that nobody can tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from magicpig_cli.model import blocks, linear
from tests.model.test_linear import FORMS, ODD, held_model, teacher_forced
from tests.model.test_parity import NEW_TOKENS, expected, greedy, make_runner, prompts
from tests.tiny import FAMILIES, MIXTURES, tiny_model
from tests.tolerances import close_logits, close_to_float32

# Experts are no gated MLP, and a Granite with a factor of its own on what a block adds is none of these.
OWN_CODE = {**{family: {} for family in MIXTURES}, "granite": {"residual_multiplier": 0.5}}
TAKEN = [family for family in FAMILIES if family not in MIXTURES]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", TAKEN)
def test_every_block_of_a_dense_family_is_taken_over(family, form):
    model = held_model(family, form)
    own = teacher_forced(model)
    assert blocks.compute_by_kernels(model) == model.config.num_hidden_layers
    logits = teacher_forced(model)
    assert torch.equal(logits[:2], own[:2])  # of the prompts, by their own code
    assert not torch.equal(logits, own)  # of the steps, by the kernels
    if form == "int4":  # norms differ by rounding, after which a value of a vector may become another integer
        assert close_to_float32(logits, own, form)
    else:
        assert all(close_logits(a, b) for a, b in zip(logits, own, strict=True))


@pytest.mark.parametrize("family", OWN_CODE)
def test_other_blocks_keep_their_own_code(family):
    model = held_model(family, "float32", **OWN_CODE[family])
    own = teacher_forced(model)
    assert blocks.compute_by_kernels(model) == 0
    assert torch.equal(teacher_forced(model), own)


@pytest.mark.parametrize("family", TAKEN)
def test_greedy_tokens_equal_generate(family):
    model = tiny_model(family)
    batch = prompts(model.config.vocab_size, (70, 33, 5))
    wanted = [expected(model, prompt) for prompt in batch]
    linear.hold(model, "float32")
    assert blocks.compute_by_kernels(model)
    assert [answer[:NEW_TOKENS] for answer in greedy(make_runner(model), batch)] == wanted


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", ODD),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("phi3", {"partial_rotary_factor": 0.5}),
        ("smollm3", {"no_rope_layer_interval": 2}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_so_are_those_with_other_sizes_activations_and_positions(family, overrides):
    model = held_model(family, "float32", **overrides)
    own = teacher_forced(model)
    assert blocks.compute_by_kernels(model) == model.config.num_hidden_layers
    assert all(close_logits(a, b) for a, b in zip(teacher_forced(model), own, strict=True))


@pytest.mark.parametrize(
    "overrides", [{"hidden_act": "relu"}, {"mlp_bias": True}, {"attention_bias": True}], ids=lambda o: next(iter(o))
)
def test_parts_that_the_kernels_do_not_know_keep_their_own_code(overrides):
    assert blocks.compute_by_kernels(held_model("llama", "float32", **overrides)) == 0


def larger(own):
    return lambda *args, **kwargs: 1.5 * own(*args, **kwargs)


def shifted(own):
    return lambda x, *args, **kwargs: own(x + 1e-2, *args, **kwargs)


@pytest.mark.parametrize("change", [larger, shifted])
@pytest.mark.parametrize("part", ["", "mlp", "self_attn.k_proj", "input_layernorm", "post_attention_layernorm"])
def test_a_block_that_does_something_else_keeps_its_own_code(part, change):
    """The others are taken over: each is judged on its own."""
    model = held_model("llama", "float32")
    changed: nn.Module = model.model.layers[1]
    module = changed.get_submodule(part)
    module.forward = change(module.forward)
    own = teacher_forced(model)
    assert blocks.compute_by_kernels(model) == model.config.num_hidden_layers - 1
    assert all(close_logits(a, b) for a, b in zip(teacher_forced(model), own, strict=True))


def test_what_a_model_does_between_two_blocks_is_done():
    model = held_model("llama", "float32")

    def doubled(_module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (2 * given[0], *given[1:])

    model.model.layers[1].register_forward_pre_hook(doubled)
    own = teacher_forced(model)
    assert blocks.compute_by_kernels(model) == model.config.num_hidden_layers
    assert all(close_logits(a, b) for a, b in zip(teacher_forced(model), own, strict=True))
