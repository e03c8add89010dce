"""An index of signatures depends on the rows alone, whichever way it came to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magicpig_cli.attention.rabitq import signature_directions
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.signatures import JOINED, SavedSignatures, SignatureIndex, first_rows, joined
from magicpig_cli.cache.store import RowStore
from magicpig_cli.errors import MagicpigError
from magicpig_cli.kernels import SIGNATURE_ROWS, SignatureBasis, SignatureBlock

HKV, D, BITS, BLOCK_ROWS = 2, 8, 32, 100  # blocks of the store end where none of the signatures does
BASIS = SignatureBasis(signature_directions(0, 1, D, BITS))


def some_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((HKV, count, 2, D), dtype=np.float32))


def store_of(rows: torch.Tensor, dtype: Any = "float32") -> RowStore:
    store = RowStore(BlockPool(HKV, D, dtype, BLOCK_ROWS))
    store.append(rows if dtype != "bfloat16" else rows.bfloat16())
    return store


def built(store: RowStore, threads: int = 1) -> SignatureIndex:
    index = SignatureIndex(BASIS, store, threads)
    index.extend()
    return index


def content(index: SignatureIndex) -> list[np.ndarray]:
    """Codes, factors and means of all rows, however they are cut into blocks."""
    if not index.parts:
        return []
    whole = joined(index.parts)
    return [whole.codes, whole.factors, whole.means]


def same(a: SignatureIndex, b: SignatureIndex) -> bool:
    mine, others = content(a), content(b)
    return len(mine) == len(others) and all(map(np.array_equal, mine, others))


class File:
    """The index of a layer as a file gives it back."""

    def __init__(self, saved: SavedSignatures) -> None:
        self.sampler = {"sampler": "rabitq", "bits": saved.bits}
        self.facts = saved.facts()
        kinds = {"U8": np.uint8, "U16": np.uint16}
        self.tensors = {}
        for tensor in saved.tensors():
            whole = np.concatenate([np.ascontiguousarray(piece).ravel() for piece in tensor.pieces()] or [[]])
            self.tensors[tensor.name] = whole.astype(kinds[tensor.kind]).reshape(tensor.shape)

    def read(self, name: str) -> np.ndarray:
        return self.tensors[name].copy()

    def damaged(self, how: str) -> MagicpigError:
        return MagicpigError(how)


def restored(saved: SavedSignatures, store: RowStore) -> SignatureIndex:
    return SignatureIndex.restored(SavedSignatures.read(File(saved), HKV, D, BITS), BASIS, store, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("count", [0, 255, 256, 257, 1000, 5000])
def test_covers_complete_blocks_whatever_the_chunks(dtype, count):
    rows = some_rows(count)
    once = built(store_of(rows, dtype))
    assert once.length == count // SIGNATURE_ROWS * SIGNATURE_ROWS
    store = store_of(rows[:, :0], dtype)
    index = SignatureIndex(BASIS, store, 2)
    for start in range(0, count, 300):
        store.append(rows[:, start : start + 300] if dtype != "bfloat16" else rows[:, start : start + 300].bfloat16())
        index.extend()
    assert same(index, once)


def test_one_step_signs_one_block_and_many_of_a_size_become_one():
    rows = some_rows(2 * JOINED * SIGNATURE_ROWS + 100)
    store = store_of(rows)
    index = SignatureIndex(BASIS, store, 1)
    seen = []
    for step in range(2 * JOINED + 3):
        index.step()
        assert index.length == min(step + 1, 2 * JOINED) * SIGNATURE_ROWS
        seen.append(len(index.parts))
    assert max(seen) <= JOINED
    assert [block.n for block in index.parts] == [JOINED * SIGNATURE_ROWS] * 2
    assert same(index, built(store))


def test_joined_blocks_are_a_sequence_s_own():
    """What a fork shares stays shared: memory that is counted once is held once."""
    rows = some_rows(3 * JOINED * SIGNATURE_ROWS)
    store = store_of(rows[:, : JOINED * SIGNATURE_ROWS - 256])
    index = SignatureIndex(BASIS, store, 1)
    for _ in range(JOINED - 1):
        index.step()
    fork_store = store.fork()
    fork = index.fork(fork_store)
    fork_store.append(rows[:, JOINED * SIGNATURE_ROWS - 256 :])
    for _ in range(2 * JOINED + 1):
        fork.step()
    assert all(mine is theirs for mine, theirs in zip(fork.parts, index.parts, strict=False))
    assert len(index.parts) == JOINED - 1
    assert same(fork, built(fork_store))


def test_budgets_begin_anew_after_a_prompt_or_a_cut_and_are_forked():
    store = store_of(some_rows(1024))
    index = built(store)
    index.budgets = np.array([0.1, 0.2], dtype=np.float32)
    fork = index.fork(store.fork())
    assert fork.budgets.tolist() == index.budgets.tolist()
    fork.budgets = fork.budgets * 2
    assert index.budgets.tolist() == [np.float32(0.1), np.float32(0.2)]
    fork.truncate(1024)
    assert fork.budgets is not None
    fork.truncate(1023)
    assert fork.budgets is None
    index.extend()
    assert index.budgets is None


@pytest.mark.parametrize("spoilt", ["codes", "factors", "means", "rows"])
def test_a_file_whose_parts_do_not_fit_is_refused(spoilt):
    file = File(built(store_of(some_rows(700))).saved(700))
    if spoilt == "rows":
        file.facts["rows"] = 500
    else:
        file.tensors[spoilt] = file.tensors[spoilt][:, :-1]
    with pytest.raises(MagicpigError, match="its tensors are not those of"):
        SavedSignatures.read(file, HKV, D, BITS)


@given(rows=st.integers(1, 6), kept=st.integers(1, 6))
def test_first_rows_of_a_block(rows, kept):
    block = built(store_of(some_rows(rows * SIGNATURE_ROWS))).parts[0]
    kept = min(rows, kept)
    part = first_rows(block, kept * SIGNATURE_ROWS)
    assert part.n == kept * SIGNATURE_ROWS
    assert (part is block) == (kept == rows)
    assert isinstance(part, SignatureBlock)
    whole = built(store_of(some_rows(rows * SIGNATURE_ROWS)[:, : kept * SIGNATURE_ROWS])).parts[0]
    assert np.array_equal(part.codes, whole.codes)


class Paths(RuleBasedStateMachine):
    """Stores with indexes, grown, cut, forked and kept in any order, and the plain rows of each."""

    @initialize(dtype=st.sampled_from(["float32", "bfloat16", "int8"]))
    def start(self, dtype: Any) -> None:
        self.dtype, self.written = dtype, 0
        self.pool = BlockPool(HKV, D, dtype, BLOCK_ROWS)
        store = RowStore(self.pool)
        self.held: list[tuple[RowStore, SignatureIndex]] = [(store, SignatureIndex(BASIS, store, 1))]

    def pick(self, data: Any) -> tuple[RowStore, SignatureIndex]:
        return self.held[data.draw(st.integers(0, len(self.held) - 1))]

    @rule(data=st.data(), count=st.sampled_from([1, 64, 200, 256, 700]))
    def append(self, data: Any, count: int) -> None:
        store, _ = self.pick(data)
        self.written += 1
        rows = some_rows(count, seed=self.written)
        store.append(rows.bfloat16() if self.dtype == "bfloat16" else rows)

    @rule(data=st.data(), steps=st.integers(1, 20))
    def step(self, data: Any, steps: int) -> None:
        _, index = self.pick(data)
        for _ in range(steps):
            index.step()

    @rule(data=st.data())
    def extend(self, data: Any) -> None:
        store, index = self.pick(data)
        index.extend()
        assert index.length == store.length // SIGNATURE_ROWS * SIGNATURE_ROWS

    @rule(data=st.data(), length=st.integers(0, 3000))
    def truncate(self, data: Any, length: int) -> None:
        store, index = self.pick(data)
        index.truncate(length)
        store.truncate(length)

    @precondition(lambda self: len(self.held) < 4)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        store, index = self.pick(data)
        other = store.fork()
        self.held.append((other, index.fork(other)))

    @precondition(lambda self: len(self.held) < 4)
    @rule(data=st.data(), length=st.integers(0, 3000))
    def keep(self, data: Any, length: int) -> None:
        """Write the first rows down, grow on, and read them again."""
        store, index = self.pick(data)
        length = min(length, store.length)
        saved = index.saved(length)
        index.step()
        other = store.fork()
        other.truncate(length - data.draw(st.integers(0, length)))  # what the next prompt shares with it
        self.held.append((other, restored(saved, other)))

    @invariant()
    def depends_on_the_rows_alone(self) -> None:
        for store, index in self.held:
            assert index.length <= store.length
            fresh = SignatureIndex(BASIS, store, 1)
            fresh.extend()
            fresh.truncate(index.length)
            assert same(index, fresh)


TestPaths = Paths.TestCase
TestPaths.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
