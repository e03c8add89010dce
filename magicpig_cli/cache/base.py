"""What a cache asks of an index, whichever sampler it belongs to: tables (`cache.index`) or signatures
(`cache.signatures`).

An index covers rows [0, length) of one store, and decode steps sample from these; what is stored beyond is attended
exactly, so an index may always lag behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from magicpig_cli.cache.store import RowStore
from magicpig_cli.errors import MagicpigError


class Part(Protocol):
    """A piece of an index that never changes once it is made; forks share it."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of an index in a file."""

    name: str  # after `index.LAYER.`
    kind: str  # of safetensors
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]  # its contents in order, made when it is their turn


class SavedIndex(Protocol):
    """What an index over the first rows of a store is made of, as it was when that was asked."""

    def facts(self) -> dict[str, Any]:
        """What the tensors do not tell, as JSON has it."""
        ...

    def tensors(self) -> Iterator[SavedTensor]: ...


class IndexReader(Protocol):
    """The index of one layer in a file."""

    @property
    def sampler(self) -> dict[str, Any]:
        """What it depends on beside keys and values (`engine.identity.sampler_of`)."""
        ...

    @property
    def facts(self) -> dict[str, Any]: ...

    def read(self, name: str) -> np.ndarray:
        """A verified copy of a tensor. Raises MagicpigError."""
        ...

    def damaged(self, how: str) -> MagicpigError:
        """What to raise where the parts do not fit each other."""
        ...


class Index(Protocol):
    """What decode steps sample from. To be inherited from."""

    sampler: str  # name of the sampler that it is for

    @property
    def length(self) -> int:
        """Rows that are sampled from."""
        ...

    @property
    def parts(self) -> Sequence[Part]:
        """What forks share."""
        ...

    @property
    def own_bytes(self) -> int:
        """Bytes beside `parts`, which no fork shares."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, as if no fork shared the parts."""
        return self.own_bytes + sum(part.nbytes for part in self.parts)

    @property
    def outgrown(self) -> bool:
        """Whether the store has grown so much that the index should be made anew, at the end of a prompt."""
        ...

    def extend(self) -> None:
        """After a prompt: take in all rows that were stored since."""
        ...

    def step(self) -> None:
        """Before a decode step: a small piece of what there is to do."""
        ...

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        ...

    def fork(self, store: RowStore) -> Index:
        """The same index over a fork of its store. Both go on as if they were alone."""
        ...

    def saved(self, length: int) -> SavedIndex:
        """What it is made of below row `length`, whatever becomes of it meanwhile."""
        ...
