"""What to type where something does not fit: only what was planned with and does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from magicpig_cli.config import DEFAULT_LOCAL, DEFAULT_SINK, Settings
from magicpig_cli.errors import MagicpigError
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.as_stored import quantize_meant
from magicpig_cli.model.shape import ModelShape, read_dtype
from magicpig_cli.planner.plan import Plan
from magicpig_cli.units import format_bytes, format_count

WAYS = 3
ROUND_TOKENS = 1024  # contexts are named in whole multiples, where that leaves anything
ROUND_BYTES = 1 << 28
SHORTEST_CONTEXT = 256  # what is not worth naming

Fits = Callable[[Hardware, Settings, ModelShape], Plan]  # raises MagicpigError where the plan does not work
_Change = tuple[str, Callable[[Settings], Settings]]


def ways_out(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> str:
    """Three ways at most to a plan that works, as one line."""
    found = [
        text for text, changed in _changes(fits, hardware, shape, settings) if _works(fits, hardware, shape, changed)
    ]
    words = found[:WAYS]
    for way in (_more_memory, _larger_gpu, _smaller_model):
        if len(words) < WAYS and (text := way(fits, hardware, shape, settings)):
            words.append(text)
    return "; or ".join(words) if words else "a smaller model, or a machine with more memory"


def _works(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> bool:
    try:
        fits(hardware, settings, shape)
    except MagicpigError:
        return False
    return True


def _changes(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """(what to type, settings that it makes): a shorter context, one option, two of them, an option and a context."""
    shorter = _shorter(fits, hardware, shape, settings)
    if shorter is not None:
        yield f"-c {shorter}", replace(settings, context=shorter)
    options = list(_options(hardware, shape, settings))
    for text, change in options:
        yield text, change(settings)
    working = {text for text, change in options if _works(fits, hardware, shape, change(settings))}
    for (first, one), (second, other) in combinations(options, 2):
        if not working & {first, second} and first.split()[0] != second.split()[0]:
            yield f"{first} {second}", other(one(settings))
    if shorter is None:
        for text, change in options:
            changed = change(settings)
            if text not in working and (context := _shorter(fits, hardware, shape, changed)) is not None:
                yield f"{text} -c {context}", replace(changed, context=context)


def _shorter(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> int | None:
    """The longest context that fits with everything else as it is."""
    longest = settings.context or shape.context  # beyond the model's own only where that was allowed
    try:
        found = fits(hardware, replace(settings, context=None), replace(shape, context=longest)).context
    except MagicpigError:
        return None
    rounded = found // ROUND_TOKENS * ROUND_TOKENS or found
    return rounded if rounded >= SHORTEST_CONTEXT else None


def _options(hardware: Hardware, shape: ModelShape, settings: Settings) -> Iterator[_Change]:
    """Options that take less memory than what was asked for, the ones that cost least first."""
    attention, model = settings.attention, settings.model
    on_gpu = hardware.gpu_of(model.device) is not None
    quantize = quantize_meant(model, shape.in_file, on_gpu=on_gpu)
    plain = shape.published is None and quantize == "none"
    if plain and read_dtype(model.dtype, shape.dtype, on_gpu=on_gpu) == "float32":
        yield "--dtype bfloat16", lambda s: replace(s, model=replace(s.model, dtype="bfloat16"))
    if plain:
        yield "--quantize int8", lambda s: replace(s, model=replace(s.model, quantize="int8"))
    if on_gpu and shape.published is None and quantize != "int4":
        yield "--quantize int4", lambda s: replace(s, model=replace(s.model, quantize="int4"))
    if attention.K is not None or attention.L is not None:
        yield "-K 8 -L 75", lambda s: replace(s, attention=replace(s.attention, K=8, L=75))
    if attention.kv_dtype != "int8":
        yield "--kv-dtype int8", lambda s: replace(s, attention=replace(s.attention, kv_dtype="int8"))
    if attention.mode not in ("exact", "rabitq"):
        yield "--attention rabitq", lambda s: replace(s, attention=replace(s.attention, mode="rabitq"))
    if attention.mode != "exact":
        yield "--attention exact", lambda s: replace(s, attention=replace(s.attention, mode="exact"))
    if attention.local is not None or attention.sink is not None:
        yield (
            f"--sink {DEFAULT_SINK} --local {DEFAULT_LOCAL}",
            lambda s: replace(s, attention=replace(s.attention, sink=DEFAULT_SINK, local=DEFAULT_LOCAL)),
        )
    if not on_gpu and shape.published is None and quantize != "int4":
        yield "--quantize int4", lambda s: replace(s, model=replace(s.model, quantize="int4"))
    if on_gpu:
        yield "--device cpu", lambda s: replace(s, model=replace(s.model, device="cpu"))


def _more_memory(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> str | None:
    """How much more host memory would do, where that is what is missing."""
    enough = 1 << 50
    if not _works(fits, replace(hardware, memory_free=enough), shape, settings):
        return None
    low, high = hardware.memory_free, enough
    while high - low > ROUND_BYTES:
        middle = (low + high) // 2
        if _works(fits, replace(hardware, memory_free=middle), shape, settings):
            high = middle
        else:
            low = middle
    missing = -(-(high - hardware.memory_free) // ROUND_BYTES) * ROUND_BYTES
    return f"{format_bytes(missing)} more free memory"


def _larger_gpu(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> str | None:
    """How much GPU memory would do, where that is what is missing."""
    for size in range(1 << 30, 1 << 38, 1 << 30):
        larger = tuple(replace(gpu, total_bytes=size, free_bytes=size) for gpu in hardware.gpus)
        if larger and _works(fits, replace(hardware, gpus=larger), shape, settings):
            return f"a GPU with {format_bytes(size)} free"
    return None


def _smaller_model(fits: Fits, hardware: Hardware, shape: ModelShape, settings: Settings) -> str | None:
    """How many parameters a model like this one may have."""
    for share in (0.75, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05):
        smaller = shape.scaled(share)
        if _works(fits, hardware, smaller, settings):
            return f"a model like it of {format_count(smaller.params)} parameters"
    return None
