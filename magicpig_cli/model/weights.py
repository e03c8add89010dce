"""Looks at the weight files of a folder before they are loaded: all there, whole, and what they claim to be."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from magicpig_cli.errors import ModelError

# In the order in which transformers looks for them.
SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


def names_in(folder: Path) -> tuple[str, ...]:
    """File names that make up the weights in this folder, whether there or not; () if it has none."""
    for single, index in zip(SINGLE_FILES, INDEX_FILES, strict=True):
        if (folder / single).exists():
            return (single,)
        if (folder / index).exists():
            return _names_in_index(folder / index)
    return ()


def _names_in_index(index: Path) -> tuple[str, ...]:
    refuse_pointer(index)
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ModelError(f"{index} is not an index of weight files", hint="download it again") from problem
    if outside := [name for name in names if Path(name).name != name]:
        raise ModelError(f"{index} names a file outside its folder: {outside[0]}", hint="do not trust this model")
    return tuple(names)


def check(folder: Path) -> None:
    """Raise ModelError that names the first thing wrong with the weights in this folder."""
    names = names_in(folder)
    if not names:
        raise ModelError(
            f"{folder} has a config but no weights (none of {', '.join((*SINGLE_FILES, *INDEX_FILES))})",
            hint="download the weights too; bench --load-format dummy measures speed without them",
        )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}"
            + (" …" if len(missing) > 3 else ""),
            hint="download the missing files again",
        )
    for name in names:
        refuse_pointer(folder / name)
        if name.endswith(".safetensors"):
            _check_safetensors(folder / name)


def refuse_pointer(path: Path) -> None:
    """Raise ModelError if git checked out the pointer instead of the file it points to."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelError(
                f"{path} is a git-LFS pointer, not the file itself", hint="run `git lfs pull` in that folder"
            )


def count_values(folder: Path) -> int:
    """Numbers stored in the safetensors files of a folder that `check` has passed; 0 for other formats."""
    return sum(
        math.prod(tensor["shape"])
        for name in names_in(folder)
        if name.endswith(".safetensors")
        for tensor in _tensors(_read_header(folder / name)[1])
    )


def count_bytes(folder: Path) -> dict[str, int]:
    """Number type as the format names it (`BF16`, `I32`, …) → bytes of all tensors of that type in the safetensors
    files of a folder that `check` has passed."""
    found: dict[str, int] = {}
    for name in names_in(folder):
        if name.endswith(".safetensors"):
            for tensor in _tensors(_read_header(folder / name)[1]):
                begin, end = tensor["data_offsets"]
                found[tensor["dtype"]] = found.get(tensor["dtype"], 0) + end - begin
    return found


def _tensors(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (entry for name, entry in header.items() if name != "__metadata__")


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the JSON header: 8 bytes of its length come before it. Raises ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError("header too long")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("header is not an object")
    return 8 + length, header


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    try:
        start, header = _read_header(path)
        expected = start + max((int(tensor["data_offsets"][1]) for tensor in _tensors(header)), default=0)
    except (ValueError, KeyError, TypeError, IndexError) as problem:
        raise ModelError(f"{path} is not a safetensors file, or damaged", hint="download it again") from problem
    if size != expected:
        raise ModelError(
            f"{path} is damaged: {size:,} bytes where its header says {expected:,}", hint="download it again"
        )
