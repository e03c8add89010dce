"""Checkpoints whose weights were published quantized: what their config says of the form, and what they take.

Which forms there are is transformers' business (`quantization_config` in config.json, `model/quantized.py` has them
loaded). Here they are only counted: from the headers of the weight files where these are at hand, else from the bits
per weight that the config names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.errors import UsageError
from magicpig_cli.model import sizes, weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SCALES_BITS = 0.25  # of a weight, for its share of a 16-bit scale and zero point of 128; taken where nothing is counted
_WIDE_BITS = 16  # of what is not quantized, and of weights whose form says no number of bits
_BITS_KEYS = ("bits", "w_bit", "nbits", "num_bits", "weight_bits")
_NOT_WEIGHTS = ("input_activations", "output_activations", "kv_cache_scheme")  # have bits of their own
_BITS_OF_METHOD = {"fp8": 8, "fbgemm_fp8": 8, "mxfp8": 8, "eetq": 8, "mxfp4": 4, "nvfp4": 4, "bitnet": 2}


@dataclass(frozen=True, slots=True)
class Published:
    """Weights as they were published."""

    method: str  # transformers' quant_method: gptq, awq, compressed-tensors, bitsandbytes, fp8, …
    bytes: int  # of all tensors
    wide_bytes: int  # of them, values of 16 bits; they become float32 on a CPU
    counted: bool = False  # by the headers of the files; else estimated from the config

    @property
    def host_bytes(self) -> int:
        """What they take on a CPU."""
        return self.bytes + self.wide_bytes


def method_of(config: PretrainedConfig) -> str | None:
    """transformers' name of the form in which a checkpoint is quantized; None if it is not."""
    found = _quantization(config)
    if found is None:
        return None
    if found.get("load_in_4bit") or found.get("load_in_8bit"):  # old files do not name their method
        return "bitsandbytes"
    method = found.get("quant_method")
    return str(getattr(method, "value", method) or "unknown")


def estimated(config: PretrainedConfig) -> Published | None:
    """What the config lets expect; None for weights that are not quantized."""
    method = method_of(config)
    if method is None:
        return None
    bits = bits_of(_quantization(config) or {})
    narrow = sizes.linear_params(config) + sizes.expert_params(config)
    wide = (sizes.params(config) - narrow) * _WIDE_BITS // 8
    if bits >= _WIDE_BITS:
        wide += narrow * _WIDE_BITS // 8
        return Published(method, wide, wide)
    return Published(method, wide + round(narrow * (bits + SCALES_BITS) / 8), wide)


def counted(expected: Published, folder: Path) -> Published:
    """The same from the headers of the weight files in a folder; as it was where they are not all there."""
    names = weights.names_in(folder)
    if not names or not all(name.endswith(".safetensors") and (folder / name).is_file() for name in names):
        return expected
    weights.check(folder)
    found = weights.count_bytes(folder)
    return replace(
        expected, bytes=sum(found.values()), wide_bytes=found.get("BF16", 0) + found.get("F16", 0), counted=True
    )


def stored_bytes(folder: Path) -> int:
    """Bytes of all tensors in the weight files of a folder that `weights.check` has passed."""
    return sum(weights.count_bytes(folder).values())


def refuse_quantize(method: str | None, asked: str) -> None:
    """Raise UsageError for `--quantize` with weights that are quantized already."""
    if method is not None and asked not in ("auto", "none"):
        raise UsageError(
            f"--quantize {asked} with weights that were published quantized ({method})",
            hint="leave out --quantize, or use the original model",
        )


def refuse_dtype(method: str, asked: str, *, on_gpu: bool) -> None:
    """Raise UsageError for a `--dtype` that what is not quantized cannot have."""
    only = "bfloat16" if on_gpu else "float32"
    if asked not in ("auto", only):
        raise UsageError(
            f"--dtype {asked} with quantized weights ({method}): what is not quantized is {only} on a "
            f"{'GPU' if on_gpu else 'CPU'}",
            hint="leave out --dtype",
        )


def bits_of(quantization: Mapping[str, Any]) -> float:
    """Bits per weight that a `quantization_config` names, the most if there are several; 16 if it names none."""
    if quantization.get("load_in_4bit"):
        return 4
    if quantization.get("load_in_8bit"):
        return 8
    if named := list(_named_bits(quantization)):
        return max(named)
    return _BITS_OF_METHOD.get(str(quantization.get("quant_method")), _WIDE_BITS)


def _named_bits(entry: Any) -> Iterator[float]:
    """Numbers of bits anywhere in a config, but for those of activations; `int4` or `Int8WeightOnlyConfig` count."""
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        if key in _NOT_WEIGHTS:
            continue
        if key in _BITS_KEYS and isinstance(value, (int, float)) and 0 < value <= _WIDE_BITS:
            yield value
        elif key in ("weights", "_type") and isinstance(value, str):
            digits = [digit for digit in "248" if f"int{digit}" in value.lower() or f"float{digit}" in value.lower()]
            yield from map(float, digits)
        elif isinstance(value, Mapping):
            yield from _named_bits(value)


def _quantization(config: PretrainedConfig) -> Mapping[str, Any] | None:
    """The `quantization_config` of a config as a mapping; None if there is none."""
    found: Any = getattr(config, "quantization_config", None)
    if found is None:
        return None
    return found if isinstance(found, Mapping) else dict(found.to_dict())
