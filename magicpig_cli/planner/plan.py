"""The plan itself: every choice of a run, and how many bytes a sequence then takes on the host and on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from magicpig_cli.config import DEFAULT_TAIL, INDEX_FROM
from magicpig_cli.hardware import Gpu, Speeds
from magicpig_cli.kernels import RowType, row_bytes, window_type
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner.forms import WeightType
from magicpig_cli.planner.indexes import IndexBytes
from magicpig_cli.planner.samplers import NO_OPTIONS, Options, SamplerPlan, SignaturesPlan, TablesPlan
from magicpig_cli.profiles import Profile

Mode = Literal["auto", "lsh", "rabitq", "exact"]

FLUSH = 64  # rows that leave the window at once
BLOCK_ROWS = 1024  # rows per block of the store
MAX_BATCH = 8  # sequences decoded together: beyond it a CPU's matrix products gain nothing (EVIDENCE.md section 3)
MAX_BATCH_GPU = 32


def most_together(profile: Profile, *, on_gpu: bool) -> int:
    """Sequences decoded together at most, before memory has a say: the profile's limit, else the planner's own."""
    return profile.max_batch or (MAX_BATCH_GPU if on_gpu else MAX_BATCH)


@dataclass(frozen=True, slots=True)
class Plan:
    """How sequences are kept and attended to. Token counts are per sequence; bytes are of host memory, or say so."""

    shape: ModelShape
    mode: Mode
    auto_sampler: str  # with which the mode `auto` samples
    K: int  # of lsh
    L: int
    table_ratio: float  # of the offloaded keys, that tables of (K, L) are expected to sample of real text
    budget: float  # of rabitq: share of the indexed keys to sample
    bits: int  # of rabitq, per key
    tail: float | None  # share of what is sampled that is drawn uniformly; None = DEFAULT_TAIL
    target_error: float | None  # of rabitq: by which each head's budget moves; None = it stays
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
    as_stored: bool = False  # int4 is for nothing but what the model's file has in 4 bits; other layers are int8
    flush: int = FLUSH
    block_rows: int = BLOCK_ROWS
    gpu: Gpu | None = None  # that holds weights and windows
    device_weights_bytes: int = 0  # of its memory
    device_reserve: int = 0  # bytes of it left to CUDA itself
    graphs: bool = False  # decode steps are CUDA graphs, which take memory of it too
    signature_room: int = 0  # rabitq: bytes of it for copies of signatures, which it then scans
    speeds: Speeds | None = None  # of this machine; None = times cannot be predicted
    head_shares: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # of rabitq: `attention.shares.Shares`
    profile: str = "built-in"
    reasons: tuple[str, ...] = ()

    @property
    def weight_types(self) -> str:
        """`weight_type`, and the other form where linear layers have two: what keys and values depend on."""
        in_file = self.shape.in_file
        return "int4 and int8" if self.as_stored and in_file and not in_file.all_int4 else self.weight_type

    def sampler_of(self, mode: str) -> str | None:
        """Name of the sampler of a mode; None = exact attention."""
        return {"auto": self.auto_sampler, "exact": None}.get(mode, mode)

    @property
    def sampler(self) -> str | None:
        """Name of the sampler; None where attention is exact."""
        return self.sampler_of(self.mode)

    @property
    def tail_share(self) -> float:
        """Share of what is sampled that is drawn uniformly."""
        return DEFAULT_TAIL if self.tail is None else self.tail

    @property
    def tables(self) -> TablesPlan:
        """lsh, whether this plan samples with it or not."""
        return TablesPlan(self.K, self.L, self.table_ratio, self.tail_share)

    @property
    def signatures(self) -> SignaturesPlan:
        """rabitq, whether this plan samples with it or not."""
        return SignaturesPlan(self.budget, self.bits, self.tail_share, self.target_error)

    @property
    def deciding_shares(self) -> Mapping[int, tuple[float, ...]]:
        """`head_shares` where they decide what this plan samples, else none."""
        return self.head_shares if self.sampler == "rabitq" and self.target_error is None else {}

    @property
    def _sampling(self) -> SamplerPlan:
        """What this plan samples with; tables where it does not, as with no layer they take nothing."""
        return self.signatures if self.sampler == "rabitq" else self.tables

    def options_of(self, sampler: str | None) -> Options:
        """What was chosen for a sampler, by the names of the options; None where an option is not its own."""
        plans: dict[str, SamplerPlan] = {"lsh": self.tables, "rabitq": self.signatures}
        return NO_OPTIONS if sampler is None else plans[sampler].options

    @property
    def sampler_options(self) -> Options:
        """The same of the plan's sampler."""
        return self.options_of(self.sampler)

    @property
    def title(self) -> str:
        """`lsh K=10 L=150`, `rabitq 2%`, `auto error 0.05`, `exact`: for a line that has little room."""
        return self.mode if self.sampler is None else f"{self.mode} {self._sampling.words}"

    @property
    def sampled_ratio(self) -> float:
        """Share of the offloaded keys, as expected of real text."""
        return self._sampling.ratio

    @property
    def expected_error(self) -> float | None:
        """Relative error of attention as expected of real text, a guide; None where attention is exact."""
        return None if self.sampler is None else self._sampling.error

    @property
    def sampled_layers(self) -> tuple[int, ...]:
        """Layers whose decode attention is sampled: not dense, without a sliding window."""
        return () if self.sampler is None else self.sampled_by_any

    @property
    def sampled_by_any(self) -> tuple[int, ...]:
        """The same, whatever the sampler is."""
        return tuple(layer for layer in self.shape.full_layers if layer not in self.dense_layers)

    @property
    def scans_there(self) -> bool:
        """Whether the GPU scans signatures."""
        return self.signature_room > 0 and self.sampler == "rabitq"

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

    @property
    def index(self) -> IndexBytes:
        """What the index of the plan's sampler takes."""
        return self._sampling.index(self.shape, len(self.sampled_layers))

    def index_bytes(self, tokens: int) -> int:
        """The index of one sequence at most, however it grew."""
        return self.index.nbytes(self.indexed_keys(tokens))

    def growth_bytes(self, tokens: int) -> int:
        """What an index needs beside itself while it changes."""
        return self.index.growth_bytes(self.indexed_keys(tokens))

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
        read = [self.indexed_keys(length) for length in (*parents, prefix_tokens)]
        return rows + self.index.shared_bytes(read, self.offloaded(tokens))

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
