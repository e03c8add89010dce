"""Weights that quantizers hold: published so, or made so while they are read. What takes a package that is not
installed is skipped; refusals and byte counts never are."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from magicpig_cli import hardware
from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import MemoryBudgetError, ModelError, UsageError
from magicpig_cli.model import fingerprint, linear, loader, published, quantized, reading
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.model.stored import StoredLinear
from magicpig_cli.planner.forms import on_device, total
from tests.model.test_parity import expected, greedy, make_runner, prompts
from tests.tiny import tiny_config, tiny_model

CPU = torch.device("cpu")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
IDS = list(range(3, 40))
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in ("accelerate", *packages) if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama", **SIZES).save_pretrained(folder)
    loader._byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / original.name)


def configure(folder: Path, quantization: dict) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def load(folder: Path, **options) -> loader.Loaded:
    return loader.load_model(ModelOptions(str(folder), **options), CPU)


# Published quantized


GROUP = 32  # values that share a scale


def packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """int4 of a weight [N, K] with a scale per group, eight to an integer, as compressed-tensors writes it."""
    grouped = weight.view(len(weight), -1, GROUP)
    scale = (grouped.abs().amax(dim=2) / 7.5).bfloat16()
    integers = (grouped / scale.float().unsqueeze(2)).round().clamp(-8, 7).view_as(weight).to(torch.int64) + 8
    words = (integers.view(len(weight), -1, 8) << torch.arange(0, 32, 4)).sum(dim=2)
    return {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }


def compressed_int4(folder: Path) -> None:
    """A compressed-tensors checkpoint, written by hand: int4 in groups, as most publishers have it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith("proj.weight"):
            layer = name.removesuffix("weight")
            tensors |= {layer + part: tensor for part, tensor in packed(value).items()}
        else:
            tensors[name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    configure(folder, {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}}, "ignore": ["lm_head"],
    })  # fmt: skip


def saved_by(quantization: Callable[[], object]) -> Callable[[Path], None]:
    """As the quantizer itself writes the model."""

    def write(folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization(), dtype=torch.bfloat16, device_map={"": "cpu"}
        )
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder)

    return write


def eight_bits() -> object:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


FORMS = [
    pytest.param(compressed_int4, "compressed-tensors", marks=needs("compressed_tensors")),
    pytest.param(saved_by(lambda: quantized.config_of("int8")), "torchao", marks=needs("torchao")),
    pytest.param(saved_by(eight_bits), "bitsandbytes", marks=needs("bitsandbytes")),
]


def held(model: PreTrainedModel) -> int:
    """Bytes of everything that holds weights."""
    return sum(tensor.nbytes for _, tensor in quantized.tensors_of(model))


