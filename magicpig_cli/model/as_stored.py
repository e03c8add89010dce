"""Linear layers as the file of a model stores them, and what `--quantize auto` makes of that (docs/decisions/023).

int4 on a CPU gives back the codes of types whose 32 values of a group lie on one even grid of 16. Users of such a file
have chosen 4 bits already, so that is how it is run. Of every other type something would be lost: it stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicpig_cli.config import ModelOptions

if TYPE_CHECKING:
    from magicpig_cli.model.gguf_header import Tensor

# Not IQ4_NL, IQ4_XS and MXFP4, whose 16 values are unevenly spaced.
_GIVEN_BACK = frozenset({"Q4_0", "Q4_1", "Q4_K"})
_LAYER = re.compile(r"(blk\.\d+)\.((?:attn|ffn)_\w+)\.weight")
_SAME_INPUT = re.compile(r"(attn|ffn)_(?:[qkv]$|(?:gate|up)(?=_|$))")  # multiplied together, in one form


@dataclass(frozen=True, slots=True)
class InFile:
    """Linear layers of the blocks, without experts, in a file that names the type of each."""

    types: tuple[tuple[str, int], ...]  # (type, values of it), the most first
    int4_params: int  # values in layers that int4 gives back, as all do that are given the same input
    int4_rows: int  # output rows of these layers

    @property
    def params(self) -> int:
        return sum(values for _, values in self.types)

    @property
    def is_int4(self) -> bool:
        """Whether int4 gives back most of it."""
        return 2 * self.int4_params > self.params

    @property
    def all_int4(self) -> bool:
        return self.int4_params == self.params

    @property
    def words(self) -> str:
        """`Q4_1`, or `Q4_K 86%, Q6_K 14%`."""
        if len(self.types) == 1:
            return self.types[0][0]
        return ", ".join(f"{name} {values / self.params:.0%}" for name, values in self.types)

    def scaled(self, share: float) -> InFile:
        """Of a model with so many of its weights."""
        types = tuple((name, round(share * values)) for name, values in self.types)
        return InFile(types, round(share * self.int4_params), round(share * self.int4_rows))


def linear_layers(tensors: Iterable[Tensor]) -> InFile | None:
    """The linear layers among the tensors of a GGUF file; None if there are none."""
    types: dict[str, int] = {}
    together: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        found = _LAYER.fullmatch(tensor.name)
        if found is None or len(tensor.sizes) != 2 or "_inp" in found[2]:  # norms, all experts in one, routers
            continue
        types[tensor.type] = types.get(tensor.type, 0) + _values(tensor)
        side_by_side = _SAME_INPUT.sub(r"\1_input", found[2])
        together.setdefault(f"{found[1]}.{side_by_side}", []).append(tensor)
    if not types:
        return None
    given_back = [
        tensor for layers in together.values() if {one.type for one in layers} <= _GIVEN_BACK for tensor in layers
    ]
    return InFile(
        types=tuple(sorted(types.items(), key=lambda item: -item[1])),
        int4_params=sum(map(_values, given_back)),
        int4_rows=sum(tensor.sizes[1] for tensor in given_back),
    )


def _values(tensor: Tensor) -> int:
    row, rows = tensor.sizes
    return row * rows


def is_as_stored(options: ModelOptions, in_file: InFile | None, *, on_gpu: bool) -> bool:
    """Whether `--quantize auto` means int4 for what a file stores so.

    Not where somebody has typed a `--dtype`, which is the number type of the weights.
    """
    free = options.quantize == "auto" and options.dtype == "auto"
    return free and not on_gpu and in_file is not None and in_file.is_int4


def quantize_meant(options: ModelOptions, in_file: InFile | None, *, on_gpu: bool) -> str:
    """What `--quantize` means for a model: none, int8 or int4."""
    if options.quantize != "auto":
        return options.quantize
    return "int4" if is_as_stored(options, in_file, on_gpu=on_gpu) else "none"
