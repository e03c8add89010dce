"""Values that cannot be meant, refused before anything is chosen."""

from __future__ import annotations

from magicpig_cli.config import (
    DEFAULT_BITS,
    DEFAULT_BUDGET,
    DEFAULT_K,
    DEFAULT_L,
    DEFAULT_LOCAL,
    DEFAULT_SINK,
    MAX_BITS,
    MAX_K,
    MAX_L,
    MAX_SEED,
    SAMPLERS,
    AttentionOptions,
    ModelOptions,
    Settings,
)
from magicpig_cli.errors import ContextError, ModelError, UsageError
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.published import refuse_dtype, refuse_quantize
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner.plan import Plan
from magicpig_cli.units import MAX_SIZE


def check_device(hardware: Hardware, device: str) -> None:
    """Raise ModelError where `cuda` or `cuda:N` is no GPU of this machine."""
    if not device.startswith("cuda") or hardware.gpu_of(device) is not None:
        return
    there = ", ".join(f"cuda:{gpu.index} is {gpu.name}" for gpu in hardware.gpus)
    raise ModelError(
        f"--device {device}: there is no such GPU" + (f"; {there}" if there else " here"),
        hint="use --device auto" + ("" if there else ", or see `magicpig doctor`"),
    )


def check_request(shape: ModelShape, settings: Settings, *, on_gpu: bool) -> None:
    """Raise UsageError for values outside their range, ContextError for a context longer than the model's."""
    attention, model = settings.attention, settings.model
    _check_choice("--attention", attention.mode, ("auto", *SAMPLERS, "exact"))
    _check_choice("--kv-dtype", attention.kv_dtype, ("auto", "float32", "bfloat16", "int8"))
    _check_choice("--signatures", attention.signatures or "auto", ("auto", "host", "device"))
    _check_choice("--quantize", model.quantize, ("auto", "none", "int8", "int4"))
    _check_tables(attention)
    check_signatures(attention)
    _check_layers(attention, shape)
    if attention.sink is not None and attention.sink < 0:
        raise UsageError(f"--sink {attention.sink} is less than 0", hint=f"the default is --sink {DEFAULT_SINK}")
    if attention.local is not None and attention.local < 1:
        raise UsageError(f"--local {attention.local} is less than 1", hint=f"the default is --local {DEFAULT_LOCAL}")
    if settings.threads is not None and settings.threads < 1:
        raise UsageError(
            f"--threads {settings.threads} is less than 1", hint="leave it out to use what this machine gives"
        )
    _check_weights(shape, model, on_gpu=on_gpu)
    _check_context(shape, settings)


def _check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            f"{option} {value} is unknown", hint=f"use {', '.join(allowed[:-1])} or {allowed[-1]}"
        )  # fmt: skip


def _check_weights(shape: ModelShape, model: ModelOptions, *, on_gpu: bool) -> None:
    method = None if shape.published is None else shape.published.method
    refuse_quantize(method, model.quantize)
    if method is not None:
        refuse_dtype(method, model.dtype, on_gpu=on_gpu)
    elif on_gpu and model.quantize in ("int8", "int4"):
        refuse_dtype(model.quantize, model.dtype, on_gpu=True)


def _check_tables(attention: AttentionOptions) -> None:
    if attention.K is not None and not 1 <= attention.K <= MAX_K:
        raise UsageError(f"-K {attention.K} is not between 1 and {MAX_K}", hint=f"the default is -K {DEFAULT_K}")
    if attention.L is not None and not 2 <= attention.L <= MAX_L:
        why = "a key is sampled if two tables agree" if attention.L < 2 else "sampling weights are exact up to there"
        raise UsageError(
            f"-L {attention.L} is not between 2 and {MAX_L:,}: {why}", hint=f"the default is -L {DEFAULT_L}"
        )
    if not 0 <= attention.hash_seed <= MAX_SEED:
        raise UsageError(f"--hash-seed {attention.hash_seed} is not between 0 and {MAX_SEED}", hint="--hash-seed 0")


def check_signatures(attention: AttentionOptions) -> None:
    """Raise UsageError for options of rabitq outside their range."""
    if attention.budget is not None and not 0 < attention.budget <= 1:
        raise UsageError(
            f"--budget {attention.budget:g} is no share of the keys: want above 0, up to 1",
            hint=f"the default is --budget {DEFAULT_BUDGET}",
        )
    if attention.tail is not None and not 0 <= attention.tail <= 1:
        raise UsageError(f"--tail {attention.tail:g} is not between 0 and 1", hint="leave it out, or --tail 0.1")
    if attention.bits is not None and (attention.bits % 32 or not 32 <= attention.bits <= MAX_BITS):
        raise UsageError(
            f"--bits {attention.bits} is not a multiple of 32 up to {MAX_BITS}",
            hint=f"the default is --bits {DEFAULT_BITS}",
        )
    if attention.target_error is not None and not 0 < attention.target_error < float("inf"):
        raise UsageError(f"--target-error {attention.target_error:g} is not above 0", hint="--target-error 0.05")


def _check_layers(attention: AttentionOptions, shape: ModelShape) -> None:
    if missing := [layer for layer in attention.dense_layers or () if not 0 <= layer < shape.layers]:
        raise UsageError(
            f"--dense-layers names layer {', '.join(map(str, missing))}; this model has layers 0 to {shape.layers - 1}",
            hint="--dense-layers auto",
        )


def _check_context(shape: ModelShape, settings: Settings) -> None:
    asked = settings.context
    if asked is None:
        return
    if asked < 1:
        raise UsageError(f"a context of {asked:,} tokens holds nothing", hint="write it like -c 96k, 98304 or auto")
    if asked > MAX_SIZE:
        raise UsageError(f"a context of more than {MAX_SIZE:,} tokens", hint="write it like -c 96k, 98304 or auto")
    if asked > shape.context and not settings.allow_extrapolation:
        raise ContextError(
            f"a context of {asked:,} tokens was asked for, but this model was made for {shape.context:,}",
            hint=f"-c {shape.context}, or --allow-extrapolation to go beyond what it was trained for",
        )


def check_window(draft: Plan) -> None:
    """Refuse a window longer than the context, of which nothing would ever leave. The default one is always fine."""
    window = draft.sink + draft.local + draft.flush
    if window > max(draft.context, DEFAULT_SINK + DEFAULT_LOCAL + draft.flush):
        raise UsageError(
            f"--sink {draft.sink} and --local {draft.local} with {draft.flush} rows between are a window of "
            f"{window:,} tokens, longer than the context of {draft.context:,}",
            hint=f"the defaults are --sink {DEFAULT_SINK} --local {DEFAULT_LOCAL}",
        )
