"""Keys and values of one layer of one sequence: window on the device, store on the host, index over the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.base import Index
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.quantize import as_numbers
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from magicpig_cli.cache.window import Window, WindowShape
from magicpig_cli.config import ROWS_AT_ONCE

Run = tuple[kernels.RowTable, int, int]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What the model layer is: heads, head dim, and its own sliding window (None = attends to everything)."""

    kv_heads: int
    head_dim: int
    window: int | None = None


class LayerCache:
    """All rows of one layer and sequence. `length` counts tokens; every change is exact at any length.

    Rows come in, and lie in the window, as float32 or bfloat16: the window's type. A store of int8 rounds what leaves
    the window; of rows that `truncate` brings back from it the window holds what was left of them.
    """

    def __init__(self, spec: LayerSpec, shape: WindowShape, pool: BlockPool, staging: Staging) -> None:
        self.spec = spec
        self.shape = shape
        self._staging = staging
        self.window = Window(shape, spec.kv_heads, spec.head_dim, kernels.window_type(pool.dtype), staging.device)
        self.store = RowStore(pool)
        self.index: Index | None = None
        self.length = 0

    @property
    def full(self) -> bool:
        """Whether the next row moves others out of the window."""
        return self.shape.offloaded(self.length + 1) > self.store.length

    def append_one(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Decode: key and value [Hkv, D], rounded to the window's type. May move `flush` rows to the store."""
        if self.full:
            self.extend(torch.stack([key, value], dim=1).unsqueeze(1).to(self.window.rows.dtype))
        else:
            self._append(lambda: self.window.append_one(key, value))

    def append_here(self, key: np.ndarray, value: np.ndarray) -> None:
        """The same in host memory, key and value float32."""
        if self.full:
            self.append_one(torch.from_numpy(key), torch.from_numpy(value))
        else:
            self._append(lambda: self.window.append_here(key, value))

    def _append(self, to_window: Callable[[], None]) -> None:
        used, length = self.window.used, self.length
        try:
            to_window()
            self.length = length + 1
        except BaseException:
            self.window.used, self.length = used, length
            raise

    def extend(self, rows: torch.Tensor) -> None:
        """Prefill: rows [Hkv, T, 2, D] of the window's type, any T, on the device or the host.

        What leaves the window of a device is on its way to the store when this returns. If it fails or is interrupted,
        the layer is as before.
        """
        before, stored, used = self.length, self.store.length, self.window.used
        everything = torch.cat([self.window.valid, self._staging.to_device(rows)], dim=1)  # a copy
        after = before + rows.shape[1]
        sink = min(self.shape.sink, after)
        keep_from = sink + self.shape.offloaded(after) - stored
        try:
            for start in range(sink, keep_from, ROWS_AT_ONCE):
                leaving = everything[:, start : min(start + ROWS_AT_ONCE, keep_from)]
                self.store.append_from(leaving.shape[1], partial(self._staging.bring, "rows", leaving))
            self._hold(after, self.shape.offloaded(after), everything[:, :sink], everything[:, keep_from:])
        except BaseException:  # no memory for a block, Ctrl-C
            self._hold(before, stored, everything[:, :used])
            raise

    def _hold(self, length: int, stored: int, *window: torch.Tensor) -> None:
        """Be `length` rows: the first `stored` of the store, and in the window copies of what it held."""
        self.window.replace(*window)
        self.store.truncate(stored)
        self.length = length

    def near(self, length: int) -> list[torch.Tensor]:
        """What the window would hold if only the first `length` tokens were here: copies [Hkv, n, 2, D] on the device.

        The first of them is the sink.
        """
        length = min(length, self.length)
        old_boundary, stored = self.shape.boundary(self.length), self.shape.offloaded(length)
        sink = min(self.shape.sink, length)
        parts = [self.window.rows[:, :sink].clone()]
        if length > sink:
            back = self.store.read(stored, min(length, old_boundary) - self.shape.sink)
            parts.append(self._staging.to_device(back).to(self.window.rows.dtype))
            parts.append(self.window.rows[:, sink : sink + max(0, length - old_boundary)].clone())
        return parts

    def restore(self, length: int, stored: Iterable[np.ndarray], near: list[torch.Tensor]) -> None:
        """Make an empty layer hold `length` rows: those of the store as they lie there, and what `near` gave.

        If it fails or is interrupted, the layer is empty.
        """
        assert self.length == 0, "only an empty layer can be restored"
        try:
            for rows in stored:
                self.store.append_stored(rows)
            self._hold(length, self.store.length, *(self._staging.to_device(rows) for rows in near))
        except BaseException:
            self._hold(0, 0)
            raise

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on; what remains equals a sequence that never was longer.

        With an int8 store that is true of the store; rows that come back to the window have been rounded to int8.
        """
        if length >= self.length:
            return
        stored, parts = self.shape.offloaded(length), self.near(length)
        if self.index is not None:
            self.index.truncate(stored)  # first: it may lag behind the store, never be ahead of it
        try:
            self._hold(length, stored, *parts)
        except BaseException:  # Ctrl-C half-way: what it overwrote is gone, so there is no way back
            self._hold(length, stored, *parts)
            raise

    def fork(self) -> LayerCache:
        """A layer with the same rows and index, sharing what is complete. Both go on as if they were alone."""
        fork = copy(self)
        fork.window = self.window.fork()
        fork.store = self.store.fork()
        fork.index = None if self.index is None else self.index.fork(fork.store)
        return fork

    def release(self) -> None:
        """Give back everything; the layer is not to be used any more."""
        self.index = None
        self.length = self.window.used = 0
        self.store.truncate(0)

    def first_visible(self) -> int:
        """First position that the newest token attends to (0, or later under a sliding window)."""
        return 0 if self.spec.window is None else max(0, self.length - self.spec.window)

    def runs(self, store_from: int = 0) -> list[Run]:
        """What the newest token attends to, as runs of rows for the kernels: sink, recent, store from a row on."""
        first, sink, boundary = (
            self.first_visible(),
            min(self.shape.sink, self.length),
            self.shape.boundary(self.length),
        )
        table = self.window.table
        assert table is not None, "the kernels read windows in host memory only"
        runs = [(table, min(first, sink), sink), (table, sink + max(0, first - boundary), self.window.used)]
        return [run for run in (*runs, *self.stored_runs(max(store_from, first - self.shape.sink))) if run[1] < run[2]]

    def stored_runs(self, start: int) -> list[Run]:
        """Rows of the store from `start` on, for the kernels."""
        return [(self.store.table, start, self.store.length)] if start < self.store.length else []

    def pieces(self, at_most: int, store_from: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """What is held, as (position of the first row, rows [Hkv, ≤ at_most, 2, D]) in order of position.

        Of the store only the rows from `store_from` on.
        """
        return self._between(self._placed(self.store.views(store_from, self.store.length, at_most), store_from))

    def pieces_there(self, store_from: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """The same on the device: blocks of the store are copied there one ahead. Each is valid until the next one."""
        stored = self._placed(self.store.lying(store_from, self.store.length), store_from)
        copies = self._staging.stream("blocks", stored, room=self.store.block_bytes)
        return self._between((position, as_numbers(rows)) for position, rows in copies)

    def _placed(self, pieces: Iterable[torch.Tensor], store_from: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces of the store from a row on, each with its position."""
        position = self.shape.sink + store_from
        for rows in pieces:
            yield position, rows
            position += rows.shape[1]

    def _between(self, stored: Iterator[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
        """Sink, what of the store is given, and recent rows."""
        sink = min(self.shape.sink, self.length)
        if sink:
            yield 0, self.window.rows[:, :sink]
        yield from stored
        if self.window.used > sink:
            yield self.shape.boundary(self.length), self.window.rows[:, sink : self.window.used]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A copy of the rows of positions [start, stop), [Hkv, n, 2, D] of the window's type in host memory."""
        parts = []
        for position, piece in self.pieces(at_most=max(1, stop - start), store_from=max(0, start - self.shape.sink)):
            first, last = max(start, position), min(stop, position + piece.shape[1])
            if first < last:
                parts.append(self._staging.to_host(piece[:, first - position : last - position]))
            if position >= stop:
                break
        if not parts:
            return torch.empty_like(self.window.rows[:, :0], device="cpu")
        return torch.cat(parts, dim=1).to(self.window.rows.dtype)

    def copy_rows(self) -> torch.Tensor:
        """A copy of everything held, [Hkv, length, 2, D] of the window's type in host memory, in order of position."""
        return self.read(0, self.length)
