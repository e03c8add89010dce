"""Everything remembered of one sequence: its token ids and one `LayerCache` per layer."""

from __future__ import annotations

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
        """Bytes of the blocks that hold offloaded rows."""
        return sum(layer.store.nbytes for layer in self.layers)

    @property
    def index_bytes(self) -> int:
        return sum(layer.index.nbytes for layer in self.layers if layer.index is not None)

    @property
    def segments(self) -> int:
        """Segments of the layer that has most; 0 where nothing is indexed."""
        return max((len(layer.index.segments) for layer in self.layers if layer.index is not None), default=0)

    def commit(self, ids: list[int]) -> None:
        """A forward over `ids` went through every layer."""
        self.ids.extend(ids)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens. Also drops rows that an interrupted forward left in some layers."""
        del self.ids[length:]
        for layer in self.layers:
            layer.truncate(length)

    def release(self) -> None:
        """Forget everything; blocks that no fork shares can be used by others at once."""
        self.truncate(0)

    def rollback(self) -> None:
        """After an interrupted forward: every layer back to the tokens in `ids`."""
        self.truncate(len(self.ids))
