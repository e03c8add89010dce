"""Blocks of a store: cut and grown again it takes no new memory, and nobody's rows change over it.

The pool knows who holds what: blocks are free when their last holder has given them back or has forgotten them.
"""

from __future__ import annotations

import errno

import numpy as np
import pytest
import torch

from magicpig_cli.cache import blocks as blocks_module
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.store import RowStore
from magicpig_cli.kernels import memory
from magicpig_cli.kernels.memory import touch

BLOCK_ROWS = 64


def rows(value: float, count: int) -> torch.Tensor:
    return torch.full((1, count, 2, 8), value)


class CountingPool(BlockPool):
    """Remembers where the blocks were that it gave."""

    def __init__(self) -> None:
        super().__init__(1, 8, "float32", BLOCK_ROWS)
        self.places: set[int] = set()

    def take(self) -> np.ndarray:
        block = super().take()
        self.places.add(block.ctypes.data)
        return block


def test_answers_taken_back_and_given_again_take_no_new_memory():
    pool = CountingPool()
    store = RowStore(pool)
    store.append(rows(1.0, 28))
    for _ in range(100):
        store.append(rows(2.0, 3 * BLOCK_ROWS))
        store.truncate(28)
    assert len(pool.places) == 4  # one that stays, two more, one made ready
    assert store.nbytes == pool.block_bytes


def test_rows_are_those_that_were_written_last_and_other_stores_keep_theirs():
    pool = BlockPool(1, 8, "float32", BLOCK_ROWS)
    cut, other = RowStore(pool), RowStore(pool)
    for turn in range(6):
        cut.append(rows(float(turn), 2 * BLOCK_ROWS + 7 * turn))
        cut.truncate(20 * turn + 1)
        other.append(rows(10.0 + turn, BLOCK_ROWS - 5))
    assert torch.equal(cut.read(100, 101), rows(5.0, 1))
    kept = torch.cat([rows(10.0 + turn, BLOCK_ROWS - 5) for turn in range(6)], dim=1)
    assert torch.equal(other.read(0, other.length), kept)
    assert np.array_equal(other.table.read(0, other.length), kept.numpy())


def test_a_slab_of_which_all_blocks_are_given_back_is_let_go():
    pool = CountingPool()
    first = pool.take()
    slab = pool.kept_bytes
    blocks = [pool.take() for _ in range(slab // pool.block_bytes - 1)]
    assert pool.kept_bytes == slab
    for block in blocks:
        pool.give_back(block)
    again = [pool.take() for _ in blocks]
    assert len(pool.places) == len(blocks) + 1
    for block in (first, *again):
        pool.give_back(block)
    assert pool.nbytes == pool.kept_bytes == 0


def test_a_block_with_two_holders_is_free_when_both_have_given_it_back():
    pool = CountingPool()
    mine = pool.take()
    assert not pool.shared(mine)
    yours = pool.share(mine)
    assert yours is not mine
    assert np.shares_memory(yours, mine)
    assert pool.shared(mine)
    assert pool.shared(yours)
    assert pool.nbytes == pool.block_bytes
    pool.give_back(mine)
    assert not pool.shared(yours)
    other = pool.take()
    assert not np.shares_memory(other, yours)
    pool.give_back(yours)
    assert pool.nbytes == pool.block_bytes
    assert np.shares_memory(pool.take(), mine)


def test_what_is_not_held_cannot_be_given_back_shared_or_asked_about():
    pool = CountingPool()
    mine = pool.take()
    yours = pool.share(mine)
    pool.give_back(mine)
    for use in (pool.give_back, pool.share, pool.shared):
        with pytest.raises(ValueError, match="want one that was handed out"):
            use(mine)  # the hold of `yours` is not its
        with pytest.raises(ValueError, match="want one that was handed out"):
            use(yours.copy())
        with pytest.raises(ValueError, match="want one that was handed out"):
            use(CountingPool().take())
    assert pool.nbytes == pool.block_bytes
    pool.give_back(yours)
    assert pool.nbytes == 0


def test_what_is_forgotten_is_free():
    pool = CountingPool()
    mine = pool.take()
    yours = pool.share(mine)
    place = mine.ctypes.data
    del mine
    assert not pool.shared(yours)
    assert pool.nbytes == pool.block_bytes
    del yours
    assert pool.nbytes == pool.kept_bytes == 0
    store = RowStore(pool)
    store.append(rows(1.0, 5 * BLOCK_ROWS))
    fork = store.fork()
    del store
    touch().result()  # the worker has let go of the block that was being made ready
    assert pool.nbytes == fork.nbytes
    del fork
    touch().result()
    assert pool.nbytes == 0
    assert place in pool.places


def test_what_is_given_back_as_it_is_forgotten_counts_once():
    pool = CountingPool()
    mine = pool.take()
    pool.give_back(pool.share(mine))
    assert pool.nbytes == pool.block_bytes
    pool.give_back(pool.share(mine))
    assert not pool.shared(mine)
    assert pool.nbytes == pool.block_bytes


def test_slabs_grow_with_what_is_in_use(monkeypatch):
    """A process may have 65,530 mappings, whatever memory the machine has."""
    monkeypatch.setattr(blocks_module, "_SLABS_PER_POOL", 8)
    pool = BlockPool(1, 128, "float32", 2048)  # of 2 MiB
    held = [pool.take() for _ in range(2000)]  # nobody touches them
    assert len(pool._slabs) <= 8 * 9  # 8 for each doubling
    assert pool.kept_bytes <= 1.2 * pool.nbytes
    for block in held:
        pool.give_back(block)
    assert pool.kept_bytes == 0


@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (8, 128)])
def test_a_batch_of_very_different_lengths_keeps_little_that_it_does_not_use(heads, head_dim):
    """Prompts are read in turns and answers grow together, so that blocks of all sequences are mixed."""
    pool = BlockPool(heads, head_dim, "bfloat16", 1024)
    draw = np.random.default_rng(0)
    running: list[tuple[int, list[np.ndarray]]] = []
    held = kept = 0
    for _ in range(2000):
        while len(running) < 8:
            running.append((int(30 * 2 ** draw.uniform(0, 6)), []))
        for sequence in list(running):
            wanted, blocks = sequence
            blocks.extend(pool.take() for _ in range(30))
            if len(blocks) >= wanted:
                running.remove(sequence)
                for block in blocks:
                    pool.give_back(block)
        held += pool.nbytes
        kept += pool.kept_bytes
    assert kept <= 1.05 * held
    for _, blocks in running:
        for block in blocks:
            pool.give_back(block)
    assert pool.kept_bytes == 0


def test_where_there_is_no_memory_for_another_block_all_is_as_before(monkeypatch):
    pool = BlockPool(1, 8, "float32", BLOCK_ROWS)
    store = RowStore(pool)
    store.append(rows(1.0, 100))
    store.truncate(10)
    held = pool.nbytes
    fork = store.fork()
    free = pool.kept_bytes // pool.block_bytes - pool.nbytes // pool.block_bytes

    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(memory.mmap, "mmap", refuse)
    for _ in range(2):
        with pytest.raises(MemoryError, match=r"refuses another [0-9,]+ bytes: Cannot allocate memory"):
            store.append(rows(2.0, (free + 3) * BLOCK_ROWS))
        store.truncate(10)
        assert torch.equal(store.read(0, 10), fork.read(0, 10))
    fork.truncate(0)
    assert pool.nbytes == held
