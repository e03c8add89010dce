"""The plan itself: every choice of a run, and how many bytes a sequence then takes on the host and on the device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from magicpig_cli.config import INDEX_FROM, JOINED_ROWS, REBUILD_GROWTH, TAIL_ROOM, TAIL_ROWS
from magicpig_cli.hardware import Gpu, Speeds
from magicpig_cli.kernels import MAX_SEGMENT_ROWS, RowType, row_bytes, window_type
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.profiles import Profile

Mode = Literal["auto", "lsh", "exact"]
WeightType = Literal["float32", "bfloat16", "int8"]

FLUSH = 64  # rows that leave the window at once
BLOCK_ROWS = 1024  # rows per block of the store
MAX_BATCH = 8  # sequences decoded together: beyond it a CPU's matrix products gain nothing (EVIDENCE.md section 3)
MAX_BATCH_GPU = 32


def most_together(profile: Profile, *, on_gpu: bool) -> int:
    """Sequences decoded together at most, before memory has a say: the profile's limit, else the planner's own."""
    return profile.max_batch or (MAX_BATCH_GPU if on_gpu else MAX_BATCH)


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
class Plan:
    """How sequences are kept and attended to. Token counts are per sequence; bytes are of host memory, or say so."""

    shape: ModelShape
    mode: Mode
    K: int
    L: int
    sink: int
    local: int
    dense_layers: tuple[int, ...]
    threads: int
    context: int
    row_dtype: RowType  # of the store; windows hold `window_type` of it
    weight_type: WeightType
    weights_bytes: int  # of host memory; 0 when the weights lie on a GPU
    budget_bytes: int  # for keys, values and indexes of all sequences
    max_batch: int  # sequences decoded together, at most; what a GPU has room for is taken into account
    windows_on_host: bool  # a GPU holds the windows itself
    chunk: int  # prompt tokens per forward
    auto_lsh_from: int  # `auto`: shorter sequences are attended exactly
    host_reserve: int  # bytes left to the program itself
    sampled_ratio: float  # of the offloaded keys, as expected of real text
    flush: int = FLUSH
    block_rows: int = BLOCK_ROWS
    gpu: Gpu | None = None  # that holds weights and windows
    device_weights_bytes: int = 0  # of its memory
    device_reserve: int = 0  # bytes of it left to CUDA itself
    speeds: Speeds | None = None  # of this machine; None = times cannot be predicted
    profile: str = "built-in"
    reasons: tuple[str, ...] = ()

    @property
    def sampled_layers(self) -> tuple[int, ...]:
        """Layers whose decode attention is sampled: not dense, without a sliding window."""
        if self.mode == "exact":
            return ()
        return tuple(layer for layer in self.shape.full_layers if layer not in self.dense_layers)

    def offloaded(self, tokens: int) -> int:
        """How many keys of a sequence of `tokens` are in the host store, per layer and KV head."""
        return max(0, tokens - self.sink - self.local) // self.flush * self.flush

    def kv_bytes(self, tokens: int) -> int:
        """Rows of the store of one sequence, all layers: whole blocks, and the next one from half of the last on."""
        rows = self.offloaded(tokens)
        blocks = -(-rows // self.block_rows)
        if blocks and 2 * (blocks * self.block_rows - rows) <= self.block_rows:
            blocks += 1
        return self._rows_bytes(blocks * self.block_rows, self.row_dtype)

    @property
    def window_rows(self) -> int:
        """Rows that stay near the model, per layer and KV head."""
        return self.sink + self.local + self.flush

    def window_bytes(self) -> int:
        """Host memory of the windows of one sequence, whatever its length."""
        return self._window_bytes() if self.windows_on_host else 0

    def device_window_bytes(self) -> int:
        """GPU memory of the windows of one sequence, whatever its length."""
        return 0 if self.windows_on_host else self._window_bytes()

    def _window_bytes(self) -> int:
        return self._rows_bytes(self.window_rows, window_type(self.row_dtype))

    def _rows_bytes(self, rows: int, dtype: RowType) -> int:
        """Keys and values of `rows` tokens in every layer."""
        return self.shape.layers * self.shape.kv_heads * rows * row_bytes(self.shape.head_dim, dtype)

    def indexed_keys(self, tokens: int) -> int:
        """Keys that are in the index of each sampled layer and KV head."""
        keys = self.offloaded(tokens)
        return 0 if keys < INDEX_FROM or (self.mode == "auto" and tokens < self.auto_lsh_from) else keys

    def segment_bytes(self, rows: int) -> int:
        """Ids of `rows` rows and offsets of one segment, all KV heads of one layer."""
        return 2 * self.L * self.shape.kv_heads * (rows + (1 << self.K) + 1)

    def index_bytes(self, tokens: int) -> int:
        """Tables of one sequence at most: 16-bit ids and offsets of its segments, and room for the codes of the tail.

        At most, because one that is read at once has fewer segments than one that grows turn by turn.
        """
        keys = self.indexed_keys(tokens)
        if not keys:
            return 0
        segments = most_segments(keys)
        ids = keys if segments else 0  # fewer are all in the tail
        numbers = self.L * self.shape.kv_heads * (ids + segments * ((1 << self.K) + 1) + TAIL_ROOM) + TAIL_ROOM
        return 2 * len(self.sampled_layers) * numbers

    def growth_bytes(self, tokens: int) -> int:
        """What an index needs beside itself while it changes: in every layer a segment in the making (decode), in one
        layer at a time a long one and the codes of one head (prefill).

        A cut of a long segment holds for a moment, in one layer, what it leaves and what that becomes with its
        neighbours: two long ones. From four sampled layers on the second fits into what is counted for joining.
        """
        keys = self.indexed_keys(tokens)
        if not keys or not self.sampled_layers:
            return 0
        longest = min(keys, MAX_SEGMENT_ROWS)
        joining = len(self.sampled_layers) * self.segment_bytes(min(keys, JOINED_ROWS))
        return joining + self.segment_bytes(longest) + 2 * self.L * longest

    def sequence_bytes(self, tokens: int) -> int:
        """Everything that one sequence takes in host memory."""
        kept = self.kv_bytes(tokens) + self.window_bytes() + self.index_bytes(tokens)
        return kept + self.growth_bytes(tokens)

    def shared_bytes(self, prefix_tokens: int, tokens: int, parents: Sequence[int] = ()) -> int:
        """What a sequence that was forked from one of `prefix_tokens` and grows to `tokens` at most shares with it.

        parents: lengths of the prefixes that this prefix was itself forked from, the shortest first. What the sequence
        takes beside its prefix is never more than `sequence_bytes(tokens)` less this, whatever of the growth is prompt
        and whatever answer, unless it is cut to less than `prefix_tokens`.
        """
        blocks = min(self.offloaded(prefix_tokens), self.offloaded(tokens)) // self.block_rows
        rows = self._rows_bytes(blocks * self.block_rows, self.row_dtype)
        return rows + len(self.sampled_layers) * self._shared_index_bytes((*parents, prefix_tokens), tokens)

    def _shared_index_bytes(self, prefixes: Sequence[int], tokens: int) -> int:
        """Of one layer: segments of the last index built at once that no prompt, answer or longer prefix can change.

        A segment stays unless what follows it is half as long (it is joined with that), or the index is built anew.
        """
        built = self._keys_behind_mean(prefixes)
        grown = self.offloaded(tokens) - built
        if not built or self.offloaded(tokens) > built * REBUILD_GROWTH:
            return 0
        full, rest = divmod(built, MAX_SEGMENT_ROWS)
        shared = full * self.segment_bytes(MAX_SEGMENT_ROWS)
        return shared + (self.segment_bytes(rest) if rest > max(TAIL_ROWS, 2 * grown) else 0)

    def _keys_behind_mean(self, prefixes: Sequence[int]) -> int:
        """Keys in the index when it was last built at once, of a sequence read to these lengths one after the other."""
        built = 0
        for tokens in prefixes:
            keys = self.indexed_keys(tokens)
            if keys > built * REBUILD_GROWTH:
                built = keys
        return built

    def sequences_that_fit(self, tokens: int) -> int:
        """How many sequences of `tokens` can be decoded together: at least 1, at most `max_batch`."""
        return max(1, min(self.max_batch, self.budget_bytes // max(1, self.sequence_bytes(tokens))))

    @property
    def batch_size(self) -> int:
        """Sequences of the full context that fit together."""
        return self.sequences_that_fit(self.context)

    def longest_that_fits(self, at_most: int) -> int:
        """The longest sequence in tokens, up to `at_most`, that fits the budget; 0 if none does."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.sequence_bytes(middle) <= self.budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low
