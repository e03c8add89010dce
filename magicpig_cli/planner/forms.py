"""Weights by the form in which they are held: what they take where, and what a decode step moves of them on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from magicpig_cli.config import ModelOptions
from magicpig_cli.kernels import INT4_GROUP
from magicpig_cli.model.as_stored import quantize_meant
from magicpig_cli.model.shape import ModelShape, read_dtype

WeightType = str  # float32, bfloat16, int8, int4, or the method by which they were published quantized

WEIGHT_BYTES: dict[WeightType, float] = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}
HOST_BYTES = WEIGHT_BYTES | {"int4": 0.5 + 4 / INT4_GROUP}  # a group shares a scale and a minimum, both float16
ENDS: dict[WeightType, WeightType] = {"int4": "int8"}  # form of embedding and output layer there, where it is another
PLAIN: WeightType = "bfloat16"  # of what is not quantized, on a GPU
# On a GPU only the linear layers of the blocks are quantized. int8 (torchao) has a float32 scale and an int8 zero point
# per row; int4 (bitsandbytes, NF4) a float32 scale for every 64 values. docs/decisions/019.
INT8_ROW_BYTES = 5
INT8_SCALE_BYTES = 2  # of a row on a CPU
INT4_BLOCK, INT4_BLOCK_BYTES = 64, 4
# torchao multiplies int8 by casting all of a weight to bfloat16 first: a byte is read, two are written and read again.
INT8_MOVED_BYTES = 5


@dataclass(frozen=True, slots=True)
class Bytes:
    """One addend."""

    bytes: int
    formula: str
    packed: bool = False  # to be taken apart before it is multiplied


def total(parts: Iterable[Bytes]) -> int:
    """Bytes of all parts."""
    return sum(part.bytes for part in parts)


def written(parts: Iterable[Bytes]) -> str:
    """Formulas as a sum."""
    return " + ".join(part.formula for part in parts if part.bytes)


def form_of(shape: ModelShape, model: ModelOptions, *, on_gpu: bool) -> WeightType:
    """In which form linear layers hold their weights."""
    if shape.published is not None:
        return shape.published.method
    quantize = quantize_meant(model, shape.in_file, on_gpu=on_gpu)
    if quantize != "none":
        return quantize
    return read_dtype(model.dtype, shape.dtype, on_gpu=on_gpu)


def on_host(shape: ModelShape, form: WeightType) -> tuple[Bytes, ...]:
    """Weights on a CPU. Experts of a mixture are no linear layers of their own and stay float32."""
    if shape.published is not None:
        wide = shape.published.wide_bytes
        return (*_published(shape), Bytes(wide, f"{wide:,} B more for what becomes float32"))
    parts = [
        Bytes(round(values * HOST_BYTES[own]), f"{values:,} values as {own}")
        for own, values in held_as(shape, form, shape.params - shape.expert_params).items()
    ]
    if form in ("int8", "int4"):
        extra = shape.int8_extra_bytes - (INT8_SCALE_BYTES * shape.int4_rows if form == "int4" else 0)
        parts.append(Bytes(extra, f"{extra:,} B of scales and of what int8 cannot take"))
    experts = shape.expert_params
    return (*parts, Bytes(round(experts * WEIGHT_BYTES["float32"]), f"{experts:,} of experts as float32"))


def held_as(shape: ModelShape, form: WeightType, values: int) -> dict[WeightType, int]:
    """So many values, linear layers of all blocks among them, by the form in which a CPU holds them."""
    if form != "int4":
        return {form: values}
    return {"int4": shape.int4_params, ENDS[form]: values - shape.int4_params}


def on_device(shape: ModelShape, form: WeightType) -> tuple[Bytes, ...]:
    """Weights on a GPU."""
    if shape.published is not None:
        return _published(shape)
    if form not in ("int8", "int4"):
        return (_plain(shape.params, form, "values"),)
    return (*_linear_layers(shape, form), _plain(shape.params - shape.linear_params, PLAIN, "others"))


def moved(shape: ModelShape, form: WeightType, batch: int) -> tuple[Bytes, ...]:
    """What the products of one decode step of `batch` sequences move between a GPU and its memory."""
    if shape.published is not None:
        return (_moved_as_published(shape, batch),)
    if form not in ("int8", "int4"):
        return (_plain(shape.step_params(batch), form, "values"),)
    others = _plain(shape.step_params(batch) - shape.linear_params, PLAIN, "others")
    if form == "int4":
        return (*_linear_layers(shape, form), others)
    values = shape.linear_params
    cast = Bytes(values * INT8_MOVED_BYTES, f"{values:,} values × {INT8_MOVED_BYTES} B: int8 is cast to bfloat16 first")
    return (cast, others)


def is_cast_whole(shape: ModelShape, form: WeightType, *, on_gpu: bool) -> bool:
    """Whether a weight becomes plain as a whole, one after the other, where a prompt is read."""
    return shape.published is not None or (on_gpu and form in ("int8", "int4"))


def _plain(values: int, form: WeightType, what: str) -> Bytes:
    return Bytes(round(values * WEIGHT_BYTES[form]), f"{values:,} {what} as {form}")


def _linear_layers(shape: ModelShape, form: WeightType) -> Iterator[Bytes]:
    """The linear layers of all blocks as they are quantized on a GPU."""
    values, each = shape.linear_params, WEIGHT_BYTES[form]
    packed = form == "int4"
    yield Bytes(round(values * each), f"{values:,} values of linear layers × {each:g} B", packed)
    if form == "int8":
        rows = shape.linear_rows
        yield Bytes(rows * INT8_ROW_BYTES, f"{rows:,} rows × {INT8_ROW_BYTES} B for their scales")
    else:
        blocks = -(-values // INT4_BLOCK)
        yield Bytes(
            blocks * INT4_BLOCK_BYTES, f"{blocks:,} scales of {INT4_BLOCK} values × {INT4_BLOCK_BYTES} B", packed
        )


def _published(shape: ModelShape) -> tuple[Bytes, ...]:
    found = shape.published
    assert found is not None
    source = "in its files" if found.counted else "estimated from its config, the files are not here"
    return (Bytes(found.bytes, f"{found.bytes:,} B of {found.method} weights, {source}"),)


def _moved_as_published(shape: ModelShape, batch: int) -> Bytes:
    """All but the embedding that is only looked up in, and the experts that no token goes through."""
    found = shape.published
    assert found is not None
    read = found.bytes - shape.lookup_params * WEIGHT_BYTES[PLAIN]
    share = shape.step_params(batch) / max(1, shape.params - shape.lookup_params)
    return Bytes(round(read * share), f"{round(read * share):,} B of {found.method} weights", packed=True)