def relative(layer: nn.Module, weight: torch.Tensor, dtype: torch.dtype) -> float:
    """By how much a layer's products differ from those of a plain weight."""
    x = torch.randn(50, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = x.float() @ weight.T
    return float((layer(x).float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("write", "method"), FORMS)
def test_a_published_form_runs_as_transformers_runs_it(write, method, folder, original):
    write(folder)
    loaded = load(folder)
    model = loaded.model
    assert loaded.params == sum(p.numel() for p in tiny_model("llama", **SIZES).parameters())
    weight = load_file(original / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert relative(model.get_submodule("model.layers.1.mlp.down_proj"), weight, torch.float32) < 0.12
    assert isinstance(model.lm_head, StoredLinear)  # plain, so it is ours
    assert sum(isinstance(module, StoredLinear) for module in model.modules()) == 1
    assert {p.dtype for name, p in model.named_parameters() if "norm" in name} == {torch.float32}
    batch = prompts(256, (70, 9))
    assert greedy(make_runner(model), batch) == [expected(model, prompt) for prompt in batch]


@pytest.mark.parametrize(("write", "method"), FORMS)
def test_published_weights_are_counted_by_their_files(write, method, folder):
    write(folder)
    config = loader.load_config(ModelOptions(str(folder)))
    expecting = shape_from_config(config).published
    found = loader.load_shape(config, ModelOptions(str(folder))).published
    assert (expecting.method, expecting.counted) == (found.method, False) == (method, False)
    tensors = load_file(folder / "model.safetensors").values()
    assert found.bytes == sum(tensor.nbytes for tensor in tensors)
    assert expecting.bytes == pytest.approx(found.bytes, rel=0.1)
    assert found.wide_bytes == sum(tensor.nbytes for tensor in tensors if tensor.dtype == torch.bfloat16)


@needs("compressed_tensors")
def test_a_fingerprint_of_packed_weights(folder):
    compressed_int4(folder)
    one, again = load(folder).weights, load(folder).weights
    path = folder / "model.safetensors"
    state = load_file(path)
    name = "model.layers.1.self_attn.v_proj.weight_packed"
    save_file({**state, name: state[name] ^ 1}, path, metadata={"format": "pt"})
    trained = load(folder).weights
    name = "model.layers.1.self_attn.v_proj.weight_scale"
    save_file({**state, name: state[name] * 2}, path, metadata={"format": "pt"})
    scaled = load(folder).weights
    assert one == again
    assert len({one, trained, scaled}) == 3


@needs("compressed_tensors")
def test_what_transformers_cannot_multiply_here_is_said_when_it_is_loaded(folder, monkeypatch):
    def fail(_model) -> None:
        raise RuntimeError("no kernel image\nis available")

    compressed_int4(folder)
    monkeypatch.setattr(loader.blocks, "run_trial", fail)
    with pytest.raises(ModelError, match="cannot be multiplied here: no kernel image is available"):
        load(folder)


class Packed(nn.Module):
    """What some quantizers put in the place of a linear layer: integers and scales as buffers."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("qweight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scales", scale.bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.qweight * self.scales).to(x.dtype).T


def with_packed_layer() -> tuple[PreTrainedModel, Packed]:
    model = tiny_model("llama", **SIZES).bfloat16()
    packed = Packed(model.model.layers[1].mlp.up_proj.weight.detach().float())
    model.model.layers[1].mlp.up_proj = packed
    model.is_quantized = True
    return model, packed


def test_scales_beside_packed_weights_keep_their_type():
    model, packed = with_packed_layer()
    linear.hold(model, "float32")
    assert (packed.qweight.dtype, packed.scales.dtype) == (torch.int8, torch.bfloat16)
    others = [p.dtype for name, p in model.named_parameters()]
    assert set(others) == {torch.float32}
    loader.blocks.compute_by_kernels(model)
    assert "forward" in vars(model.model.layers[0])
    assert "forward" not in vars(model.model.layers[1])  # a block that the kernels do not know
    loader.blocks.run_trial(model)


@pytest.mark.parametrize("part", ["qweight", "scales"])
def test_a_fingerprint_sees_what_is_packed_in_buffers(part):
    model, packed = with_packed_layer()
    before = fingerprint.of_weights(model)
    assert before == fingerprint.of_weights(with_packed_layer()[0])
    getattr(packed, part).view(torch.int8)[:] += 1
    assert fingerprint.of_weights(model) != before


# Refused


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """Distributions that are there, to be added to."""
    there: set[str] = set()
    monkeypatch.setattr(quantized, "_installed", there.__contains__)
    return there


def test_missing_packages_are_named_in_one_line(folder, installed):
    configure(folder, GPTQ)
    with pytest.raises(ModelError) as caught:
        load(folder)
    said = "the weights of tiny-llama are quantized (gptq), and accelerate and gptqmodel and optimum are not installed"
    assert caught.value.message == said
    assert caught.value.hint == "pip install accelerate gptqmodel optimum, or use a .gguf file of the model"
    installed |= {"accelerate", "optimum"}
    with pytest.raises(ModelError, match=r"\(gptq\), and gptqmodel is not installed"):
        load(folder)


def test_forms_for_gpus_alone_are_not_asked_for_packages_on_a_cpu(folder, installed):
    configure(folder, {"quant_method": "fbgemm_fp8"})
    with pytest.raises(ModelError, match=r"quantized \(fbgemm_fp8\), which needs a GPU"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantize": "int8"}, r"--quantize int8 with weights that were published quantized \(gptq\)"),
        ({"dtype": "bfloat16"}, "what is not quantized is float32 on a CPU"),
    ],
)
def test_options_that_do_not_go_with_published_weights(options, words, folder):
    configure(folder, GPTQ)
    with pytest.raises(UsageError, match=words) as caught:
        load(folder, **options)
    assert caught.value.hint


@needs("compressed_tensors")
def test_packed_weights_larger_than_memory_are_refused_before_reading(folder, monkeypatch):
    compressed_int4(folder)
    machine = dataclasses.replace(hardware.probe(), memory_free=300_000)
    monkeypatch.setattr(hardware, "probe", lambda: machine)
    with pytest.raises(MemoryBudgetError, match=r"as compressed-tensors, and 293\.0 KiB of memory are free"):
        load(folder)


def test_making_them_takes_the_extra(original, installed):
    for form, package in (("int8", "torchao"), ("int4", "bitsandbytes")):
        with pytest.raises(ModelError) as caught:
            reading.model_from(
                original, "tiny-llama", tiny_config("llama", **SIZES), torch.device("cuda"), torch.bfloat16,
                ModelOptions(quantize=form), lambda _: None,
            )  # fmt: skip
        assert f"--quantize {form} on a GPU takes accelerate and {package}, not installed here" in caught.value.message
        assert caught.value.hint == "pip install 'magicpig-cli[quant]'"


def test_a_full_gpu_is_told_with_sizes(original, monkeypatch):
    def full(*_args, **_more):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(reading.AutoModelForCausalLM, "from_pretrained", full)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 20, 8 << 30))
    with pytest.raises(MemoryBudgetError, match=r"of the GPU's 8\.0 GiB, 1\.0 MiB are free"):
        load(original)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (GPTQ, 4),
        ({"quant_method": "awq", "w_bit": 3, "q_group_size": 64}, 3),
        ({"load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "quanto", "weights": "int4"}, 4),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 8),
        (
            {
                "quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8},
                "config_groups": {"a": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}},
            },
            4,
        ),
        ({"quant_method": "something new"}, 16),
    ],
)  # fmt: skip
def test_bits_that_a_config_names(quantization, bits):
    assert published.bits_of(quantization) == bits
    assert published.method_of(tiny_config("llama", quantization_config=quantization)) is not None


# Made on a GPU


MADE = [
    pytest.param("int8", marks=needs("torchao")),
    pytest.param("int4", marks=needs("bitsandbytes")),
]


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """What is made on a GPU is made on this CPU: the libraries can do both."""
    monkeypatch.setattr(reading, "_is_made", lambda options, _device: options.quantize in ("int8", "int4"))


def made(folder: Path, form: str, *, dummy: bool = False) -> PreTrainedModel:
    config, options = loader.load_config(ModelOptions(str(folder))), ModelOptions(str(folder), quantize=form)
    if dummy:
        return reading.random_model(config, CPU, torch.bfloat16, options, lambda _: None)
    return reading.model_from(folder, "tiny-llama", config, CPU, torch.bfloat16, options, lambda _: None)


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("form", MADE)
def test_made_weights_take_what_is_planned(form, dummy, original, as_on_a_gpu):
    model = made(original, form, dummy=dummy)
    shape = shape_from_config(model.config)
    described = 200 * 3 * 7 if form == "int4" else 0  # bitsandbytes keeps a table and a description per layer
    assert 0 <= held(model) - total(on_device(shape, form)) <= described
    assert quantized.is_quantized(model)
    assert {model.lm_head.weight.dtype, model.model.embed_tokens.weight.dtype} == {torch.bfloat16}
    with torch.inference_mode():
        loader.blocks.run_trial(model)


@pytest.mark.parametrize("form", MADE)
def test_made_weights_multiply_like_the_ones_they_are_made_of(form, original, as_on_a_gpu):
    layer = made(original, form).get_submodule("model.layers.2.self_attn.q_proj")
    weight = load_file(original / "model.safetensors")["model.layers.2.self_attn.q_proj.weight"]
    with torch.inference_mode():
        assert relative(layer, weight, torch.bfloat16) < {"int8": 0.02, "int4": 0.15}[form]
