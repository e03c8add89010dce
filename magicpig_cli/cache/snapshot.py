"""Taking the first tokens of a sequence as they are, and writing them to a file (`cache.saved` has its form).

The file is written layer by layer beside its place and moved there whole; there never is a second copy of the rows.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.base import SavedIndex, SavedTensor
from magicpig_cli.cache.saved import FORMAT, PIECE, ROW_TYPES, VERSION, item_bytes, shape_bytes
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cache.store import RowStore, as_array
from magicpig_cli.errors import MagicpigError
from magicpig_cli.files import replacement
from magicpig_cli.units import format_bytes


@dataclass(frozen=True)
class _LayerPart:
    """What one layer holds of the first tokens."""

    store: RowStore
    stored: int  # its first rows that belong to it
    sink: np.ndarray  # [Hkv, n, 2, D] of the window's type
    recent: np.ndarray
    index: SavedIndex | None


@dataclass(frozen=True)
class Snapshot:
    """The first tokens of a sequence as they are now. It may grow meanwhile, but not be cut below them."""

    ids: list[int]
    layers: list[_LayerPart]
    row_type: kernels.RowType
    sink: int

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name, type, shape) of all tensors but the checksums, in the order of the file."""
        yield "ids", "I32", (len(self.ids),)
        for i, tensor in self._index_tensors(wide=True):
            yield f"index.{i}.{tensor.name}", tensor.kind, tensor.shape
        rows, near = ROW_TYPES[self.row_type], ROW_TYPES[kernels.window_type(self.row_type)]
        for i, layer in enumerate(self.layers):
            table = layer.store.table
            width = kernels.row_width(table.head_dim, self.row_type)
            yield f"rows.{i}.sink", near, layer.sink.shape
            yield f"rows.{i}.stored", rows, (table.kv_heads, layer.stored, 2, width)
            yield f"rows.{i}.recent", near, layer.recent.shape
        for i, tensor in self._index_tensors(wide=False):
            yield f"index.{i}.{tensor.name}", tensor.kind, tensor.shape

    def _index_tensors(self, *, wide: bool) -> Iterator[tuple[int, SavedTensor]]:
        """(layer, tensor) of all indexes: those of 4 bytes stand before the rows, so that each begins where it may."""
        for i, layer in enumerate(self.layers):
            for tensor in layer.index.tensors() if layer.index is not None else ():
                if (item_bytes(tensor.kind) == 4) == wide:
                    yield i, tensor

    def contents(self) -> Iterator[np.ndarray]:
        """The same tensors, in contiguous parts."""
        yield np.array(self.ids, dtype=np.int32)
        for _, tensor in self._index_tensors(wide=True):
            yield from tensor.pieces()
        for layer in self.layers:
            yield layer.sink
            for head in range(layer.store.table.kv_heads):
                for rows in layer.store.stored(0, layer.stored):
                    yield rows[head]
            yield layer.recent
        for _, tensor in self._index_tensors(wide=False):
            yield from tensor.pieces()

    def index_facts(self) -> dict[str, Any]:
        """By layer, what the tensors do not tell."""
        return {str(i): layer.index.facts() for i, layer in enumerate(self.layers) if layer.index is not None}


def snapshot(sequence: Sequence, length: int, *, index: bool = True) -> Snapshot:
    """The first `length` tokens of a sequence; index: with what is indexed of them, where something is."""
    length = min(length, sequence.length)
    layers = []
    for cache in sequence.layers:
        sink, *recent = (rows.to("cpu") for rows in cache.near(length))
        stored = cache.shape.offloaded(length)
        layers.append(
            _LayerPart(
                cache.store, stored, _contiguous(sink),
                _contiguous(torch.cat(recent, dim=1) if recent else sink[:, :0]),
                cache.index.saved(stored) if index and cache.index is not None else None,
            )
        )  # fmt: skip
    first = sequence.layers[0]
    return Snapshot(sequence.ids[:length], layers, first.store.table.dtype, first.shape.sink)


def _contiguous(rows: torch.Tensor) -> np.ndarray:
    return as_array(rows.contiguous())


def file_bytes(snap: Snapshot, identity: dict[str, Any], sampler: dict[str, Any] | None) -> int:
    """How large the file will be."""
    return _header(snap, identity, sampler)[2]


def _header(snap: Snapshot, identity: dict[str, Any], sampler: dict[str, Any] | None) -> tuple[bytes, int, int]:
    """The JSON that a safetensors file begins with, how many checksums come after it, and bytes of the whole file."""
    data = sum(shape_bytes(kind, shape) for _, kind, shape in snap.tensors())
    checksums = 1 + -(-data // PIECE)  # of the header, then of what follows the checksums
    facts = {"sampler": sampler, "sink": snap.sink, "layers": snap.index_facts()}
    metadata = {
        "format": FORMAT, "version": str(VERSION), "identity": json.dumps(identity), "sink": str(snap.sink),
        "index": json.dumps(facts if facts["layers"] else None),
    }  # fmt: skip
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, kind, shape in [("checksums", "U32", (checksums,)), *snap.tensors()]:
        size = shape_bytes(kind, shape)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return text, checksums, 8 + len(text) + at


def require_space(path: Path, size: int) -> None:
    """Raise MagicpigError if a file of `size` bytes has no room at `path` beside what is there."""
    try:
        free = shutil.disk_usage(path.resolve().parent).free
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror or problem}") from problem
    if size > free:
        raise MagicpigError(
            f"{path} would take {format_bytes(size)}, and {format_bytes(free)} are free there",
            hint="free space, or name a place on another disk",
        )


def write(
    snap: Snapshot, path: Path, identity: dict[str, Any], sampler: dict[str, Any] | None, *,
    temporary_name: str | None = None, mode: int | None = None, go_on: Callable[[], None] = lambda: None,
) -> int:  # fmt: skip
    """Write what `snapshot` took; returns the size of the file. Nothing of it is copied but one piece at a time.

    identity: what keys and values depend on; sampler: what the index depends on beside, None where none is meant.
    temporary_name, mode: see `files.replacement`. go_on: called before each piece; what it raises ends the writing, and
    the old file stays. Raises MagicpigError.
    """
    header, checksums, size = _header(snap, identity, sampler)
    require_space(path, size)
    try:
        with replacement(path, temporary_name, mode) as file:
            file.write(len(header).to_bytes(8, "little") + header + bytes(4 * checksums))
            sums = _write_pieces(file, snap, go_on)
            file.seek(8 + len(header))
            file.write(np.array([zlib.crc32(header), *sums], dtype="<u4").tobytes())
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror or problem}") from problem
    return size


def _write_pieces(file: BinaryIO, snap: Snapshot, go_on: Callable[[], None]) -> list[int]:
    """Write all tensors; their checksums, piece by piece."""
    sums, crc, room = [], 0, PIECE
    for array in snap.contents():
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        while data:
            go_on()
            part, data = data[:room], data[room:]
            crc = zlib.crc32(part, crc)
            file.write(part)
            room -= len(part)
            if not room:
                sums.append(crc)
                crc, room = 0, PIECE
    if room < PIECE:
        sums.append(crc)
    return sums
