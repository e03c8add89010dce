"""Everything remembered of one sequence: its token ids and one `LayerCache` per layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from magicpig_cli.cache.layer import LayerCache


@dataclass(eq=False)
class Sequence:
    """`ids` are the tokens whose rows every layer holds. Made by `Engine.new_sequence`."""

    layers: list[LayerCache]
    ids: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the blocks that hold offloaded rows, as if no fork shared them."""
        return sum(layer.store.nbytes for layer in self.layers)

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes, as if no fork shared them."""
        return sum(layer.index.nbytes for layer in self.layers if layer.index is not None)

    @property
    def segments(self) -> int:
        """Pieces of the index in the layer that has most; 0 where nothing is indexed."""
        return max((len(layer.index.parts) for layer in self.layers if layer.index is not None), default=0)

    def commit(self, ids: list[int]) -> None:
        """A forward over `ids` went through every layer."""
        self.ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Also drops rows that an interrupted forward left in some layers."""
        del self.ids[length:]
        for layer in self.layers:
            layer.truncate(length)

    def fork(self) -> Sequence:
        """A sequence that holds the same tokens and shares what is complete of their rows and indexes.

        Both go on as if they were alone, and each may be released first.
        """
        return Sequence([layer.fork() for layer in self.layers], list(self.ids))

    def release(self) -> None:
        """Give back everything, windows and indexes too. What no fork shares can be used by others at once.

        The sequence cannot be continued afterwards. Releasing it again does nothing.
        """
        self.ids = []
        for layer in self.layers:
            layer.release()
        self.layers = []

    def rollback(self) -> None:
        """After an interrupted forward: every layer back to the tokens in `ids`."""
        self.truncate(len(self.ids))


def index_bytes(sequences: Iterable[Sequence]) -> int:
    """Bytes of the indexes of these sequences together: what several share counts once."""
    indexes = [layer.index for sequence in sequences for layer in sequence.layers if layer.index is not None]
    parts = {id(part): part for index in indexes for part in index.parts}
    return sum(index.own_bytes for index in indexes) + sum(part.nbytes for part in parts.values())
