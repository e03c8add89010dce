"""Weights from a folder in transformers' own layout onto their device, or random ones: all there, whole, and it fits.

Plain weights are read into host memory and go on from there. What quantizers hold is put on the device tensor by
tensor, made int8 or int4 there if that was asked for, so that a GPU never holds more than the quantized model and what
is just being read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from magicpig_cli import hardware
from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import MemoryBudgetError, ModelError
from magicpig_cli.events import LoadProgress
from magicpig_cli.model import (
    hook,  # noqa: F401  registers the attention function
    hub,
    published,
    quantized,
    sizes,
    weights,
)
from magicpig_cli.model.progress import Report, explaining, forwarded
from magicpig_cli.units import format_bytes

_DUMMY_SEED = 0


def model_from(
    folder: Path, name: str, config: PretrainedConfig, device: torch.device, dtype: torch.dtype,
    options: ModelOptions, report: Report,
) -> PreTrainedModel:  # fmt: skip
    """The model whose weights lie in `folder`, what is plain of it as `dtype`.

    Raises UsageError, ModelError or MemoryBudgetError.
    """
    published.refuse_quantize(published.method_of(config), options.quantize)
    quantized.check_published(config, name, device)
    made = quantized.config_of(options.quantize) if _is_made(options, device) else None
    placed = made is not None or published.method_of(config) is not None
    weights.check(folder)
    _check_memory(folder, name, config, device, dtype, placed=placed)
    more: dict[str, Any] = {"device_map": {"": _numbered(device)}} if placed else {}
    if made is not None:
        more["quantization_config"] = made
    try:
        with explaining(f"the weights of {name}"), forwarded("loading weights", report):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation="magicpig",
                trust_remote_code=options.trust_remote_code, local_files_only=hub.is_offline(options),
                output_loading_info=True, ignore_mismatched_sizes=True, **more,
            )  # fmt: skip
        model, info = loaded
        _refuse_incomplete(name, info)
        if not placed:
            model.to(device)
        if made is not None:
            del model.config.quantization_config  # the config goes on to say what was published
    except torch.OutOfMemoryError as problem:
        raise _too_large(name, device, published.stored_bytes(folder)) from problem
    return model  # type: ignore[no-any-return]


def _numbered(device: torch.device) -> torch.device:
    """`cuda` as `cuda:0`: not every quantizer takes one without a number."""
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)


def _is_made(options: ModelOptions, device: torch.device) -> bool:
    """Whether quantized weights are made on a GPU. Raises ModelError where what makes them is not installed."""
    if options.quantize in ("auto", "none") or device.type == "cpu":
        return False
    quantized.check_made(options.quantize)
    return True


def _refuse_incomplete(name: str, info: dict[str, Any]) -> None:
    """Weights that transformers would silently replace by random ones."""
    missing = sorted(info["missing_keys"])
    mismatched = sorted(entry[0] if isinstance(entry, tuple) else entry for entry in info["mismatched_keys"])
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} weights that its config asks for, the first is {missing[0]}",
            hint="config.json and weights belong to different models, or the download is incomplete",
        )
    if mismatched:
        raise ModelError(
            f"{len(mismatched)} weights of {name} have other shapes than its config says, the first is {mismatched[0]}",
            hint="config.json and weights belong to different models",
        )


def _check_memory(
    folder: Path, name: str, config: PretrainedConfig, device: torch.device, dtype: torch.dtype, *, placed: bool
) -> None:
    """Refuse before the kernel's out-of-memory killer does: on the way to a GPU plain weights pass through host memory.

    Before int8 or int4 on a CPU they are read as `dtype`, which is the peak; experts there become float32 after that.
    """
    on_cpu, expected = device.type == "cpu", published.estimated(config)
    if placed and not on_cpu:
        return
    if expected is not None:
        need, form = published.counted(expected, folder).host_bytes, expected.method
    else:
        widened = sizes.expert_params(config) * (torch.float32.itemsize - dtype.itemsize) if on_cpu else 0
        need, form = weights.count_values(folder) * dtype.itemsize + widened, str(dtype).removeprefix("torch.")
    free = hardware.probe().memory_free
    if need > free:
        raise MemoryBudgetError(
            f"the weights of {name} take {format_bytes(need)} as {form}, and {format_bytes(free)} of memory are free",
            hint="--dtype bfloat16 halves float32, or use a smaller model",
        )


def _too_large(name: str, device: torch.device, size: int) -> MemoryBudgetError:
    free, total = torch.cuda.mem_get_info(device)
    return MemoryBudgetError(
        f"the weights of {name}, {format_bytes(size)} in their files, do not fit; of the GPU's {format_bytes(total)}, "
        f"{format_bytes(free)} are free now",
        hint="--quantize int8 or int4, a smaller model, or --device cpu",
    )


def random_model(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, options: ModelOptions, report: Report
) -> PreTrainedModel:
    """The same random weights for the same config, on the device at once; on a GPU made int8 or int4 if asked for."""
    made = _is_made(options, device)
    report(LoadProgress("drawing random weights"))
    with (
        explaining("the model's config"),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.device(device),
    ):
        torch.manual_seed(_DUMMY_SEED)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="magicpig", trust_remote_code=options.trust_remote_code
        )
    if made:
        quantized.make(model, options.quantize)
    return model
