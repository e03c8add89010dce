"""Window, store and truncation of one layer: whatever path led to a length, the same rows lie in the same places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.cache import store as store_module
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.quantize import quantize
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import TORCH_DTYPE, RowStore
from magicpig_cli.cache.window import Window, WindowShape

HKV, D = 2, 3
CPU = torch.device("cpu")


def make(shape: WindowShape, dtype: str = "float32", window: int | None = None) -> LayerCache:
    return LayerCache(LayerSpec(HKV, D, window), shape, BlockPool(HKV, D, dtype, block_rows=8), Staging(CPU))


def rows(start: int, stop: int, dtype: str = "float32") -> torch.Tensor:
    """Rows [Hkv, n, 2, D] that tell their position: every entry is a distinct function of it."""
    base = torch.arange(start, stop, dtype=torch.float32).reshape(1, -1, 1, 1)
    offset = torch.arange(HKV * 2 * D, dtype=torch.float32).reshape(HKV, 1, 2, D) / 64
    return (base + offset).to(TORCH_DTYPE[dtype])


def held(cache: LayerCache) -> torch.Tensor:
    parts = [piece for _, piece in cache.pieces(at_most=5)]
    return torch.cat(parts, dim=1) if parts else torch.empty(HKV, 0, 2, D)


def feed(cache: LayerCache, start: int, stop: int, one_by_one: bool, dtype: str = "float32") -> None:
    if one_by_one:
        for position in range(start, stop):
            row = rows(position, position + 1, dtype)[:, 0]
            if position % 2:  # as beside a device
                cache.append_one(*row.unbind(dim=1))
            else:
                cache.append_here(*(part.contiguous().numpy() for part in row.float().unbind(dim=1)))
    else:
        cache.extend(rows(start, stop, dtype))


def change(cache: LayerCache, kind: str, amount: int, dtype: str = "bfloat16") -> None:
    """`cut` to so many tokens, or so many more, at once or one by one."""
    if kind == "cut":
        cache.truncate(amount)
    else:
        feed(cache, cache.length, cache.length + amount, kind == "one", dtype)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 40)),
        st.tuples(st.just("one"), st.integers(1, 12)),
        st.tuples(st.just("cut"), st.integers(0, 60)),
    ),
    max_size=8,
)


@settings(deadline=None, max_examples=150)
@given(steps, st.integers(0, 5), st.integers(1, 6), st.integers(1, 5), st.sampled_from(["float32", "bfloat16"]))
def test_any_path_leaves_the_same_rows_in_the_same_places(path, sink, local, flush, dtype):
    shape = WindowShape(sink, local, flush)
    cache = make(shape, dtype)
    length = 0
    for kind, amount in path:
        change(cache, kind, amount, dtype)
        length = min(length, amount) if kind == "cut" else length + amount
        assert cache.length == length
        assert torch.equal(held(cache).float(), rows(0, length, dtype).float())
        # Where rows lie depends on the length alone.
        direct = make(shape, dtype)
        direct.extend(rows(0, length, dtype))
        assert cache.store.length == direct.store.length == shape.offloaded(length)
        assert cache.window.used == direct.window.used
        assert torch.equal(cache.window.valid, direct.window.valid)
        assert cache.store.nbytes == direct.store.nbytes
        recent = cache.window.used - min(sink, length)
        assert recent == max(0, length - sink) if cache.store.length == 0 else local <= recent < local + flush


@settings(deadline=None, max_examples=100)
@given(steps, st.integers(0, 5), st.integers(1, 6), st.integers(1, 5))
def test_an_int8_store_has_the_same_bytes_whatever_the_path(path, sink, local, flush):
    """Rows that a cut brings back to the window have been rounded; when they leave again, they are what they were."""
    shape = WindowShape(sink, local, flush)
    cache = make(shape, "int8")
    length = 0
    for kind, amount in path:
        change(cache, kind, amount, "bfloat16")
        length = min(length, amount) if kind == "cut" else length + amount
        direct = make(shape, "int8")
        direct.extend(rows(0, length, "bfloat16"))
        assert cache.store.length == direct.store.length == shape.offloaded(length)
        count = cache.store.length
        assert torch.equal(cache.store.read(0, count), direct.store.read(0, count))
        moved = quantize(rows(sink, sink + count, "bfloat16")).numpy()
        assert np.array_equal(cache.store.read(0, count).numpy(), kernels.widen(moved))
        assert cache.window.rows.dtype == torch.bfloat16
        if length:
            assert torch.equal(cache.copy_rows()[:, sink : sink + count], cache.store.read(0, count).bfloat16())


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 70), st.integers(0, 4), st.integers(1, 80))
def test_runs_cover_exactly_what_the_newest_token_sees(length, sink, window):
    cache = make(WindowShape(sink, 4, 3), window=window)
    cache.extend(rows(0, length))
    seen = set()
    for table, start, stop in cache.runs():
        from_store = table is cache.store.table
        for row in range(start, stop):
            place = cache.store.read(row, row + 1) if from_store else cache.window.rows[:, row : row + 1]
            seen.add(round(float(place[0, 0, 0, 0])))
    assert seen == set(range(max(0, length - window), length))


def test_pieces_give_positions_in_order():
    cache = make(WindowShape(4, 8, 4))
    cache.extend(rows(0, 50))
    expected = 0
    for position, piece in cache.pieces(at_most=7):
        assert position == expected
        assert piece[0, 0, 0, 0] == position
        expected += piece.shape[1]
    assert expected == 50


def assert_same(cache: LayerCache, other: LayerCache) -> None:
    assert cache.length == other.length
    assert cache.store.length == other.store.length
    assert cache.store.nbytes == other.store.nbytes
    assert cache.store.table.rows == other.store.table.rows
    assert torch.equal(cache.window.valid, other.window.valid)
    assert torch.equal(cache.store.read(0, cache.store.length), other.store.read(0, other.store.length))


STEPS_OF_A_CHANGE = [
    (BlockPool, "take"),
    (store_module, "as_tensor"),
    (RowStore, "append_from"),
    (RowStore, "truncate"),
    (Window, "append_here"),
    (Window, "append_one"),
    (Window, "replace"),
    (kernels.RowTable, "append_block"),
]


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("owner", "name", "dtype"),
    [(store_module, "quantize", "int8")]  # only int8 rows are rounded
    + [(owner, name, dtype) for owner, name in STEPS_OF_A_CHANGE for dtype in ("bfloat16", "int8")],
)
def test_an_interrupted_change_is_made_whole_or_not_at_all(monkeypatch, owner, name, dtype, done):
    """Each change is interrupted once inside, before or after a step of it, then compared with one that never was."""
    real: Any = getattr(owner, name)
    armed, interrupted = False, 0

    def once(*args):
        nonlocal armed
        fails, armed = armed, False
        if fails and not done:
            raise KeyboardInterrupt
        result = real(*args)
        if fails:
            raise KeyboardInterrupt
        return result

    shape = WindowShape(2, 4, 4)
    cache, other = make(shape, dtype), make(shape, dtype)
    monkeypatch.setattr(owner, name, once)
    path = [("one", 1)] * 30 + [("extend", 7), ("extend", 13), ("cut", 48), ("cut", 31), ("extend", 20), ("cut", 1)]
    for kind, amount in path:
        armed = True
        try:
            change(cache, kind, amount)
        except KeyboardInterrupt:
            interrupted += 1
            armed = False
            if cache.length == other.length:
                assert_same(cache, other)
                change(cache, kind, amount)
        armed = False
        change(other, kind, amount)
        assert_same(cache, other)
    assert interrupted > 1
