"""`--quantize auto`: a GGUF file whose linear layers are 4-bit is held in 4 bits on a CPU, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from magicpig_cli.cli import app
from magicpig_cli.config import ModelOptions, Settings
from magicpig_cli.engine.identity import identity_of, model_differences
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.model import loader, stored
from magicpig_cli.model.as_stored import InFile, linear_layers, quantize_meant
from magicpig_cli.model.gguf_header import Tensor
from magicpig_cli.planner import Plan, plan
from tests.model import tiny_gguf
from tests.model.test_linear import as_float
from tests.system.test_planner import DESKTOP, ON_GPU

pytestmark = pytest.mark.usefixtures("cache")

CPU = torch.device("cpu")
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
FOUR_BITS = dict.fromkeys(MATRICES, "Q4_0")
MIXED = {"1.attn_v": "Q8_0", "1.ffn_down": "Q5_0", **FOUR_BITS}  # as K-quants are: half of these layers in more bits
LAYER = 64 * 64 * 2 + 32 * 64 * 2 + 64 * 96 * 3  # weights of one block


def planned(options: ModelOptions, machine=DESKTOP) -> Plan:
    return plan(machine, loader.load_shape(loader.load_config(options), options), Settings(options))


def held_bytes(model: torch.nn.Module) -> int:
    scales = [m.scale for m in model.modules() if isinstance(m, stored.Holder) and m.scale is not None]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *scales)}.values())


def types_held(model: torch.nn.Module) -> list[dict[str, torch.dtype]]:
    """By block and name of the layer."""
    return [
        {name: module.weight.dtype for name, module in block.named_modules() if isinstance(module, stored.StoredLinear)}
        for block in model.model.layers
    ]


# What is made of it


def tensor(name: str, kind: str, *sizes: int) -> Tensor:
    return Tensor(f"blk.0.{name}.weight", sizes or (64, 10), kind)


def in_file(**kinds: str) -> InFile:
    found = linear_layers(tensor(name, kind) for name, kind in kinds.items())
    assert found is not None
    return found


def test_only_linear_layers_of_blocks_count():
    norms = [tensor("attn_norm", "F32", 64), tensor("attn_q_norm", "F32", 64)]
    experts = [tensor("ffn_up_exps", "Q4_K", 64, 10, 8), tensor("ffn_gate_inp", "F32", 64, 8)]
    ends = [Tensor("token_embd.weight", (64, 100), "Q8_0"), Tensor("output.weight", (64, 100), "Q6_K")]
    assert linear_layers([*norms, *experts, *ends]) is None
    found = linear_layers([*norms, *experts, *ends, tensor("attn_output", "Q4_K", 64, 32)])
    assert found == InFile((("Q4_K", 64 * 32),), int4_params=64 * 32, int4_rows=32)


@pytest.mark.parametrize(
    ("kinds", "params", "meant"),
    [
        (dict.fromkeys(MATRICES, "Q4_1"), 7 * 640, "int4"),
        (dict.fromkeys(MATRICES, "Q4_0"), 7 * 640, "int4"),
        (dict.fromkeys(MATRICES, "Q4_K") | {"ffn_down": "Q6_K"}, 6 * 640, "int4"),
        (dict.fromkeys(MATRICES, "Q4_K") | {"attn_v": "Q6_K"}, 4 * 640, "int4"),  # query and key go with it
        (dict.fromkeys(MATRICES, "Q4_K") | {"attn_v": "Q6_K", "ffn_up": "Q5_K"}, 2 * 640, "none"),
        (dict.fromkeys(MATRICES, "Q4_K") | {"ffn_gate": "Q4_0"}, 7 * 640, "int4"),
        ({"attn_qkv": "Q4_K", "ffn_down": "Q8_0"}, 640, "none"),  # half is not most
        *[(dict.fromkeys(MATRICES, kind), 0, "none") for kind in (
            "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q3_K", "Q2_K", "IQ4_NL", "IQ4_XS", "MXFP4",
        )],
    ],
)  # fmt: skip
def test_what_auto_means_by_the_types_of_a_file(kinds, params, meant):
    found = in_file(**kinds)
    assert found.int4_params == params
    assert found.int4_rows == params // 64
    assert quantize_meant(ModelOptions(), found, on_gpu=False) == meant
    assert quantize_meant(ModelOptions(), found, on_gpu=True) == "none"


@pytest.mark.parametrize("asked", ["none", "int8", "int4"])
@pytest.mark.parametrize("found", [None, in_file(ffn_down="Q4_0"), in_file(ffn_down="F16")])
def test_what_was_asked_for_is_meant(asked, found):
    for on_gpu in (False, True):
        assert quantize_meant(ModelOptions(quantize=asked), found, on_gpu=on_gpu) == asked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_type_that_was_typed_is_that_of_the_weights(dtype, file):
    tiny_gguf.write(file, types=FOUR_BITS)
    loaded = loader.load_model(ModelOptions(str(file), dtype=dtype), CPU)
    assert {kind for block in types_held(loaded.model) for kind in block.values()} == {getattr(torch, dtype)}
    assert planned(ModelOptions(str(file), dtype=dtype)).weight_type == dtype


def test_types_are_told_by_their_share():
    assert in_file(ffn_down="Q4_1").words == "Q4_1"
    assert in_file(attn_q="Q4_K", attn_k="Q4_K", attn_v="Q4_K", ffn_down="Q6_K").words == "Q4_K 75%, Q6_K 25%"


# What is held


def test_a_4_bit_file_is_held_as_it_is_and_planned_so(file):
    tensors = tiny_gguf.write(file, types=FOUR_BITS)
    options = ModelOptions(str(file))
    before = planned(options)  # not converted yet
    loaded = loader.load_model(options, CPU)
    assert types_held(loaded.model) == [dict.fromkeys(types_held(loaded.model)[0], torch.uint8)] * 2
    down = as_float(loaded.model.model.layers[1].mlp.down_proj).numpy()
    wanted = tensors["blk.1.ffn_down.weight"]
    assert np.abs(down - wanted).max() < 1e-3 * np.abs(wanted).max()  # factors are rounded to float16
    assert before.weight_type == before.weight_types == "int4"
    assert before.weights_bytes == held_bytes(loaded.model)
    reason = next(line for line in before.reasons if line.startswith("weights "))
    assert reason.startswith("weights int4: as the file's linear layers are stored (Q4_0), embedding and output layer")
    assert planned(options).weights_bytes == before.weights_bytes


def test_layers_that_have_more_bits_in_the_file_are_int8_and_planned_so(file):
    tensors = tiny_gguf.write(file, types=MIXED)
    options = ModelOptions(str(file))
    loaded = loader.load_model(options, CPU)
    first, second = types_held(loaded.model)
    assert set(first.values()) == {torch.uint8}
    wide = {name.rpartition(".")[2] for name, kind in second.items() if kind == torch.int8}
    assert wide == {"q_proj", "k_proj", "v_proj", "down_proj"}  # what has the same input has one form
    assert {kind for name, kind in second.items() if name.rpartition(".")[2] not in wide} == {torch.uint8}
    for name, module in (("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
        wanted = tensors[f"blk.1.{name}.weight"]
        found = as_float(loaded.model.model.layers[1].get_submodule(module)).numpy()
        assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)
    chosen = planned(options)
    assert (chosen.weight_type, chosen.weight_types) == ("int4", "int4 and int8")
    assert chosen.weights_bytes == held_bytes(loaded.model)
    four = 2 * LAYER - 64 * 32 - 64 * 96
    words = f"Q4_0 {four / LAYER / 2:.0%}, Q5_0 {64 * 96 / LAYER / 2:.0%}, Q8_0 {64 * 32 / LAYER / 2:.0%}"
    assert f"as the file's linear layers are stored ({words}); int8 where" in " ".join(chosen.reasons)


def test_int4_that_was_asked_for_takes_all_layers(file):
    tiny_gguf.write(file, types=MIXED)
    options = ModelOptions(str(file), quantize="int4")
    loaded = loader.load_model(options, CPU)
    assert {kind for block in types_held(loaded.model) for kind in block.values()} == {torch.uint8}
    chosen = planned(options)
    assert chosen.weight_types == "int4"
    assert chosen.weights_bytes == held_bytes(loaded.model)
    assert "weights int4: as asked" in " ".join(chosen.reasons)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "F16"])
def test_a_file_of_more_bits_loses_nothing(kind, file):
    tensors = tiny_gguf.write(file, types=dict.fromkeys(MATRICES, kind))
    loaded = loader.load_model(ModelOptions(str(file)), CPU)
    down = loaded.model.model.layers[1].mlp.down_proj.weight.numpy()
    assert np.array_equal(down, tensors["blk.1.ffn_down.weight"].astype(np.float32))
    chosen = planned(ModelOptions(str(file)))
    assert f"weights float32: the file's linear layers are {kind}, of which" in " ".join(chosen.reasons)
    assert chosen.weights_bytes == held_bytes(loaded.model)


def test_a_copy_that_an_older_version_converted_is_enough(file, cache):
    """Types are read from the file itself: a copy in the cache has nothing that older ones lack."""
    tiny_gguf.write(file, types=FOUR_BITS)
    loader.load_model(ModelOptions(str(file), quantize="none"), CPU)
    (copy,) = cache.glob("gguf/*")
    known = {"config.json", "generation_config.json", "model.safetensors"}
    assert all("tokenizer" in path.name or path.name in known | {"chat_template.jinja"} for path in copy.iterdir())
    loaded = loader.load_model(ModelOptions(str(file)), CPU)
    assert {kind for block in types_held(loaded.model) for kind in block.values()} == {torch.uint8}


def test_the_converted_copy_given_as_a_directory_is_what_it_is(file, cache):
    tiny_gguf.write(file, types=FOUR_BITS)
    loader.load_model(ModelOptions(str(file)), CPU)
    (copy,) = cache.glob("gguf/*")
    assert loader.settled(ModelOptions(str(copy))).quantize == "none"
    loaded = loader.load_model(ModelOptions(str(copy)), CPU)
    assert {kind for block in types_held(loaded.model) for kind in block.values()} == {torch.float32}


def test_random_weights_are_not_what_the_file_has(file):
    tiny_gguf.write(file, types=FOUR_BITS)
    options = ModelOptions(str(file), load_format="dummy")
    loaded = loader.load_model(options, CPU)
    assert {kind for block in types_held(loaded.model) for kind in block.values()} == {torch.float32}
    assert planned(options).weight_type == "float32"


def test_on_a_gpu_auto_is_none(file):
    tiny_gguf.write(file, types=FOUR_BITS)
    options = ModelOptions(str(file))
    assert planned(options, ON_GPU).weight_type == "bfloat16"
    assert "weights bfloat16: bfloat16 on GPUs" in " ".join(planned(options, ON_GPU).reasons)
    here = ModelOptions(str(file), device="cpu")
    assert planned(here, ON_GPU).weight_type == "int4"


def test_settled_options_say_what_auto_means_where_it_runs(file, monkeypatch):
    tiny_gguf.write(file, types=FOUR_BITS)
    assert loader.settled(ModelOptions(str(file))).quantize == "int4"
    assert loader.settled(ModelOptions(str(file), quantize="int8")).quantize == "int8"
    assert loader.settled(ModelOptions("owner/name")).quantize == "none"  # and nothing is fetched
    monkeypatch.setattr(loader, "resolve_device", lambda _: torch.device("cuda"))
    assert loader.settled(ModelOptions(str(file))).quantize == "none"


# What depends on it


def test_saved_keys_and_values_are_those_of_one_form(file):
    tiny_gguf.write(file, types=MIXED)
    runs = {}
    for quantize in ("auto", "int4", "none"):
        options = ModelOptions(str(file), quantize=quantize)
        runs[quantize] = identity_of(loader.load_model(options, CPU), planned(options))
    for other, form in (("int4", "int4"), ("none", "float32")):
        assert model_differences(runs["auto"], runs[other]) == [
            f"number type of weights int4 and int8 here, {form} in the file"
        ]
    tiny_gguf.write(file, types=FOUR_BITS)
    runs = {}
    for quantize in ("auto", "int4"):
        options = ModelOptions(str(file), quantize=quantize)
        runs[quantize] = identity_of(loader.load_model(options, CPU), planned(options))
    assert model_differences(runs["auto"], runs["int4"]) == []


def test_no_way_out_is_what_is_done_already(file):
    tiny_gguf.write(file, types=FOUR_BITS)
    options = ModelOptions(str(file))
    shape = loader.load_shape(loader.load_config(options), options)
    larger = shape.scaled(40_000.0)
    assert larger.in_file.int4_params == 40_000 * shape.in_file.int4_params
    with pytest.raises(MemoryBudgetError) as refused:
        plan(replace(DESKTOP, memory_free=3 << 30), larger, Settings(options))
    assert "2.1 GiB weights" in refused.value.message  # as float32 13.0
    assert "--quantize" not in refused.value.hint
    assert "--dtype" not in refused.value.hint


def test_models_check_says_why(file, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    tiny_gguf.write(file, types=FOUR_BITS)
    assert app.run(["models", "check", str(file)]) == 0
    assert "weights int4: as the file's linear layers are stored (Q4_0)" in capsys.readouterr().out
    assert app.run(["models", "check", str(file), "--quantize", "none"]) == 0
    assert "weights float32: as asked" in capsys.readouterr().out
