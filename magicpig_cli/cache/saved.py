"""Keys, values and index of a sequence in one safetensors file, to go on another day without reading the text again.

Its tensors, little-endian, nothing between: `checksums` and `ids`; what is 4 bytes wide of the index of each sampled
layer I; per layer `rows.I.sink`, `rows.I.stored` (as the store holds them: `kernels.rows`) and `rows.I.recent`; the
rest of the indexes. Which tensors an index has, `index.I.NAME`, its own module says (`cache.index`,
`cache.signatures`). The metadata names what these numbers depend on (`identity`) and what the index depends on beside.

A file (written by `cache.snapshot`) is read through a mapping and copied into blocks of the store. The mapping could be
the blocks: on a 2-core virtual machine, with 384 MiB of rows, gathering 2% and 5% of them and adding up all took the
same time on either (5%: 109 and 109 ms, all: 65 and 68 ms), and copying ran at 1.2 GB/s, 0.3 s. That is a small price.
The first question reads every row anyway, so nothing would be put off; a file that somebody cuts short would end the
program with a bus error at any time later; checksums could not be compared before rows are used; and memory that is
short would make decode steps wait for a disk.

Checked before anything is used: sizes against the file's own, every shape, a CRC-32 of the header and of each MiB that
is read. That finds accidents; a file that somebody has made to deceive is not to be read.
"""

from __future__ import annotations

import json
import mmap
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.store import as_tensor
from magicpig_cli.errors import MagicpigError
from magicpig_cli.kernels.memory import kept_array

FORMAT = "magicpig-cache"
VERSION = 2  # 1: no signatures
PIECE = 1 << 20  # bytes that one checksum is of
_LONGEST_HEADER = 100 << 20  # as in safetensors
_READ_ROWS = 1024
_TYPES: dict[str, type] = {  # of safetensors; bfloat16 as its bits
    "F32": np.float32, "BF16": np.uint16, "I8": np.int8, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32,
    "I32": np.int32,
}  # fmt: skip
ROW_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "I8"}


def item_bytes(kind: str) -> int:
    """Bytes of one element of a safetensors type."""
    return np.dtype(_TYPES[kind]).itemsize


