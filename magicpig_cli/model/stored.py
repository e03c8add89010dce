"""Linear weights on a CPU, each held once, in 2 or 1 bytes per value, and multiplied by phase.

Decode is bound by reading weights, so it multiplies the stored type itself (torch's bfloat16 or int8 product over
activations rounded to bfloat16). Prefill is bound by arithmetic, so it multiplies float32: each block of rows is cast
into one buffer that all layers share. The phase decides, never the number of rows: a batch neighbour must not change
the kernel that a sequence sees (DESIGN.md, "Determinism contract"). Outside the products all is float32.
Measured in docs/decisions/005. Which layers of a model are held so: `linear.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Form = Literal["bfloat16", "int8"]

BUFFER_VALUES = 1 << 22  # float32 values that prefill casts at a time: 16 MiB


@contextmanager
def own_products() -> Iterator[None]:
    """Inside, torch multiplies bfloat16 by its own code instead of oneDNN's, which it takes on CPUs with AVX-512.

    On one row that is half as fast (gate and up of the demo model: 249 µs where torch's own takes 135).
    """
    onednn = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = onednn


class Products:
    """What the stored layers of one model share: the phase of the forward that is running, and the cast buffer."""

    def __init__(self) -> None:
        self.prefill = False
        self._buffer: torch.Tensor | None = None  # made by the first prefill, then kept: its page faults are paid once

    def as_float32(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [n, K] as float32, valid until the next call."""
        size = weight.numel()
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(max(size, BUFFER_VALUES))
        return self._buffer[:size].view(weight.shape).copy_(weight)


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight [N, K]: bfloat16 (scale None), or int8 with scale bfloat16 [N]; value = integer · scale of its row."""

    weight: nn.Parameter
    scale: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.scale is None else self.scale.nbytes)


def stored(weight: torch.Tensor, form: Form) -> Stored:
    """Round a float weight [N, K] to `form`. int8: symmetric per row, through a float32 copy of few rows at a time."""
    if form == "bfloat16":
        return Stored(nn.Parameter(weight.to(torch.bfloat16), requires_grad=False), None)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(weight.shape[0], dtype=torch.bfloat16)
    for rows in _blocks(weight):
        values = weight[rows].float()
        # The scale is rounded first, because the product takes it as bfloat16: then it adds no error of its own.
        scale[rows] = (values.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        integers[rows] = (values / scale[rows].float()[:, None]).round_().clamp_(-127, 127)
    return Stored(nn.Parameter(integers, requires_grad=False), scale)


def _blocks(weight: torch.Tensor) -> list[slice]:
    """Rows of [N, K] in steps of at most BUFFER_VALUES values."""
    step = max(1, BUFFER_VALUES // weight.shape[1])
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]


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

    def __init__(self, held: Stored, bias: torch.Tensor | None, products: Products, *, few_rows: bool) -> None:
        super().__init__(held)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        self._products = products
        self._few_rows = few_rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide = self._products.prefill and not self._few_rows
        out = self._wide(rows) if wide else self._narrow(rows)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], out.shape[-1])

    def _narrow(self, x: torch.Tensor) -> torch.Tensor:
        """x·Wᵀ of the stored type: reads 2 or 1 bytes per weight."""
        rounded = x.to(torch.bfloat16)
        if self.scale is None:
            return nn.functional.linear(rounded, self.weight).float()
        return torch._weight_int8pack_mm(rounded, self.weight, self.scale).float()

    def _wide(self, x: torch.Tensor) -> torch.Tensor:
        """x·Wᵀ in float32, weights cast block by block."""
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for rows in _blocks(self.weight):
            torch.mm(x, self._products.as_float32(self.weight[rows]).t(), out=out[:, rows])
        return out if self.scale is None else out.mul_(self.scale)


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
