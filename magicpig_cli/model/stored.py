"""Linear weights on a CPU, each held once, in 4, 2, 1 or 5/8 bytes per value, and multiplied by phase.

Decode is bound by reading weights, so it multiplies the stored type itself, by our kernels, which sum in float32.
Prefill is bound by arithmetic, so it multiplies float32 by torch: each block of rows is cast into one buffer that all
layers share. The phase decides, never the number of rows: a batch neighbour must not change the kernel that a sequence
sees (DESIGN.md, "Determinism contract"). Measured in docs/decisions/005 and 020. Which layers are held so: `linear.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from magicpig_cli import kernels
from magicpig_cli.cache.store import as_array
from magicpig_cli.kernels.memory import Arena, kept_array

Form = Literal["float32", "bfloat16", "int8", "int4"]

_FORM: dict[torch.dtype, Form] = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.uint8: "int4",
}  # fmt: skip
BUFFER_VALUES = 1 << 22  # float32 values that prefill casts at a time: 16 MiB
TELLING_ROWS = 16  # of a weight, by which it is known whether int4 gives it back
GIVEN_BACK = 0.02  # relative error up to which it does: grids are kept within 0.05 steps (020), which is below 1.5%


class Products:
    """What the stored layers of one model share: the phase of the forward that is running, the cast buffer of prefill,
    and in decode the results of layers that are given the same input one after the other (query, key and value)."""

    def __init__(self) -> None:
        self.prefill = False
        self._buffer: torch.Tensor | None = None  # made by the first prefill, then kept: its page faults are paid once
        self._input: torch.Tensor | None = None  # of the last layer in decode; kept, so that no other tensor is it
        self._waiting: dict[StoredLinear, torch.Tensor] = {}  # its products that nobody has taken yet

    def as_float32(self, weight: torch.Tensor, scale: torch.Tensor | None, inner: int) -> torch.Tensor:
        """A weight [n, K = inner] as float32, int8 without its scale; valid until the next call."""
        size = len(weight) * inner
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.from_numpy(kept_array((max(size, BUFFER_VALUES),), np.float32))
        room = self._buffer[:size].view(-1, inner)
        if weight.dtype != torch.uint8 or scale is None:
            return room.copy_(weight)
        kernels.widen_int4(as_array(weight), as_array(scale), as_array(room), threads=torch.get_num_threads())
        return room

    def few(self, layer: StoredLinear, x: torch.Tensor) -> torch.Tensor:
        """x·Wᵀ [M, N] for x [..., K], multiplied in one call with what goes to the layer's companions."""
        if x is not self._input or layer not in self._waiting:
            rows = x.reshape(-1, x.shape[-1])
            done = kernels.multiply(as_array(rows.contiguous()), layer.product_weights, threads=torch.get_num_threads())
            parts = torch.split(torch.from_numpy(done), [len(rows) * n for n in layer.product_weights.outer])
            self._input = x
            self._waiting = {other: part.view(len(rows), -1) for other, part in zip(layer.together, parts, strict=True)}
        return self._waiting.pop(layer)

    def forget(self) -> None:
        """At the end of a forward: what nobody has taken is not kept."""
        self._input, self._waiting = None, {}


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight [N, K]: as it is (scale None), or int8 with scale bfloat16 [N], value = integer · scale of its row, or
    int4, uint8 [N, K/2] with scale and minimum of each group of 32, float16 [N, K/32, 2] (`kernels.Weights`)."""

    weight: nn.Parameter
    scale: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


class Room:
    """Where the weights of a model are put: one behind the other on huge pages, rounded through one buffer."""

    def __init__(self) -> None:
        self._arena = Arena()
        self._buffer: torch.Tensor | None = None

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose contents are not defined. Raises MemoryError."""
        return torch.from_numpy(self._arena.array((*shape, dtype.itemsize), np.uint8)).view(dtype).squeeze(-1)

    def buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor to compute in, until the next call."""
        size = math.prod(shape)
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(max(size, BUFFER_VALUES))
        return self._buffer[:size].view(shape)


def stored(weight: torch.Tensor, form: Form, room: Room | None = None) -> Stored:
    """A copy of a float weight [N, K], rounded to `form`, in `room` or memory of its own.

    int8: symmetric per row, few rows at a time. What int4 cannot take, K that is no multiple of 32 or numbers beyond
    float16, becomes int8.
    """
    room, shape = room or Room(), tuple(weight.shape)
    if form == "int4" and _fits_int4(weight):
        return _stored_int4(weight, room)
    if form not in ("int8", "int4"):
        kept = room.tensor(shape, getattr(torch, form)).copy_(weight.detach())
        return Stored(nn.Parameter(kept, requires_grad=False), None)
    integers, scale = room.tensor(shape, torch.int8), room.tensor(shape[:1], torch.bfloat16)
    for rows in _blocks(*weight.shape):
        values = weight[rows].detach()
        # The scale is rounded first, because it is held as bfloat16: then it adds no error of its own.
        least, most = torch.aminmax(values, dim=1)
        scale[rows] = (torch.maximum(most, -least).float() / 127).clamp_min(torch.finfo(torch.float32).tiny)
        scaled = torch.div(values, scale[rows].float()[:, None], out=room.buffer(tuple(values.shape)))
        integers[rows] = scaled.round_().clamp_(-127, 127)
    return Stored(nn.Parameter(integers, requires_grad=False), scale)


def int4_gives_back(weight: torch.Tensor) -> bool:
    """Whether int4 holds a weight [N, K] as it is, factors rounded: what a 4-bit file has does, other values err by 8%.

    The first rows tell: a file stores a weight in one type.
    """
    rows, inner = weight[:TELLING_ROWS].shape
    if inner % kernels.INT4_GROUP:
        return False
    values = as_array(weight[:rows].detach().float().contiguous())
    codes, back = np.empty((rows, inner // 2), np.uint8), np.empty_like(values)
    factors = np.empty((rows, inner // kernels.INT4_GROUP, 2), np.float16)
    kernels.round_int4(values, codes, factors, threads=1)
    kernels.widen_int4(codes, factors, back, threads=1)
    return bool(np.linalg.norm(back - values) <= GIVEN_BACK * np.linalg.norm(values))  # not true of what is no number


def _fits_int4(weight: torch.Tensor) -> bool:
    """Whether a weight [N, K] is made of whole groups and of numbers that float16 has."""
    if weight.shape[1] % kernels.INT4_GROUP or not weight.numel():
        return False
    smallest, largest = torch.aminmax(weight.detach())
    bound = torch.finfo(torch.float16).max
    return bool(smallest >= -bound) and bool(largest <= bound)  # neither is true of what is no number


def _stored_int4(weight: torch.Tensor, room: Room) -> Stored:
    count, inner = weight.shape
    codes = room.tensor((count, inner // 2), torch.uint8)
    factors = room.tensor((count, inner // kernels.INT4_GROUP, 2), torch.float16)
    for rows in _blocks(count, inner):
        values = room.buffer(tuple(weight[rows].shape)).copy_(weight[rows].detach())
        kernels.round_int4(
            as_array(values), as_array(codes[rows]), as_array(factors[rows]), threads=torch.get_num_threads()
        )
    return Stored(nn.Parameter(codes, requires_grad=False), factors)


def _blocks(count: int, inner: int) -> list[slice]:
    """Rows of [N, K] in steps of at most BUFFER_VALUES values."""
    step = max(1, BUFFER_VALUES // inner)
    return [slice(start, start + step) for start in range(0, count, step)]


class Holder(nn.Module):
    """A module over a stored weight; the parameter keeps the name that it had."""

    scale: torch.Tensor | None

    def __init__(self, held: Stored) -> None:
        super().__init__()
        self.weight = held.weight
        self.register_buffer("scale", held.scale, persistent=False)

    def held(self) -> Iterator[torch.Tensor]:
        """What must stay in the type it has."""
        yield self.weight
        if self.scale is not None:
            yield self.scale


class StoredLinear(Holder):
    """x float32 [..., K] → x·Wᵀ + b, float32 [..., N].

    few_rows: takes the product of decode in both phases. That is the output layer, which sees the last token of a
    chunk only: casting it would cost more than it multiplies (113 MB for one row of the demo model).
    """

    together: tuple[StoredLinear, ...]  # it and those that are given the same input
    product_weights: kernels.Weights  # of all of them

    def __init__(self, held: Stored, bias: torch.Tensor | None, products: Products, *, few_rows: bool) -> None:
        super().__init__(held)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        self._products = products
        self._few_rows = few_rows
        multiply_together([self])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        many = self._products.prefill and not self._few_rows
        out = self._many(x.reshape(-1, x.shape[-1])) if many else self._products.few(self, x)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def _many(self, x: torch.Tensor) -> torch.Tensor:
        """x·Wᵀ in float32, weights cast block by block."""
        if self.weight.dtype == torch.float32:
            return nn.functional.linear(x, self.weight)
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for rows in _blocks(len(self.weight), x.shape[1]):
            scale = None if self.scale is None else self.scale[rows]
            torch.mm(x, self._products.as_float32(self.weight[rows], scale, x.shape[1]).t(), out=out[:, rows])
        return out if self.scale is None or self.weight.dtype != torch.int8 else out.mul_(self.scale)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [start, stop) of the weight of a linear layer."""

    layer: StoredLinear
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def weights_of(parts: Sequence[Part]) -> kernels.Weights:
    """The kernels' view of weights of one form that are multiplied with the same input."""
    form = _FORM[parts[0].layer.weight.dtype]
    weights = [as_array(part.layer.weight.detach()[part.start : part.stop]) for part in parts]
    scales = [
        as_array(part.layer.scale[part.start : part.stop]) for part in parts if part.layer.scale is not None
    ]  # fmt: skip
    return kernels.Weights(form, weights, scales)


def multiply_together(layers: Sequence[StoredLinear]) -> None:
    """Layers of one form that a forward gives the same tensor: in decode the first one called multiplies for all."""
    weights = weights_of([Part(layer, 0, len(layer.weight)) for layer in layers])
    for layer in layers:
        layer.together, layer.product_weights = tuple(layers), weights


class StoredEmbedding(Holder):
    """ids [...] → rows of the stored weight as float32 [..., K], times a factor (Gemma 3 has one)."""

    def __init__(self, held: Stored, factor: float) -> None:
        super().__init__(held)
        self._factor = factor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight[ids].float()
        if self.scale is not None:
            rows *= self.scale[ids].float().unsqueeze(-1)
        return rows if self._factor == 1 else rows.mul_(self._factor)
