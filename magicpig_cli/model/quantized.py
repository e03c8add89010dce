"""Weights that transformers' quantizers hold: made from plain ones on a GPU (`--quantize`), or published so.

Which package makes which form, and why: docs/decisions/019. Our own int8 and int4 on a CPU are `stored.py` and have
nothing to do with this. Packages are known by their distributions; nothing of them is imported before it is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from magicpig_cli.errors import ModelError
from magicpig_cli.model.published import method_of

EXTRA = "pip install 'magicpig-cli[quant]'"
INT4_BLOCK = 64  # values that share a scale; bitsandbytes' own choice
_QUANTIZED = "is_quantized"  # transformers' own mark on a model
_PLACING = "accelerate"  # transformers puts tensors on a device while it reads them with this one
_MADE_BY = {"int8": "torchao", "int4": "bitsandbytes"}
# transformers' name of a published form → distributions that read it, beside accelerate. A form that is not here needs
# none, or transformers says so itself.
_READ_BY = {
    "aqlm": ("aqlm",), "auto-round": ("auto-round",), "awq": ("gptqmodel",), "bitsandbytes": ("bitsandbytes",),
    "compressed-tensors": ("compressed-tensors",), "eetq": ("kernels",), "fbgemm_fp8": ("fbgemm-gpu",),
    "gptq": ("gptqmodel", "optimum"), "hqq": ("hqq",), "mxfp4": ("kernels",), "quanto": ("optimum-quanto",),
    "quark": ("amd-quark",), "spqr": ("spqr-quant",), "torchao": ("torchao",), "vptq": ("vptq",),
}  # fmt: skip
_GPU_ONLY = frozenset({"eetq", "fbgemm_fp8", "fp_quant", "higgs", "hqq", "nvfp4", "spqr", "vptq"})


def check_published(config: PretrainedConfig, name: str, device: torch.device) -> None:
    """Raise ModelError, in one line, where the weights of `name` cannot be read here as they were published."""
    method = method_of(config)
    if method is None:
        return
    what = f"the weights of {name} are quantized ({method})"
    if method in _GPU_ONLY and device.type == "cpu":
        raise ModelError(
            f"{what}, which needs a GPU", hint="use --device cuda, the original model, or a .gguf file of it"
        )
    lacking = _lacking((_PLACING, *_READ_BY.get(method, ())))
    if lacking:
        raise ModelError(
            f"{what}, and {' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed",
            hint=f"pip install {' '.join(lacking)}, or use a .gguf file of the model",
        )


def check_made(form: str) -> None:
    """Raise ModelError where the packages that make `int8` or `int4` weights on a GPU are not installed."""
    if lacking := _lacking((_PLACING, _MADE_BY[form])):
        raise ModelError(
            f"--quantize {form} on a GPU takes {' and '.join(lacking)}, not installed here", hint=EXTRA
        )  # fmt: skip


def _lacking(distributions: tuple[str, ...]) -> list[str]:
    return [name for name in distributions if not _installed(name)]


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def config_of(form: str) -> Any:
    """What transformers is to make of bfloat16 weights while it reads them. `check_made` has passed."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if form == "int8":
        return TorchAoConfig(_int8())
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )


def _int8() -> Any:
    torchao = importlib.import_module("torchao.quantization")
    return torchao.Int8WeightOnlyConfig(set_inductor_config=False)  # one scale per row; nothing is compiled here


def make(model: PreTrainedModel, form: str) -> None:
    """The same of a model that is there already, in place: for random weights, which transformers cannot read.

    The same layers as when weights are read: all nn.Linear but the output layer.
    """
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not output]
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if form == "int8":
            _to_int8(layer)
        else:
            model.set_submodule(name, _four_bits(layer))
    setattr(model, _QUANTIZED, True)


def _to_int8(layer: nn.Linear) -> None:
    importlib.import_module("torchao.quantization").quantize_(layer, _int8())


def _four_bits(layer: nn.Linear) -> nn.Module:
    layers: Any = importlib.import_module("bitsandbytes.nn")
    made: nn.Module = layers.Linear4bit(
        layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=torch.bfloat16,
        quant_type="nf4", device="meta",
    )  # fmt: skip
    made.weight = layers.Params4bit(
        layer.weight.data, requires_grad=False, quant_type="nf4", blocksize=INT4_BLOCK, compress_statistics=False
    )
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.data, requires_grad=False)
    return made.to(layer.weight.device)  # which is when it quantizes


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether quantizers hold some of the weights."""
    return bool(getattr(model, _QUANTIZED, False))


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not simply numbers of 16 bits or more, but what a quantizer made of some."""
    return hasattr(tensor, "__tensor_flatten__") or not tensor.is_floating_point() or tensor.element_size() < 2


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and plain tensor of everything that holds weights: packed tensors by their parts, scales included."""
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            yield from _parts(name, value)


def _parts(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if not hasattr(value, "__tensor_flatten__"):
        yield name, value
        return
    inner, _ = value.__tensor_flatten__()
    for part in inner:
        yield from _parts(f"{name}.{part}", getattr(value, part))
