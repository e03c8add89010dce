"""Weights that quantizers hold: published so, or made so while they are read. What takes a package that is not
installed is skipped; refusals and byte counts never are."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.model import loader, quantized
from tests.tiny import tiny_model

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


def answer(folder: Path, **options) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a prompt, and the logits of the first."""
    engine = Engine.load(
        Settings(ModelOptions(str(folder), **options), AttentionOptions("exact"), threads=1, context=256)
    )
    sequence = engine.new_sequence()
    first = next(logits for event in engine.runner.prefill(sequence, IDS) if (logits := event) is not None)
    return [], first


@pytest.mark.parametrize(("write", "method"), FORMS)
def test_a_published_form_runs_and_is_close_to_the_original(write, method, folder):
    write(folder)
    loaded = load(folder)
    print(loaded.model)
    print([(n, p.dtype, tuple(p.shape), type(p)) for n, p in loaded.model.named_parameters()][:14])
    print({n: b.dtype for n, b in loaded.model.named_buffers()})
