"""Signatures of the stored rows of one layer and sequence: what the sampler `rabitq` compares with a query.

Rows are signed in blocks of 256, each centred on its own mean; the rows of a block that is not complete are attended
exactly. So a signature depends on the rows of its block and on nothing else: not on when they came, in which chunks, or
what was cut off behind them. Appending is writing bits, and an index is never made anew.

A prefill makes one long block of all that came with it, a decode step one of 256 rows when there are so many. JOINED
blocks of one size become one, so that a kernel has a few to walk through; a fork leaves those alone that it shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.cache.base import Index, IndexReader, SavedTensor
from magicpig_cli.cache.store import RowStore
from magicpig_cli.kernels import SIGNATURE_ROWS, SignatureBasis, SignatureBlock, SignedRows
from magicpig_cli.kernels.memory import kept_arrays

JOINED = 16  # blocks of one size that become one: copies 18 bytes per row and KV head with 128 bits


def first_rows(block: SignatureBlock, rows: int) -> SignatureBlock:
    """The first rows of a block, a multiple of SIGNATURE_ROWS, in memory of their own."""
    if rows == block.n:
        return block
    return _copied([(block.codes[:, : rows // 32], block.factors[:, :rows], block.means[:, : rows // SIGNATURE_ROWS])])


def up_to(blocks: Sequence[SignatureBlock], rows: int) -> list[SignatureBlock]:
    """The blocks of the first rows, a multiple of SIGNATURE_ROWS; the last one may be cut."""
    kept: list[SignatureBlock] = []
    for block in blocks:
        if rows:
            kept.append(first_rows(block, min(rows, block.n)))
            rows -= kept[-1].n
    return kept


def joined(blocks: Sequence[SignatureBlock]) -> SignatureBlock:
    """One block of the rows of several that follow each other."""
    return _copied([(block.codes, block.factors, block.means) for block in blocks])


def _copied(parts: Sequence[tuple[np.ndarray, ...]]) -> SignatureBlock:
    """Codes, factors and means of neighbours in one block, in memory of its own."""
    sources = list(zip(*parts, strict=True))  # of codes, of factors, of means
    kinds = [((s[0].shape[0], sum(a.shape[1] for a in s), *s[0].shape[2:]), s[0].dtype) for s in sources]
    made = kept_arrays(*kinds)
    for arrays, array in zip(sources, made, strict=True):
        np.concatenate(arrays, axis=1, out=array)
    return SignatureBlock(*made)


@dataclass(frozen=True, slots=True)
class SavedSignatures:
    """The blocks of the first `rows` rows. Tensors: `factors`, `means`, `codes`, each of one block of all of them."""

    blocks: tuple[SignatureBlock, ...]
    rows: int
    kv_heads: int
    head_dim: int
    bits: int

    def facts(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def tensors(self) -> Iterator[SavedTensor]:
        means = self.rows // SIGNATURE_ROWS
        yield SavedTensor("factors", "U16", (self.kv_heads, self.rows), lambda: self._pieces("factors", 1))
        shape = (self.kv_heads, means, self.head_dim)
        yield SavedTensor("means", "U16", shape, lambda: self._pieces("means", SIGNATURE_ROWS))
        codes = (self.kv_heads, self.rows // 32, self.bits // 4, 16)
        yield SavedTensor("codes", "U8", codes, lambda: self._pieces("codes", 32))

    def _pieces(self, name: str, rows_per_entry: int) -> Iterator[np.ndarray]:
        """Head by head, what the blocks have of it."""
        for head in range(self.kv_heads):
            left = self.rows
            for block in self.blocks:
                rows = min(left, block.n)
                yield getattr(block, name)[head, : rows // rows_per_entry]
                left -= rows

    @classmethod
    def read(cls, saved: IndexReader, kv_heads: int, head_dim: int, bits: int) -> SavedSignatures:
        """What a file has. Raises MagicpigError."""
        rows = int(saved.facts["rows"])
        factors, means, codes = (saved.read(name) for name in ("factors", "means", "codes"))
        wanted = (kv_heads, rows), (kv_heads, rows // SIGNATURE_ROWS, head_dim), (kv_heads, rows // 32, bits // 4, 16)
        if rows % SIGNATURE_ROWS or (factors.shape, means.shape, codes.shape) != wanted:
            raise saved.damaged(f"its tensors are not those of {rows:,} rows")
        blocks = (SignatureBlock(codes, factors, means),) if rows else ()
        return cls(blocks, rows, kv_heads, head_dim, bits)


class SignatureIndex(Index):
    """Signatures of rows [0, length) of one store; none at first."""

    sampler = "rabitq"

    def __init__(
        self, basis: SignatureBasis, store: RowStore, threads: int, blocks: tuple[SignatureBlock, ...] = ()
    ) -> None:
        self.basis = basis
        self.budgets: np.ndarray | None = None  # float32 [H] of the next step, where they move; None: as at the start
        self._store = store
        self._threads = threads
        self._rows = SignedRows(store.table, blocks)  # replaced as a whole: an interrupt comes before or after that
        self._own_from = self.length  # row from which on blocks are this index's own

    @property
    def length(self) -> int:
        return self._rows.n

    @property
    def parts(self) -> Sequence[SignatureBlock]:
        return self._rows.blocks

    @property
    def own_bytes(self) -> int:
        return 0

    @property
    def outgrown(self) -> bool:
        return False

    @property
    def signed_rows(self) -> SignedRows:
        """What the kernel takes."""
        return self._rows

    def extend(self) -> None:
        self.budgets = None
        complete = self._store.length // SIGNATURE_ROWS * SIGNATURE_ROWS
        if complete > self.length:
            self._hold([*self.parts, self._signed(complete)])
        self._own_from = self.length

    def step(self) -> None:
        if self._store.length - self.length >= SIGNATURE_ROWS:
            self._hold(self._with(self._signed(self.length + SIGNATURE_ROWS)))

    def _hold(self, blocks: list[SignatureBlock]) -> None:
        self._rows = SignedRows(self._store.table, tuple(blocks))

    def _signed(self, stop: int) -> SignatureBlock:
        """A block of the rows up to `stop` that have none."""
        return kernels.sign_rows(self._store.table, self.length, stop, self.basis, self._threads)

    def _with(self, block: SignatureBlock) -> list[SignatureBlock]:
        """All blocks and one more, those joined that are many of a size."""
        blocks = [*self.parts, block]
        while len(blocks) >= JOINED:
            last = blocks[-JOINED:]
            before = sum(block.n for block in blocks[:-JOINED])
            if before < self._own_from or len({block.n for block in last}) > 1:
                break
            blocks[-JOINED:] = [joined(last)]
        return blocks

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on, and of a block of 256 that is cut the other rows too."""
        left = length // SIGNATURE_ROWS * SIGNATURE_ROWS
        if left >= self.length:
            return
        self.budgets = None
        self._hold(up_to(self.parts, left))
        self._own_from = min(self._own_from, self.length)

    def fork(self, store: RowStore) -> SignatureIndex:
        fork = copy(self)
        fork._store, fork._rows = store, SignedRows(store.table, self.parts)
        fork._own_from = self.length
        return fork  # budgets are replaced, never written to

    @classmethod
    def restored(cls, saved: SavedSignatures, basis: SignatureBasis, store: RowStore, threads: int) -> SignatureIndex:
        """The index that `saved` was read of, as far as the store goes."""
        rows = min(saved.rows, store.length // SIGNATURE_ROWS * SIGNATURE_ROWS)
        return cls(basis, store, threads, tuple(up_to(saved.blocks, rows)))

    def saved(self, length: int) -> SavedSignatures:
        rows = min(self.length, length // SIGNATURE_ROWS * SIGNATURE_ROWS)
        table = self._store.table
        return SavedSignatures(tuple(self.parts), rows, table.kv_heads, table.head_dim, self.basis.bits)
