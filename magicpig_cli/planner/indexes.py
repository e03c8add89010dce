"""Bytes of what stands beside the rows so that they can be sampled, by sampler: of one sequence, in all sampled layers.

`keys` are keys of each sampled layer and KV head that are in the store, from which a sequence is long enough to be
sampled on; fewer are given as 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from magicpig_cli.config import HASH_ROWS, JOINED_ROWS, REBUILD_GROWTH, TAIL_ROOM, TAIL_ROWS
from magicpig_cli.kernels import MAX_SEGMENT_ROWS, SIGNATURE_ROWS, signature_bytes


class IndexBytes(Protocol):
    """What a plan asks about an index."""

    def nbytes(self, keys: int) -> int:
        """Of the index at most, however it grew."""
        ...

    def formula(self, keys: int) -> str:
        """How `nbytes` comes about."""
        ...

    def growth_bytes(self, keys: int) -> int:
        """What it needs beside itself at most, while it changes."""
        ...

    def growth_formula(self, keys: int) -> str: ...

    def shared_bytes(self, prefixes: Sequence[int], keys: int) -> int:
        """Of the index of a sequence that was read to these numbers of keys one after the other, what no fork of it
        that grows to `keys` can change."""
        ...

    def read_at_once(self, keys: int) -> tuple[int, str]:
        """(bytes, formula) of the index of a sequence that was read at once."""
        ...

    def expected_growth(self, keys: int, generated: int) -> tuple[int, int, str]:
        """What is expected beside it with answers of `generated` tokens: (bytes once, bytes per sequence, formula)."""
        ...

    def drawn(self) -> tuple[int, str]:
        """(bytes, formula) of the random directions of one copy."""
        ...

    def device_hashing(self) -> tuple[int, str]:
        """(bytes, formula) of a GPU's memory while it hashes keys."""
        ...

    def device_copy(self, keys: int) -> tuple[int, str]:
        """(bytes, formula) of what a GPU that scans the index holds of it."""
        ...


def most_segments(keys: int) -> int:
    """The most segments that an index over `keys` keys can have, however it grew and was cut.

    A segment has TAIL_ROWS keys or more, and neighbours stay apart only if the older is more than twice the newer or if
    both together exceed JOINED_ROWS. So the shortest list rises by doubling up to that size, and goes on with segments
    of about half of it. (A small one before a large one would be joined with it, unless that exceeds MAX_SEGMENT_ROWS.)
    """
    rising = [TAIL_ROWS]
    while 2 * rising[-1] + 1 <= JOINED_ROWS:
        rising.append(2 * rising[-1] + 1)
    beyond = max(0, keys - sum(rising)) // (JOINED_ROWS + 1 - rising[-1])
    return bisect_right(list(accumulate(rising)), keys) + beyond


