"""Blocks of a store: cut and grown again it takes no new memory, and nobody's rows change over it."""

from __future__ import annotations

import numpy as np
import torch

from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.store import RowStore

BLOCK_ROWS, BLOCKS_PER_SLAB = 64, 32


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
    blocks = [pool.take() for _ in range(BLOCKS_PER_SLAB)]
    for block in blocks[1:]:
        pool.give_back(block)
    again = [pool.take() for _ in range(BLOCKS_PER_SLAB - 1)]
    assert len(pool.places) == BLOCKS_PER_SLAB
    for block in (blocks[0], *again):
        pool.give_back(block)
    assert not pool._free
