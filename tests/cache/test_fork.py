"""Forks of stores and layers: each holds what a plain list would, whoever else holds the same blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magicpig_cli import kernels
from magicpig_cli.cache import blocks as blocks_module
from magicpig_cli.cache import store as store_module
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.quantize import quantize
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import TORCH_DTYPE, RowStore
from magicpig_cli.cache.window import Window, WindowShape
from magicpig_cli.kernels.memory import touch

HKV, D, BLOCK_ROWS = 1, 2, 4
ROW_TYPES = ("float32", "bfloat16", "int8")
CPU = torch.device("cpu")


def as_stored(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """What a store of this type reads of rows [Hkv, n, 2, D] that were appended."""
    return torch.from_numpy(kernels.widen(quantize(rows).numpy())) if dtype == "int8" else rows.to(TORCH_DTYPE[dtype])


def held_blocks(store: RowStore) -> list[np.ndarray]:
    return store._arrays + ([store._next[0]] if store._next is not None else [])


class Stores(RuleBasedStateMachine):
    """Stores of one pool, forked, grown, cut and let go in any order, and a plain tensor for each."""

    @initialize(dtype=st.sampled_from(ROW_TYPES))
    def start(self, dtype: Any) -> None:
        self.dtype = dtype
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(blocks_module, "HUGE_PAGE_BYTES", 1)
        self.patch.setattr(blocks_module, "_SMALLEST_SLAB", 300)  # 5 blocks of float32, 10 of bfloat16, 10 of int8
        self.pool = BlockPool(HKV, D, dtype, BLOCK_ROWS)
        self.stores: list[RowStore] = []
        self.rows: list[torch.Tensor] = []  # what each should hold
        self.written = 0

    @rule()
    def new(self) -> None:
        self.stores.append(RowStore(self.pool))
        self.rows.append(torch.empty(HKV, 0, 2, D))

    def which(self, data: Any) -> int:
        return int(data.draw(st.integers(0, len(self.stores) - 1)))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), count=st.integers(1, 3 * BLOCK_ROWS))
    def append(self, data: Any, count: int) -> None:
        at = self.which(data)
        fresh = torch.randn(HKV, count, 2, D, generator=torch.Generator().manual_seed(self.written)).bfloat16().float()
        self.written += 1
        self.stores[at].append(fresh.to(TORCH_DTYPE.get(self.dtype, torch.float32)))
        self.rows[at] = torch.cat([self.rows[at], fresh], dim=1)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), length=st.integers(0, 5 * BLOCK_ROWS))
    def truncate(self, data: Any, length: int) -> None:
        at = self.which(data)
        self.stores[at].truncate(length)
        self.rows[at] = self.rows[at][:, :length]

    @precondition(lambda self: 0 < len(self.stores) < 6)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        at = self.which(data)
        self.stores.append(self.stores[at].fork())
        self.rows.append(self.rows[at])
        assert self.stores[-1].nbytes == self.stores[at].nbytes

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), released=st.booleans())
    def let_go(self, data: Any, released: bool) -> None:
        at = self.which(data)
        store = self.stores.pop(at)
        del self.rows[at]
        if released:
            store.truncate(0)

    @invariant()
    def each_holds_its_rows(self) -> None:
        for store, rows in zip(getattr(self, "stores", ()), getattr(self, "rows", ()), strict=True):
            wanted = as_stored(rows, self.dtype)
            assert store.length == rows.shape[1]
            assert torch.equal(store.read(0, store.length), wanted)
            assert np.array_equal(store.table.read(0, store.length), wanted.float().numpy())

    @invariant()
    def the_pool_knows_who_holds_what(self) -> None:
        touch().result()  # the worker has let go of blocks that were being made ready
        blocks = [block for store in getattr(self, "stores", ()) for block in held_blocks(store)]
        holders = Counter(block.ctypes.data for block in blocks)
        for block in blocks:
            assert self.pool.shared(block) == (holders[block.ctypes.data] > 1)
        if blocks:
            assert self.pool.nbytes == len(holders) * self.pool.block_bytes
            counts = [count for slab in self.pool._slabs for count in slab.holders if count]
            assert sorted(counts) == sorted(holders.values())
        for store in getattr(self, "stores", ()):  # what a store may write to without asking is its own
            if store._next is not None:
                assert holders[store._next[0].ctypes.data] == 1

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.patch.undo()
            for store in self.stores:
                store.truncate(0)
            assert self.pool.nbytes == self.pool.kept_bytes == 0


Stores.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestStores = Stores.TestCase


def make(shape: WindowShape, dtype: Any, pool: BlockPool | None = None) -> LayerCache:
    return LayerCache(LayerSpec(HKV, D), shape, pool or BlockPool(HKV, D, dtype, BLOCK_ROWS), Staging(CPU))


def text(seed: int, dtype: str, count: int = 400) -> torch.Tensor:
    """Rows [Hkv, count, 2, D] of the type that layers of `dtype` are fed with."""
    rows = torch.randn(HKV, count, 2, D, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return rows.to(TORCH_DTYPE[kernels.window_type(dtype)])


def assert_same(layer: LayerCache, other: LayerCache) -> None:
    assert layer.length == other.length
    assert layer.store.length == other.store.length
    assert layer.store.nbytes == other.store.nbytes
    assert torch.equal(layer.window.valid, other.window.valid)
    assert torch.equal(layer.store.read(0, layer.store.length), other.store.read(0, other.store.length))
    table = layer.store.table.read(0, layer.store.length)
    assert np.array_equal(table, other.store.table.read(0, other.store.length))


def feed(layer: LayerCache, rows: torch.Tensor, kind: str, amount: int) -> None:
    """`cut` to so many tokens, or so many more of `rows`, at once or one by one."""
    fresh = rows[:, layer.length : layer.length + amount]
    if kind == "cut":
        layer.truncate(amount)
    elif kind == "extend":
        layer.extend(fresh)
    else:
        for number in range(fresh.shape[1]):
            layer.append_one(*fresh[:, number].unbind(dim=1))


CHANGES = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["extend", "one", "cut", "fork", "release"]), st.integers(0, 40)),
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(CHANGES, st.sampled_from(ROW_TYPES), st.integers(0, 3), st.integers(1, 5), st.integers(1, 5))
def test_layers_forked_at_any_time_equal_layers_of_their_own(changes, dtype, sink, local, flush):
    """Beside each layer one that shares nothing is given the same rows and cuts, in a pool of its own."""
    shape = WindowShape(sink, local, flush)
    pool = BlockPool(HKV, D, dtype, BLOCK_ROWS)
    living = [(make(shape, dtype, pool), make(shape, dtype), text(0, dtype), [])]
    for number, (which, kind, amount) in enumerate(changes):
        if not living:
            break
        layer, alone, rows, path = living[which % len(living)]
        if kind == "fork":
            again = make(shape, dtype)
            for past in path:
                feed(again, *past)
            other = torch.cat([rows[:, : layer.length], text(number + 1, dtype)], dim=1)  # goes on differently
            living.append((layer.fork(), again, other, list(path)))
        elif kind == "release":
            layer.release()
            living.pop(which % len(living))
        else:
            path.append((rows, kind, amount))
            feed(layer, rows, kind, amount)
            feed(alone, rows, kind, amount)
        for forked, twin, *_ in living:
            assert_same(forked, twin)
    for forked, *_ in living:
        forked.release()
    assert pool.nbytes == 0


STEPS = [
    (BlockPool, "take"),
    (BlockPool, "share"),
    (BlockPool, "shared"),
    (BlockPool, "give_back"),
    (store_module, "as_tensor"),
    (RowStore, "append"),
    (RowStore, "fork"),
    (Window, "replace"),
    (Window, "fork"),
    (kernels.RowTable, "append_block"),
    (kernels.RowTable, "replace_block"),
]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), STEPS)
@pytest.mark.parametrize("dtype", ROW_TYPES)
def test_an_interrupt_leaves_forks_whole_and_nothing_handed_out(monkeypatch, owner, name, dtype, done):
    """Each of these is interrupted at its first, second, … call of a step, until one goes through."""
    real: Any = getattr(owner, name)
    calls_left = -1

    def interrupted(*args):
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0 and not done:
            raise KeyboardInterrupt
        result = real(*args)
        if calls_left == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    shape = WindowShape(1, 2, 2)
    pool = BlockPool(HKV, D, dtype, BLOCK_ROWS)
    rows = text(0, dtype)
    parent, twin = make(shape, dtype, pool), make(shape, dtype)
    for layer in (parent, twin):
        feed(layer, rows, "extend", 40)
    alone = pool.nbytes
    forks = []
    for call in range(1, 100):
        calls_left = call
        try:
            forks.append(parent.fork())
            break
        except KeyboardInterrupt:
            calls_left = -1
        touch().result()  # the worker has let go of the block that was being made ready
        assert pool.nbytes == alone
        assert_same(parent, twin)
    fork = forks[0]
    calls_left = -1
    for layer in (fork, twin):
        feed(layer, rows, "cut", 22)  # into a block that the parent holds too
    before = make(shape, dtype)
    feed(before, rows, "extend", 22)
    other = torch.cat([rows[:, :22], text(1, dtype)], dim=1)
    for call in range(1, 100):
        calls_left = call
        try:
            feed(fork, other, "extend", 30)
            break
        except KeyboardInterrupt:
            calls_left = -1
            if dtype != "int8":  # rows that came back from an int8 store were rounded
                assert_same(fork, before)
    calls_left = -1
    feed(twin, other, "extend", 30)
    assert_same(fork, twin)
    whole = make(shape, dtype)
    feed(whole, rows, "extend", 40)
    assert_same(parent, whole)
    for layer in (fork, parent):
        layer.release()
    assert pool.nbytes == pool.kept_bytes == 0
