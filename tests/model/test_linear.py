"""Linear layers that hold bfloat16, int8 or int4 weights: every family, phases, memory, and what rounding costs."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from magicpig_cli import kernels
from magicpig_cli.bench.fill import natural_text
from magicpig_cli.config import ModelOptions, Settings
from magicpig_cli.kernels.reference.product import round_groups
from magicpig_cli.model import linear, loader, stored
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import plan
from tests.model.test_parity import make_runner, prompts
from tests.system.test_planner import DESKTOP
from tests.tiny import FAMILIES, MIXTURES, tiny_model
from tests.tolerances import KL_LIMIT, close_logits, close_product, close_to_float32

FORMS = ("float32", "bfloat16", "int8", "int4")
ROUNDED = ("bfloat16", "int8", "int4")
ODD = {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # 72 is no multiple of 16


def held_model(family: str, form: stored.Form, **overrides):
    model = tiny_model(family, **overrides)
    linear.hold(model, form)
    return model


def teacher_forced(model, steps: int = 6) -> torch.Tensor:
    """Logits after two prompts, and of decode steps over both: the tokens are given, so that models stay comparable."""
    runner = make_runner(model)
    sequences, logits = [], []
    for prompt in prompts(model.config.vocab_size, (150, 21)):
        sequence = runner.new_sequence()
        *_, (_, last) = runner.prefill(sequence, prompt)
        sequences.append(sequence)
        logits.append(last)
    for token in range(3, 3 + steps):
        logits += runner.decode(sequences, [token, token + 1]).logits
    return torch.stack(logits)


# One layer


def layer_and_inputs(form: stored.Form, rows: int, bias: bool = True):
    torch.manual_seed(rows)
    layer = nn.Linear(96, 33, bias=bias)
    products = stored.Products()
    held = stored.stored(layer.weight.detach(), form)
    bias_values = layer.bias.detach() if bias else None
    return stored.StoredLinear(held, bias_values, products, few_rows=False), products, torch.randn(rows, 96)


def as_float(layer: stored.StoredLinear) -> torch.Tensor:
    """The weight that the layer holds, in float64."""
    if layer.weight.dtype == torch.uint8:
        wide = torch.empty(len(layer.weight), 2 * layer.weight.shape[1])
        kernels.widen_int4(layer.weight.detach().numpy(), layer.scale.numpy(), wide.numpy(), threads=1)
        return wide.double()
    weight = layer.weight.double()
    return weight if layer.scale is None else weight * layer.scale.double()[:, None]


def as_taken(x: torch.Tensor, form: stored.Form) -> torch.Tensor:
    """Vectors [M, K] as decode multiplies them, in float64: before int4 weights they are rounded."""
    if form != "int4":
        return x.double()
    pairs = [round_groups(row) for row in x.numpy()]
    return torch.tensor(np.stack([(integers * step[:, None].astype(np.float64)).ravel() for integers, step in pairs]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_both_phases_multiply_what_is_held(form, rows, bias):
    layer, products, x = layer_and_inputs(form, rows, bias)
    offset = layer.bias.double() if bias else 0.0
    for products.prefill in (True, False):
        taken = as_taken(x, form) if not products.prefill else x.double()
        wanted, sizes = taken @ as_float(layer).T, taken.abs() @ as_float(layer).abs().T
        got = layer(x.reshape(1, rows, 96))
        assert (got.shape, got.dtype) == ((1, rows, 33), torch.float32)
        assert close_product(got[0].double() - offset, wanted, 3 * sizes if form == "int4" else sizes)


@pytest.mark.parametrize("form", FORMS)
def test_the_phase_chooses_the_product_and_the_number_of_rows_does_not(form, monkeypatch):
    """One row in prefill is multiplied by torch, 64 rows in decode are not."""
    seen: list[int] = []
    multiply = kernels.multiply
    monkeypatch.setattr(kernels, "multiply", lambda x, *rest, **more: seen.append(len(x)) or multiply(x, *rest, **more))
    for rows in (1, 64):
        layer, products, x = layer_and_inputs(form, rows)
        products.prefill = True
        layer(x)
        assert seen == []
        products.prefill = False
        layer(x)
        assert seen == [rows]
        seen.clear()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("out", "inner"), [(33, 96), (576, 576), (576, 1536)])
@pytest.mark.parametrize("form", FORMS)
def test_no_bit_of_a_row_depends_on_its_neighbours(form, out, inner, threads):
    """A batch neighbour must not change what a sequence gets (DESIGN.md, "Determinism contract")."""
    torch.manual_seed(0)
    weight, x, model = torch.randn(out, inner), torch.randn(8, inner), nn.Module()
    model.magicpig_products = stored.Products()
    layer = stored.StoredLinear(stored.stored(weight, form), torch.randn(out), model.magicpig_products, few_rows=False)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with linear.phase(model, prefill=False):
            together = layer(x)
            for rows in (1, 2, 3, 4, 5, 7):
                assert torch.equal(layer(x[:rows]), together[:rows])
                assert torch.equal(layer(x[-rows:]), together[-rows:])
    finally:
        torch.set_num_threads(before)


def three_layers(form: stored.Form) -> tuple[list[stored.StoredLinear], stored.Products]:
    torch.manual_seed(1)
    products = stored.Products()
    layers = [
        stored.StoredLinear(stored.stored(torch.randn(n, 96), form), torch.randn(n), products, few_rows=False)
        for n in (33, 8, 8)
    ]
    return layers, products


@pytest.mark.parametrize("shape", [(1, 1, 96), (3, 1, 96), (2, 5, 96)])
@pytest.mark.parametrize("form", FORMS)
def test_layers_of_one_input_are_multiplied_once_and_give_the_same(form, shape, monkeypatch):
    (query, key, value), _ = three_layers(form)
    inputs = [torch.randn(shape) for _ in range(2)]
    wanted = [[layer(x) for layer in (query, key, value)] for x in inputs]
    stored.multiply_together([query, key, value])
    calls: list[int] = []
    multiply = kernels.multiply
    monkeypatch.setattr(kernels, "multiply", lambda *rest, **more: calls.append(1) or multiply(*rest, **more))
    for x, each in zip(inputs, wanted, strict=True):
        for layer, result in zip((value, query, key), (each[2], each[0], each[1]), strict=True):  # whoever is first
            assert torch.equal(layer(x), result)
    assert len(calls) == 2


def test_results_are_those_of_the_tensor_that_was_given():
    """Not of one that was given before, whatever has or has not been taken of its products."""
    layers, products = three_layers("bfloat16")
    stored.multiply_together(layers)
    query, key, _ = layers
    x, y = torch.randn(1, 96), torch.randn(1, 96)
    query(x)
    assert torch.equal(key(y), key(y.clone()))
    again = query(x)
    assert torch.equal(again, query(x))  # a second time with the same tensor
    x.mul_(2)
    assert not torch.equal(query(x), again)
    products.forget()
    assert products._input is None
    assert not products._waiting


@pytest.mark.parametrize("form", FORMS)
def test_a_step_keeps_nothing_of_its_activations(form):
    model = held_model("llama", form)
    teacher_forced(model)
    assert model.magicpig_products._input is None


@pytest.mark.parametrize("form", ROUNDED)
def test_blocks_of_the_cast_buffer_change_nothing(form, monkeypatch):
    layer, products, x = layer_and_inputs(form, 9)
    products.prefill = True
    whole = layer(x)
    monkeypatch.setattr(stored, "BUFFER_VALUES", 96 * 7)
    small = stored.Products()
    small.prefill = True
    layer._products = small
    assert close_product(layer(x), whole, x.abs() @ as_float(layer).float().abs().T)
    assert small._buffer.numel() == 96 * 7


def test_int8_uses_the_whole_range_of_every_row():
    weight = torch.randn(50, 64) * torch.logspace(-6, 3, 50)[:, None]
    weight[7] = 0.0
    held = stored.stored(weight, "int8")
    assert held.weight.abs().amax(dim=1).tolist() == [127] * 7 + [0] + [127] * 42
    restored = held.weight.float() * held.scale.float()[:, None]
    assert ((restored - weight).abs() <= 0.501 * held.scale.float()[:, None]).all()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantizing_leaves_the_weight_as_it_was(form):
    weight = torch.randn(20, 32)
    before = weight.clone()
    stored.stored(weight, form)
    assert torch.equal(weight, before)


# Whole models


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_weights_give_the_logits_of_the_model(family):
    plain = tiny_model(family)
    wanted = teacher_forced(plain)
    before = [weakref.ref(layer.weight) for layer in plain.modules() if type(layer) is nn.Linear]
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    linear.hold(plain, "float32")
    assert not [weight for weight in before if weight() is not None]  # once, not twice
    assert (plain.get_output_embeddings().weight is plain.get_input_embeddings().weight) == tied
    for got, logits in zip(teacher_forced(plain), wanted, strict=True):
        assert close_logits(got, logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_query_key_and_value_are_one_product_and_so_are_gate_and_up(family, monkeypatch):
    """Phi-3 has them in one layer anyway; experts are not ours."""
    model = held_model(family, "bfloat16")
    runner = make_runner(model)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, [5, 6, 7]))
    calls: list[int] = []
    multiply = kernels.multiply
    monkeypatch.setattr(kernels, "multiply", lambda *rest, **more: calls.append(1) or multiply(*rest, **more))
    runner.decode([sequence], [3])
    per_layer = {"mixtral": 2, "qwen3_moe": 2, "qwen2_moe": 5}.get(family, 4)  # a shared expert is an MLP with a gate
    assert len(calls) == model.config.num_hidden_layers * per_layer + 1


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_close_to_float32(family, form):
    """All experts of a mixture are at work: no choice is made that rounding could flip. 4 bits of random weights lose
    so much that they are compared with a float32 model of the rounded weights."""
    sizes = {"num_experts_per_tok": 3} if family in MIXTURES else {}
    plain, held = tiny_model(family, **sizes), held_model(family, form, **sizes)
    if form == "int4":
        for name, module in held.named_modules():
            if isinstance(module, stored.Holder):
                plain.get_submodule(name).weight.data = as_float(module).float()
    assert close_to_float32(teacher_forced(held), teacher_forced(plain), form)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_held_once(family, form):
    """Every 2-D weight that fits takes 2 or 1 bytes per value; nothing keeps the float32 original alive."""
    before = tiny_model(family)
    shape = shape_from_config(before.config)
    model = held_model(family, form)
    layers = [module for module in model.modules() if isinstance(module, (stored.StoredLinear, stored.StoredEmbedding))]
    assert not [name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.Embedding)]
    values = {
        id(layer.weight): layer.weight.numel() * (2 if layer.weight.dtype == torch.uint8 else 1) for layer in layers
    }
    others = sum(p.numel() for p in model.parameters() if id(p) not in values)
    assert sum(values.values()) + others == sum(p.numel() for p in before.parameters())
    types = {"bfloat16": {torch.bfloat16}, "int8": {torch.int8}, "int4": {torch.int8, torch.uint8}}[form]
    assert {layer.weight.dtype for layer in layers} == types
    wide = sum(p.nbytes for p in model.parameters() if p.dtype == torch.float32)
    assert wide <= 4 * (shape.expert_params + 0.02 * shape.params)
    scales = sum(layer.scale.nbytes for layer in layers if layer.scale is not None)
    most = {"bfloat16": 0, "int8": 0.05, "int4": 0.05 + 4 / 32}[form]
    assert (scales > 0) == (form != "bfloat16")
    assert scales <= most * shape.params


@pytest.mark.parametrize(("quantize", "dtype"), [("int8", "auto"), ("int4", "auto"), ("none", "bfloat16")])
@pytest.mark.parametrize(
    ("family", "sizes"), [*((family, {}) for family in FAMILIES), ("llama", ODD), ("llama", {"intermediate_size": 90})]
)
def test_weights_are_planned_as_they_are_held(family, sizes, quantize, dtype):
    """The plan knows no biases and not every norm; that norms and routers are float32 beside bfloat16 weights it leaves
    out."""
    shape = shape_from_config(tiny_model(family, **sizes).config)
    planned = plan(DESKTOP, shape, Settings(ModelOptions("any", quantize=quantize, dtype=dtype)))
    model = held_model(family, planned.weight_type, **sizes)
    scales = {m.scale.data_ptr(): m.scale.nbytes for m in model.modules() if getattr(m, "scale", None) is not None}
    held = sum(p.nbytes for p in model.parameters()) + sum(scales.values())  # tied weights share one scale
    unknown = 4 * abs(sum(p.numel() for p in tiny_model(family, **sizes).parameters()) - shape.params)
    wide = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32) - shape.expert_params
    assert abs(held - planned.weights_bytes) <= unknown + (2 * wide if dtype == "bfloat16" else 0)


@pytest.mark.parametrize("form", ROUNDED)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied(form, tied):
    model = held_model("gemma3_text", form, tie_word_embeddings=tied)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert (embedding.weight is output.weight) == tied
    assert embedding.scale is None or (embedding.scale.data_ptr() == output.scale.data_ptr()) == tied


@pytest.mark.parametrize("form", ROUNDED)
def test_an_embedding_of_an_unknown_class_keeps_its_own_weight(form):
    """Its code knows nothing of integers and scales, even where the output layer was tied to it."""

    class Embedding(nn.Embedding):
        pass

    model = tiny_model("llama", tie_word_embeddings=True)
    model.model.embed_tokens.__class__ = Embedding
    before = model.get_input_embeddings().weight.clone()
    linear.hold(model, form)
    assert type(model.get_input_embeddings()) is Embedding
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("form", ROUNDED)
def test_embedding_gives_float32_rows_of_what_is_held(form):
    model = held_model("gemma3_text", form)
    embedding = model.get_input_embeddings()
    ids = torch.tensor([[5, 9, 5]])
    got = embedding(ids)
    assert got.dtype == torch.float32
    assert torch.equal(got[0, 0], got[0, 2])
    assert torch.equal(got.double(), as_float(embedding)[ids] * 64**0.5)  # 8 and 8 bits: float32 holds the product


def test_bfloat16_loses_nothing_of_a_bfloat16_checkpoint():
    model = tiny_model("qwen2").to(torch.bfloat16)
    plain = tiny_model("qwen2").to(torch.bfloat16).float()
    linear.hold(model, "bfloat16")
    for held, wide in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(held.float(), wide)


def test_the_rest_of_a_bfloat16_model_becomes_float32():
    model = tiny_model("gemma2").to(torch.bfloat16)
    linear.hold(model, "int8")
    assert {p.dtype for p in model.parameters()} == {torch.int8, torch.float32}
    scales = [m.scale for m in model.modules() if hasattr(m, "scale")]
    assert {s.dtype for s in scales} == {torch.bfloat16}


@pytest.mark.parametrize("form", FORMS)
def test_the_runner_says_the_phase(form):
    model = held_model("llama", form)
    runner = make_runner(model)
    seen: list[bool] = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_pre_hook(lambda module, _: seen.append(module._products.prefill))
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, [5] * 20))
    runner.decode([sequence], [3])
    list(runner.prefill(sequence, [7]))
    runner.decode([sequence], [4])
    assert seen == [True, True, False, True, False]  # 20 tokens are two chunks of 16


# What rounding costs on trained weights

KL_POSITIONS = 128


@pytest.fixture(scope="module")
def demo_logs(demo_model) -> torch.Tensor:
    return next_token_logs(demo_model)


def next_token_logs(loaded) -> torch.Tensor:
    """Log-probabilities [positions, V] in float64 of decode steps over given English text."""
    ids = loaded.tokenizer(natural_text()[:4000])["input_ids"][: 64 + KL_POSITIONS]
    runner = make_runner(loaded.model, chunk=64)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, ids[:64]))
    steps = [runner.decode([sequence], [token]) for token in ids[64:]]
    return torch.stack([step.logits[0].double().log_softmax(-1) for step in steps])


@pytest.mark.parametrize("form", ROUNDED)
def test_next_tokens_of_the_demo_model(form, demo_logs):
    by_type = {"dtype": form} if form == "bfloat16" else {"dtype": "float32", "quantize": form}
    options = ModelOptions("demo", **by_type)
    logs = next_token_logs(loader.load_model(options, torch.device("cpu")))
    kl = (demo_logs.exp() * (demo_logs - logs)).sum(-1)
    assert len(kl) == KL_POSITIONS
    assert 0 < kl.mean() <= KL_LIMIT[form]
