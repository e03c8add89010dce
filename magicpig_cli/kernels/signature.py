"""Signatures of rows (RaBitQ; docs/method.md): sign bits of rotated keys, one factor per key.

Rows come in cells of 256 that share a mean. With x = k − μ and P the basis, the signature of a key is b = sign(P·x),
its factor f = |x| / ⟨b, P·x/|x|⟩, and f·⟨b, P·q⟩ + q·μ estimates q·k. A signature depends on the rows of its cell and
on the basis alone; not on how many cells were signed with it, nor on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import MAX_HEAD_DIM, want_array, want_int
from magicpig_cli.kernels.memory import kept_arrays
from magicpig_cli.kernels.rows import RowTable, want_run
from magicpig_cli.kernels.signature_shape import (
    SIGNATURE_GROUP,
    SIGNATURE_ROWS,
    rotation_share,
    want_signature_bits,
)


class SignatureBasis:
    """float32 [bits, D]: the first `bits` rows of D×D rotations on top of each other. Also as the kernels want it."""

    def __init__(self, matrix: np.ndarray) -> None:
        want_array("basis", matrix, np.float32, "bits, D", (None, None))
        want_signature_bits(matrix.shape[0])
        want_int("basis head dim", matrix.shape[1], 1, MAX_HEAD_DIM)
        self.matrix = matrix
        self._packed: dict[str, Any] = {}

    @property
    def bits(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.matrix.shape[1])

    @property
    def share(self) -> float:
        """See `rotation_share`."""
        return rotation_share(self.bits, self.head_dim)

    def packed(self) -> Any:
        """The matrix in the layout of the current kernels, made once."""
        backend = isa.backend()
        if backend.TIER not in self._packed:
            self._packed[backend.TIER] = backend.pack_basis(self.matrix)
        return self._packed[backend.TIER]


@dataclass(frozen=True)
class SignatureBlock:
    """Signatures of n consecutive rows, n a multiple of 256; never changed once made. Made by `sign_rows`.

    codes: rows in groups of 32. For each nibble j (bits 4j … 4j + 3 of a signature, lowest first) 16 bytes: byte i
    holds the nibble of row i of the group in its low half, that of row 16 + i in its high half.
    """

    codes: np.ndarray  # uint8 [Hkv, n/32, bits/4, 16]
    factors: np.ndarray  # uint16 [Hkv, n]: bfloat16 bits of f, 0 for a key equal to the mean
    means: np.ndarray  # uint16 [Hkv, n/256, D]: bfloat16 bits of μ, as it was used
    cells: np.ndarray = field(init=False, repr=False, compare=False)  # int64 [n/256, 6]: see `_addresses`
    largest: np.ndarray = field(init=False, repr=False, compare=False)  # uint16 [Hkv]: factor, as its bits

    def __post_init__(self) -> None:
        want_array("codes", self.codes, np.uint8, "Hkv, n/32, bits/4, 16", (None, None, None, 16))
        heads, groups, nibbles, _ = self.codes.shape
        want_signature_bits(4 * nibbles)
        n = groups * SIGNATURE_GROUP
        if n % SIGNATURE_ROWS:
            raise ValueError(f"codes: want rows in multiples of {SIGNATURE_ROWS}, got {n}")
        want_array("factors", self.factors, np.uint16, "Hkv, n", (heads, n))
        want_array("means", self.means, np.uint16, "Hkv, n/256, D", (heads, n // SIGNATURE_ROWS, None))
        object.__setattr__(self, "cells", _addresses(self))
        object.__setattr__(self, "largest", self.factors.max(axis=1, initial=0))

    @property
    def n(self) -> int:
        return int(self.factors.shape[1])

    @property
    def bits(self) -> int:
        return int(4 * self.codes.shape[2])

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.factors.nbytes + self.means.nbytes


def _addresses(block: SignatureBlock) -> np.ndarray:
    """Per cell, of codes, factors and means: address for kv head 0, and bytes to the next kv head."""
    cells = np.zeros((block.n // SIGNATURE_ROWS, 6), dtype=np.int64)
    for column, array in enumerate((block.codes, block.factors, block.means)):
        plane = array[0].nbytes if array.shape[0] else 0
        step = plane // max(len(cells), 1)  # bytes of a cell within a head
        cells[:, 2 * column] = array.ctypes.data + step * np.arange(len(cells))
        cells[:, 2 * column + 1] = plane
    return cells


@dataclass(frozen=True)
class SignedRows:
    """The rows of one sequence that are sampled by their signatures: blocks follow each other from row 0.

    Making one takes about 1 µs per block: keep it until there is another block.
    """

    table: RowTable
    blocks: Sequence[SignatureBlock] = ()
    cells: np.ndarray = field(init=False, repr=False, compare=False)  # int64 [n/256, 6], of all blocks
    largest: np.ndarray = field(init=False, repr=False, compare=False)  # uint16 [Hkv], of all blocks

    def __post_init__(self) -> None:
        heads, head_dim = self.table.kv_heads, self.table.head_dim
        for block in self.blocks:
            if block.bits != self.blocks[0].bits:
                raise ValueError(f"blocks: want {self.blocks[0].bits} bits in all, got {block.bits}")
            if (block.means.shape[0], block.means.shape[2]) != (heads, head_dim):
                got = f"{block.means.shape[0]} of {block.means.shape[2]}"
                raise ValueError(f"blocks: want signatures of {heads} kv heads of {head_dim}, got {got}")
        cells = [np.zeros((0, 6), dtype=np.int64), *(block.cells for block in self.blocks)]
        object.__setattr__(self, "cells", np.concatenate(cells))
        largest = [np.zeros(heads, dtype=np.uint16), *(block.largest for block in self.blocks)]
        object.__setattr__(self, "largest", np.stack(largest).max(axis=0))
        want_run("blocks", self.table, 0, self.n)

    @property
    def n(self) -> int:
        """Rows that have signatures."""
        return len(self.cells) * SIGNATURE_ROWS

    @property
    def bits(self) -> int | None:
        return self.blocks[0].bits if self.blocks else None


def sign_rows(table: RowTable, start: int, stop: int, basis: SignatureBasis, threads: int) -> SignatureBlock:
    """Signatures of the keys in rows [start, stop), both multiples of 256, of all kv heads."""
    want_run("rows", table, start, stop)
    want_int("threads", threads, 1)
    if start % SIGNATURE_ROWS or stop % SIGNATURE_ROWS:
        raise ValueError(f"rows: want multiples of {SIGNATURE_ROWS}, got [{start}, {stop})")
    if basis.head_dim != table.head_dim:
        raise ValueError(f"basis: want a head dim of {table.head_dim}, got {basis.head_dim}")
    heads, n = table.kv_heads, stop - start
    codes, factors, means = kept_arrays(
        ((heads, n // SIGNATURE_GROUP, basis.bits // 4, 16), np.uint8),
        ((heads, n), np.uint16),
        ((heads, n // SIGNATURE_ROWS, table.head_dim), np.uint16),
    )
    isa.backend().sign_rows(table, start, stop, basis.packed(), codes, factors, means, threads)
    return SignatureBlock(codes, factors, means)