@dataclass(frozen=True, slots=True)
class TablesBytes:
    """Hash tables (`cache.index`): 16-bit ids and offsets of segments, and room for the codes of a tail."""

    layers: int
    kv_heads: int
    head_dim: int
    K: int
    L: int

    def segment_bytes(self, rows: int) -> int:
        """Ids of `rows` rows and offsets of one segment, all KV heads of one layer."""
        return 2 * self.L * self.kv_heads * (rows + (1 << self.K) + 1)

    def nbytes(self, keys: int) -> int:
        """At most, because one that is read at once has fewer segments than one that grows turn by turn."""
        return self._nbytes(keys, most_segments(keys))

    def _nbytes(self, keys: int, segments: int) -> int:
        if not keys:
            return 0
        ids = keys if segments else 0  # fewer are all in the tail
        numbers = self.L * self.kv_heads * (ids + segments * ((1 << self.K) + 1) + TAIL_ROOM) + TAIL_ROOM
        return 2 * self.layers * numbers

    def formula(self, keys: int) -> str:
        return self._formula(keys, most_segments(keys))

    def _formula(self, keys: int, segments: int) -> str:
        ids = keys if segments else 0
        inner = f"{ids:,} ids + {segments} segments × {(1 << self.K) + 1:,} offsets + {TAIL_ROOM:,} codes"
        return f"{self.layers} layers × {self.kv_heads} heads × {self.L} tables × ({inner}) × 2 B"

    def growth_bytes(self, keys: int) -> int:
        """In every layer a segment in the making (decode), in one layer at a time a long one and the codes of one head
        (prefill).

        A cut of a long segment holds for a moment, in one layer, what it leaves and what that becomes with its
        neighbours: two long ones. From four sampled layers on the second fits into what is counted for joining.
        """
        if not keys or not self.layers:
            return 0
        longest = min(keys, MAX_SEGMENT_ROWS)
        joining = self.layers * self.segment_bytes(min(keys, JOINED_ROWS))
        return joining + self.segment_bytes(longest) + 2 * self.L * longest

    def growth_formula(self, keys: int) -> str:
        joined, longest = min(keys, JOINED_ROWS), min(keys, MAX_SEGMENT_ROWS)
        each = f"a segment of {joined:,} keys in the making in each of {self.layers} layers"
        return f"({each}, one of {longest:,} in one layer)"

    def shared_bytes(self, prefixes: Sequence[int], keys: int) -> int:
        """Segments of the last index built at once that no prompt, answer or longer prefix can change.

        A segment stays unless what follows it is half as long (it is joined with that), or the index is built anew.
        """
        built = 0  # keys in the index when it was last built at once
        for read in prefixes:
            if read > built * REBUILD_GROWTH:
                built = read
        grown = keys - built
        if not built or keys > built * REBUILD_GROWTH:
            return 0
        full, rest = divmod(built, MAX_SEGMENT_ROWS)
        shared = full * self.segment_bytes(MAX_SEGMENT_ROWS)
        return self.layers * (shared + (self.segment_bytes(rest) if rest > max(TAIL_ROWS, 2 * grown) else 0))

    def read_at_once(self, keys: int) -> tuple[int, str]:
        segments = 0 if keys <= TAIL_ROWS else -(-keys // MAX_SEGMENT_ROWS)
        return self._nbytes(keys, segments), self._formula(keys, segments)

    def expected_growth(self, keys: int, generated: int) -> tuple[int, int, str]:
        """Codes of one head while the index is built, and segments that answers make beside what is there.

        A segment in the making begins with a full tail, all of it generated, and takes in segments that are at most
        twice what follows them: three times the answer at most.
        """
        longest = min(keys, MAX_SEGMENT_ROWS)
        codes = 2 * self.L * longest if keys > TAIL_ROWS else 0
        joined = min(keys, JOINED_ROWS, 3 * generated) if generated >= TAIL_ROWS else 0
        joining = self.layers * self.segment_bytes(joined) if joined else 0
        words = f"codes of one head: {self.L} tables × {longest:,} keys × 2 B"
        if joined:
            words += f"; a segment of {joined:,} keys in the making in {self.layers} layers of each sequence"
        return codes, joining, words

    def drawn(self) -> tuple[int, str]:
        size = self.layers * self.head_dim * self.K * self.L * 4
        return size, f"{self.layers} × {self.head_dim} × {self.K * self.L:,} values × 4 B"

    def device_hashing(self) -> tuple[int, str]:
        """Projections of the rows of one head that are hashed at a time, and what packing their signs makes of them."""
        signs = self.K * self.L
        return HASH_ROWS * signs * (4 + 4 + 4 + 1), f"{HASH_ROWS:,} keys × {signs:,} signs × 13 B"

    def device_copy(self, keys: int) -> tuple[int, str]:
        return 0, "tables are on the host"


@dataclass(frozen=True, slots=True)
class SignaturesBytes:
    """Signatures (`cache.signatures`): of each complete block of SIGNATURE_ROWS keys the bits, a 16-bit factor per key
    and a 16-bit mean."""

    layers: int
    kv_heads: int
    head_dim: int
    bits: int

    def _layer_bytes(self, keys: int) -> int:
        """Of the blocks."""
        blocks = keys // SIGNATURE_ROWS
        return self.kv_heads * blocks * (SIGNATURE_ROWS * signature_bytes(self.bits) + 2 * self.head_dim)

    def nbytes(self, keys: int) -> int:
        return self.layers * self._layer_bytes(keys)

    def formula(self, keys: int) -> str:
        blocks = keys // SIGNATURE_ROWS
        key = signature_bytes(self.bits)
        inner = f"{blocks * SIGNATURE_ROWS:,} keys × {key} B + {blocks:,} means × {2 * self.head_dim} B"
        return f"{self.layers} layers × {self.kv_heads} heads × ({inner})"

    def growth_bytes(self, keys: int) -> int:
        """Small blocks and what they are joined into, or a block and what is left of it by a cut, in one layer."""
        return self._layer_bytes(keys) if self.layers else 0

    def growth_formula(self, keys: int) -> str:
        return f"{self.kv_heads} heads × {keys:,} keys, in one layer"

    def shared_bytes(self, prefixes: Sequence[int], keys: int) -> int:
        """All of the prefix's blocks: a block depends on its rows alone, and only a sequence's own ones are joined."""
        return self.layers * self._layer_bytes(min(prefixes[-1], keys)) if prefixes else 0

    def read_at_once(self, keys: int) -> tuple[int, str]:
        return self.nbytes(keys), self.formula(keys)

    def expected_growth(self, keys: int, generated: int) -> tuple[int, int, str]:
        return 0, 0, "nothing"

    def drawn(self) -> tuple[int, str]:
        size = self.layers * self.head_dim * self.bits * 4
        return size, f"{self.layers} × {self.head_dim} × {self.bits} values × 4 B"

    def device_hashing(self) -> tuple[int, str]:
        return 0, "on the host"

    def device_copy(self, keys: int) -> tuple[int, str]:
        """Bits and factors; what means contribute to a score is sent. Small blocks that are joined, or what is left of
        a block by a cut, stand beside it for a moment, in one layer."""
        signed, each = keys // SIGNATURE_ROWS * SIGNATURE_ROWS, signature_bytes(self.bits)
        layers = self.layers + 1
        words = f"({self.layers} + 1) layers × {self.kv_heads} heads × {signed:,} keys × {each} B"
        return layers * self.kv_heads * signed * each if self.layers else 0, words
