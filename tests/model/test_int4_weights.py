"""int4 weights of a model on a CPU: what is held so, and what is not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from magicpig_cli.config import ModelOptions
from magicpig_cli.model import blocks, linear, loader, stored
from tests.model.test_linear import as_float, held_model, teacher_forced
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("weight", "taken"),
    [
        (torch.randn(5, 96), "int4"),
        (torch.randn(5, 96).bfloat16(), "int4"),
        (torch.zeros(5, 96), "int4"),
        (torch.randn(5, 90), "int8"),
        (torch.randn(5, 96) * 1e6, "int8"),
        (torch.randn(5, 96).clamp_min(-1e9) - 1e5, "int8"),
        (torch.tensor([[torch.nan] * 32]), "int8"),
        (torch.tensor([[torch.inf] * 32]), "int8"),
    ],
)
def test_what_int4_cannot_take_becomes_int8(weight, taken):
    held = stored.stored(weight, "int4")
    assert held.weight.dtype == {"int4": torch.uint8, "int8": torch.int8}[taken]


def test_int4_goes_by_blocks_of_rows(monkeypatch):
    weight = torch.randn(50, 64)
    whole = stored.stored(weight, "int4")
    monkeypatch.setattr(stored, "BUFFER_VALUES", 64 * 7)
    parts = stored.stored(weight, "int4")
    assert torch.equal(whole.weight, parts.weight)
    assert torch.equal(whole.scale, parts.scale)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_output_layer_are_int8(tied):
    model = held_model("llama", "int4", tie_word_embeddings=tied)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    layers = [module for module in model.modules() if isinstance(module, stored.StoredLinear) and module not in ends]
    assert {end.weight.dtype for end in ends} == {torch.int8}
    assert (ends[0].weight is ends[1].weight) == tied
    assert len(layers) == 3 * 7
    assert {layer.weight.dtype for layer in layers} == {torch.uint8}


def test_layers_of_one_input_in_two_forms_are_multiplied_apart():
    """One value that float16 lacks makes a layer int8; its block is not for the kernels, and nothing else changes."""
    model = tiny_model("llama")
    model.model.layers[1].self_attn.v_proj.weight.data[3, 5] = 1e5
    linear.hold(model, "int4")
    attention = model.model.layers[1].self_attn
    types = [getattr(attention, name).weight.dtype for name in ("q_proj", "k_proj", "v_proj")]
    assert types == [torch.uint8, torch.uint8, torch.int8]
    assert blocks.compute_by_kernels(model) == 2
    assert torch.isfinite(teacher_forced(model)).all()


def test_the_demo_model_is_held_as_its_file_has_it(demo_model):
    """Its linear layers are Q4_1: not a bit of them is lost. Parameters are counted as the values that they are."""
    loaded = loader.load_model(ModelOptions("demo", dtype="float32", quantize="int4"), torch.device("cpu"))
    assert loaded.params == demo_model.params
    assert loaded.weights == demo_model.weights  # of the same file
    for layer in (0, 17, 29):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            held = loaded.model.model.layers[layer].get_submodule(name)
            wide = demo_model.model.model.layers[layer].get_submodule(name).weight
            assert held.weight.dtype == torch.uint8
            assert torch.equal(as_float(held).float(), wide)


# Weights that were 4-bit before


def on_a_grid(values: torch.Tensor, kind: str) -> torch.Tensor:
    packed = quants.quantize(values.numpy(), GGMLQuantizationType[kind])
    return torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType[kind]))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_what_was_on_a_grid_is_given_back(kind):
    values = torch.randn(20, 96) * 0.03
    grid = on_a_grid(values, kind)
    assert stored.int4_gives_back(grid)
    assert stored.int4_gives_back(grid * 1e-3)
    assert not stored.int4_gives_back(values)


@pytest.mark.parametrize(("kind", "given_back"), [("Q4_K", True), ("Q6_K", False), ("Q5_K", False)])
def test_k_quants(kind, given_back):
    """gguf has no way to make them, but any bytes are some; factors, which are float16, are made sensible ones."""
    rng, kind = np.random.default_rng(0), GGMLQuantizationType[kind]
    block, size = quants.GGML_QUANT_SIZES[kind]
    packed = rng.integers(0, 256, (20, size * 512 // block), np.uint8)
    blocks = packed.reshape(-1, size)
    factors = rng.uniform(1e-4, 2e-4, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == GGMLQuantizationType.Q6_K:
        blocks[:, -2:] = factors[:, :2]
    else:
        blocks[:, :4] = factors
    values = torch.from_numpy(quants.dequantize(packed, kind))
    assert values.shape == (20, 512)
    assert stored.int4_gives_back(values) == given_back


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_what_float16_lacks_is_not_given_back(value):
    weight = torch.zeros(4, 64)
    weight[1, 3] = value
    assert not stored.int4_gives_back(weight)
    assert not stored.int4_gives_back(torch.zeros(4, 50))
    assert stored.int4_gives_back(torch.zeros(4, 64))


def test_a_layer_that_is_not_given_back_takes_its_companions_along():
    """So that one product serves all three, and the kernels the whole block."""
    model = tiny_model("llama")
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = on_a_grid(module.weight.data, "Q4_1")
    model.model.layers[1].self_attn.k_proj.weight.data += 0.01 * torch.randn(32, 64)
    linear.hold(model, "int4", as_stored=True)
    types = [
        [module.weight.dtype for module in layer.modules() if isinstance(module, stored.StoredLinear)]
        for layer in model.model.layers
    ]
    assert types == [[torch.uint8] * 7, [torch.int8] * 3 + [torch.uint8] * 4, [torch.uint8] * 7]
    assert blocks.compute_by_kernels(model) == 3