def shape_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a safetensors type."""
    size = item_bytes(kind)
    for n in shape:
        size *= n
    return size


@dataclass(frozen=True)
class SavedLayerIndex:
    """The index of one layer in a file (`cache.base.IndexReader`)."""

    file: SavedCache
    layer: int
    sampler: dict[str, Any]
    facts: dict[str, Any]

    def read(self, name: str) -> np.ndarray:
        return self.file.read(f"index.{self.layer}.{name}")

    def damaged(self, how: str) -> MagicpigError:
        return self.file.damaged(f"the index of layer {self.layer}: {how}")


class SavedCache:
    """An open file of keys and values. Raises MagicpigError when something in it is not as it should be."""

    def __init__(self, path: Path) -> None:
        """Read what it says about itself, and the token ids. Raises MagicpigError."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._open(file)
        except OSError as problem:
            raise MagicpigError(f"cannot read {path}: {problem.strerror or problem}") from problem

    def _open(self, file: BinaryIO) -> None:
        self.nbytes = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if self.nbytes < 8 or length > min(_LONGEST_HEADER, self.nbytes - 8):
            raise self._foreign()
        header = file.read(length)
        try:
            entries = json.loads(header)
            metadata = entries.pop("__metadata__")
            format_, version = metadata["format"], int(metadata["version"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._foreign() from None
        if format_ != FORMAT:
            raise self._foreign()
        if version > VERSION:
            raise MagicpigError(
                f"{self.path} was made by a newer version of magicpig: format {version}, this one reads {VERSION}",
                hint="update magicpig, or name another file",
            )
        self._begin = 8 + length
        try:
            self._tensors = {name: _entry(entry) for name, entry in entries.items()}
            self._check_extents()
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._checksums = self._raw("checksums")
            self._verified = bytearray(len(self._checksums) - 1)
            if zlib.crc32(header) != self._checksums[0]:
                raise self.damaged("its header does not match its checksum")
            self.identity: dict[str, Any] = dict(json.loads(metadata["identity"]))
            self.sink = int(metadata["sink"])
            self._index: dict[str, Any] | None = json.loads(metadata["index"])
            self.ids: list[int] = self.read("ids").tolist()
            self.layers = sum(name.endswith(".stored") for name in self._tensors)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as problem:
            raise self.damaged(f"its header makes no sense ({problem})") from problem

    @property
    def sampler(self) -> dict[str, Any] | None:
        """What the index depends on beside keys and values; None without an index."""
        return None if self._index is None else {**self._index["sampler"], "sink": self.sink}

    def _foreign(self) -> MagicpigError:
        return MagicpigError(
            f"{self.path} is not a cache of keys and values that magicpig has made", hint="name another file"
        )

    def damaged(self, how: str) -> MagicpigError:
        """What to raise where something in it cannot be."""
        return MagicpigError(f"{self.path} is damaged: {how}", hint="delete it; it is made again")

    def _check_extents(self) -> None:
        """Require that the tensors follow each other without a gap to the end of the file."""
        at = 0
        for name, (kind, shape, start, stop) in self._tensors.items():
            if start != at or stop - start != shape_bytes(kind, shape):
                raise self.damaged(f"{name} is not where it should be")
            at = stop
        if self._begin + at != self.nbytes:
            raise self.damaged(f"it has {self.nbytes:,} bytes, and should have {self._begin + at:,}")

    def _tensor(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        if name not in self._tensors:
            raise self.damaged(f"it has no {name}")
        return self._tensors[name]

    def _raw(self, name: str) -> np.ndarray:
        """A view of a tensor that is not verified."""
        kind, shape, start, stop = self._tensor(name)
        if sys.byteorder != "little":
            raise self.damaged("its numbers are little-endian, and this machine's are not")
        bytes_ = np.frombuffer(self._map, dtype=np.uint8, count=stop - start, offset=self._begin + start)
        array: np.ndarray = bytes_.view(_TYPES[kind])
        return array.reshape(shape)

    def _verify(self, start: int, stop: int) -> None:
        """Check the pieces that bytes [start, stop) of the data lie in, each once."""
        first = 4 * len(self._checksums)
        for piece in range((start - first) // PIECE, -(-(stop - first) // PIECE)):
            if not self._verified[piece]:
                at = self._begin + first + piece * PIECE
                if zlib.crc32(memoryview(self._map)[at : at + PIECE]) != self._checksums[1 + piece]:
                    raise self.damaged(f"bytes {at:,} to {min(at + PIECE, self.nbytes):,} do not match their checksum")
                self._verified[piece] = 1

    def read(self, name: str) -> np.ndarray:
        """A verified copy of a tensor. Raises MagicpigError."""
        _, _, start, stop = self._tensor(name)
        self._verify(start, stop)
        raw = self._raw(name)
        copy = kept_array(raw.shape, raw.dtype)
        copy[...] = raw
        return copy

    def _stored(self, layer: int, start: int, stop: int) -> Iterator[np.ndarray]:
        """Verified copies [Hkv, ≤ _READ_ROWS, 2, W] of rows [start, stop) of a layer's store."""
        rows = self._raw(name := f"rows.{layer}.stored")
        _, (heads, count, *_), begin, end = self._tensor(name)
        row = (end - begin) // max(1, heads * count)
        for first in range(start, stop, _READ_ROWS):
            last = min(stop, first + _READ_ROWS)
            for head in range(heads):
                self._verify(begin + (head * count + first) * row, begin + (head * count + last) * row)
            yield rows[:, first:last].copy()

    def _rows(self, layer: int, start: int, stop: int) -> torch.Tensor:
        """Rows of positions [start, stop), [Hkv, n, 2, D] of the window's type."""
        sink, recent = self.read(f"rows.{layer}.sink"), self.read(f"rows.{layer}.recent")
        stored = len(self.ids) - sink.shape[1] - recent.shape[1]
        near = as_tensor(sink[:, start:stop])
        parts = [near]
        first, last = max(0, start - sink.shape[1]), min(stored, stop - sink.shape[1])
        for rows in self._stored(layer, first, max(first, last)):
            floats = as_tensor(kernels.widen(rows)) if rows.dtype == np.int8 else as_tensor(rows)
            parts.append(floats.to(near.dtype))
        offset = sink.shape[1] + stored
        parts.append(as_tensor(recent[:, max(0, start - offset) : max(0, stop - offset)]))
        return torch.cat(parts, dim=1)

    def read_layer(self, layer: int, cache: LayerCache, length: int) -> None:
        """Fill an empty layer with the first `length` rows. Raises MagicpigError if they are not of its kind."""
        self._check_layer(layer, cache)
        shape = cache.shape
        stored = shape.offloaded(length)
        if self.sink == shape.sink and stored <= self._tensor(f"rows.{layer}.stored")[1][1]:
            near = [self._rows(layer, 0, min(shape.sink, length)), self._rows(layer, shape.sink + stored, length)]
            cache.restore(length, self._stored(layer, 0, stored), near)
            return
        for start in range(0, length, _READ_ROWS):  # other rows are offloaded than when it was written
            cache.extend(self._rows(layer, start, min(length, start + _READ_ROWS)))

    def _check_layer(self, layer: int, cache: LayerCache) -> None:
        table = cache.store.table
        width = kernels.row_width(table.head_dim, table.dtype)
        rows, near = ROW_TYPES[table.dtype], ROW_TYPES[kernels.window_type(table.dtype)]
        total = 0
        wanted = {"sink": (near, table.head_dim), "stored": (rows, width), "recent": (near, table.head_dim)}
        for part, (kind, last) in wanted.items():
            found, shape, _, _ = self._tensor(f"rows.{layer}.{part}")
            if (found, len(shape), shape[:1], shape[2:]) != (kind, 4, (table.kv_heads,), (2, last)):
                raise self.damaged(f"layer {layer} has {part} rows {found} {list(shape)}")
            total += shape[1]
        if total != len(self.ids):
            raise self.damaged(f"layer {layer} has {total:,} rows for {len(self.ids):,} tokens")

    def index(self, layer: int) -> SavedLayerIndex | None:
        """What there is of the index of a layer; None = it has none."""
        if self._index is None or str(layer) not in self._index["layers"]:
            return None
        return SavedLayerIndex(self, layer, self._index["sampler"], self._index["layers"][str(layer)])


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(type, shape, first byte, byte after the last) of a tensor. Raises ValueError, KeyError or TypeError."""
    kind, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if kind not in _TYPES or not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise ValueError(f"a tensor {kind} {list(shape)}")
    return kind, shape, start, stop
