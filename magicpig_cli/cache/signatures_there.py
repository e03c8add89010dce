"""Copies of signatures in the memory of a device that scans them (docs/decisions/022).

A block of signatures never changes once it is made, and forks share it: so there is one copy of a block, whichever
indexes it belongs to, made when it is first asked for, and gone with the block. Whatever an index does (it grows, is
cut, joined, forked, read of a file), it ends up with blocks, and nothing else needs to be kept in step. The host's
blocks stay: they are what is saved, and what is scanned where a device has no room.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magicpig_cli.cache.staging import Kept, Staging
from magicpig_cli.kernels import SIGNATURE_ROWS, SignatureBlock, jitter_pool


@dataclass(frozen=True, slots=True)
class BlockThere:
    """A block cell by cell: what follows each other in memory can be scanned by one call, whatever blocks it is of."""

    codes: torch.Tensor  # uint8 [n/256, Hkv, 8, bits/4, 16]: groups of 32 rows as `SignatureBlock` has them
    factors: torch.Tensor  # bfloat16 [n/256, Hkv, 256]
    kept: Kept | None = None  # by a staging, if it made the copy


def by_cell(block: SignatureBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and factors of a block in that order, contiguous copies in host memory."""
    heads, cells = block.codes.shape[0], block.n // SIGNATURE_ROWS
    codes = block.codes.reshape(heads, cells, -1, *block.codes.shape[2:]).swapaxes(0, 1)
    factors = block.factors.reshape(heads, cells, SIGNATURE_ROWS).swapaxes(0, 1)
    return (
        torch.from_numpy(np.ascontiguousarray(codes)),
        torch.from_numpy(np.ascontiguousarray(factors).view(np.int16)).view(torch.bfloat16),
    )


@dataclass(frozen=True, slots=True)
class Copies:
    """What a scan reads. Whoever gives a stream something to do with it holds it until that is done."""

    blocks: list[BlockThere]
    jitter: Kept  # the pool of `kernels.jitter_pool` twice, one behind the other


class SignaturesThere:
    """Copies of blocks on the device of a staging, which is none of the host's, and of the pool of jitter, which all
    scans add. room: bytes that blocks may take."""

    def __init__(self, staging: Staging, room: int) -> None:
        self._staging, self._room = staging, room
        self._kept: dict[int, BlockThere] = {}  # by the identity of blocks that live
        self._jitter: Kept | None = None
        self._lock = threading.Lock()  # halves of a batch may share a block, and want it at the same time

    @property
    def nbytes(self) -> int:
        """Bytes of the device that all copies take."""
        return sum(there.kept.memory.nbytes for there in list(self._kept.values()) if there.kept is not None)

    def of(self, blocks: Sequence[SignatureBlock]) -> Copies | None:
        """Copies of these blocks, for what is given to this thread's stream; None: there is no room for them.

        Raises torch.OutOfMemoryError.
        """
        with self._lock:
            more = sum(block.codes.nbytes + block.factors.nbytes for block in blocks if id(block) not in self._kept)
            if more and self.nbytes + more > self._room:
                return None
            if self._jitter is None:
                self._jitter = self._staging.put("signatures", torch.tensor(jitter_pool()).repeat(2))
            jitter = self._jitter
            there = [self._kept.get(id(block)) or self._put(block) for block in blocks]
        stream = self._staging.device.current_stream()
        stream.wait_event(jitter.come)
        for block in there:
            assert block.kept is not None
            stream.wait_event(block.kept.come)
        return Copies(there, jitter)

    def _put(self, block: SignatureBlock) -> BlockThere:
        kept = self._staging.put("signatures", *by_cell(block))
        codes, factors = kept.tensors
        there = BlockThere(codes, factors, kept)
        ending = weakref.finalize(block, _forget, weakref.ref(self), id(block))
        ending.atexit = False  # type: ignore[misc]  # the device may be gone by then
        self._kept[id(block)] = there  # last: what is kept is forgotten with its block, whatever a signal does
        return there

    def clear(self) -> None:
        """Let go of all copies; they are made again when they are asked for."""
        with self._lock:
            self._kept.clear()
            self._jitter = None


def _forget(owner: weakref.ref[SignaturesThere], block: int) -> None:
    """A block is gone, and so is its copy, if its owner is not gone before."""
    there = owner()
    if there is not None:
        there._kept.pop(block, None)
