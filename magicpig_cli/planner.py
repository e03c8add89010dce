"""What a run will do on this machine with this model: a pure function from facts and wishes to a Plan. No I/O.

Every choice leaves one line in `Plan.reasons`; what cannot work is refused here, before any weight is read.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, cast

from magicpig_cli.config import (
    DEFAULT_K,
    DEFAULT_L,
    DEFAULT_LOCAL,
    DEFAULT_SINK,
    INDEX_FROM,
    JOINED_ROWS,
    MAX_K,
    MAX_L,
    MAX_SEED,
    TAIL_ROOM,
    TAIL_ROWS,
    AttentionOptions,
    ModelOptions,
    Settings,
)
from magicpig_cli.errors import ContextError, MemoryBudgetError, UsageError
from magicpig_cli.hardware import Hardware
from magicpig_cli.kernels import MAX_SEGMENT_ROWS, RowType, row_bytes, window_type
from magicpig_cli.model.shape import ModelShape, read_dtype
from magicpig_cli.profiles import BUILT_IN, Profile
from magicpig_cli.units import MAX_SIZE, format_bytes

Mode = Literal["auto", "lsh", "exact"]
WeightType = Literal["float32", "bfloat16", "int8"]

FLUSH = 64  # rows that leave the window at once
CHUNK = 512  # prompt tokens per forward: activations stay small and Ctrl-C is answered
BLOCK_ROWS = 1024  # rows per block of the store
AUTO_LSH_FROM = 4096  # `auto`: shorter sequences are attended exactly
MAX_BATCH = 8  # sequences decoded together: beyond it a CPU's matrix products gain nothing (EVIDENCE.md section 3)
MAX_BATCH_GPU = 32
RUNTIME_BYTES = 1 << 30  # Python, torch, activations, logits, projections

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_ROWS_REASON = {
    "float32": "parity mode",
    "bfloat16": "half the memory",
    "int8": "a quarter of the memory, coarser",
}


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
    """How sequences are kept and attended to. Token counts are per sequence, bytes are of host memory."""

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
    max_batch: int
    windows_on_host: bool  # a GPU holds the windows itself
    flush: int = FLUSH
    chunk: int = CHUNK
    block_rows: int = BLOCK_ROWS
    auto_lsh_from: int = AUTO_LSH_FROM
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

    def window_bytes(self) -> int:
        """Host memory of the windows of one sequence, whatever its length."""
        if not self.windows_on_host:
            return 0
        return self._rows_bytes(self.sink + self.local + self.flush, window_type(self.row_dtype))

    def _rows_bytes(self, rows: int, dtype: RowType) -> int:
        """Keys and values of `rows` tokens in every layer."""
        return self.shape.layers * self.shape.kv_heads * rows * row_bytes(self.shape.head_dim, dtype)

    def _indexed_keys(self, tokens: int) -> int:
        """Keys that are in the index of each sampled layer and KV head."""
        keys = self.offloaded(tokens)
        return 0 if keys < INDEX_FROM or (self.mode == "auto" and tokens < self.auto_lsh_from) else keys

    def _segment_bytes(self, rows: int) -> int:
        """Ids of `rows` rows and offsets of one segment, all KV heads of one layer."""
        return 2 * self.L * self.shape.kv_heads * (rows + (1 << self.K) + 1)

    def index_bytes(self, tokens: int) -> int:
        """Tables of one sequence at most: 16-bit ids and offsets of its segments, and room for the codes of the tail.

        At most, because one that is read at once has fewer segments than one that grows turn by turn.
        """
        keys = self._indexed_keys(tokens)
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
        keys = self._indexed_keys(tokens)
        if not keys or not self.sampled_layers:
            return 0
        longest = min(keys, MAX_SEGMENT_ROWS)
        joining = len(self.sampled_layers) * self._segment_bytes(min(keys, JOINED_ROWS))
        return joining + self._segment_bytes(longest) + 2 * self.L * longest

    def sequence_bytes(self, tokens: int) -> int:
        """Everything that one sequence takes in host memory."""
        kept = self.kv_bytes(tokens) + self.window_bytes() + self.index_bytes(tokens)
        return kept + self.growth_bytes(tokens)

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


def plan(hardware: Hardware, shape: ModelShape, settings: Settings, profile: Profile = BUILT_IN) -> Plan:
    """Choose everything that `settings` leave open, as `profile` recommends.

    Raises UsageError (values that cannot be meant), ContextError (longer than the model's context), and
    MemoryBudgetError (the weights, or one sequence of the context that was asked for, do not fit).
    Called before and after loading it gives the same budget: what the process already holds is counted as its own.
    """
    attention = settings.attention
    _check(attention, shape, settings.threads)
    on_gpu = settings.model.device.startswith("cuda") or (settings.model.device == "auto" and bool(hardware.gpus))
    if on_gpu:
        _check_gpu(hardware, shape, settings.model)
    weight_type = _weight_type(shape, settings.model, on_gpu)
    weights = 0 if on_gpu else _weights_bytes(shape, weight_type)
    wanted = _wanted_context(shape, settings)
    size = profile.table_size(wanted)
    draft = Plan(
        shape=shape,
        mode=cast(Mode, attention.mode),
        K=attention.K or size.K,
        L=attention.L or size.L,
        sink=profile.sink if attention.sink is None else attention.sink,
        local=profile.local if attention.local is None else attention.local,
        dense_layers=_dense_layers(attention, shape, profile),
        threads=settings.threads or hardware.threads,
        context=wanted,
        row_dtype="bfloat16" if attention.kv_dtype == "auto" else cast(RowType, attention.kv_dtype),
        weight_type=weight_type,
        weights_bytes=weights,
        budget_bytes=_budget(hardware, weights),
        max_batch=MAX_BATCH_GPU if on_gpu else MAX_BATCH,
        windows_on_host=not on_gpu,
    )
    _check_window(draft)
    context = _fitting_context(draft, hardware, asked=settings.context is not None)
    return replace(draft, context=context, reasons=_reasons(draft, context, hardware, settings))


def _dense_layers(attention: AttentionOptions, shape: ModelShape, profile: Profile) -> tuple[int, ...]:
    """What was asked for, else those of the profile that this model has."""
    if attention.dense_layers is not None:
        return tuple(sorted(set(attention.dense_layers)))
    return tuple(layer for layer in profile.dense_layers if layer < shape.layers)


def _check(attention: AttentionOptions, shape: ModelShape, threads: int | None) -> None:
    """Refuse values outside their range."""
    if attention.mode not in ("auto", "lsh", "exact"):
        raise UsageError(f"--attention {attention.mode} is unknown", hint="use auto, lsh or exact")
    if attention.kv_dtype not in ("auto", "float32", "bfloat16", "int8"):
        raise UsageError(f"--kv-dtype {attention.kv_dtype} is unknown", hint="use auto, float32, bfloat16 or int8")
    if attention.K is not None and not 1 <= attention.K <= MAX_K:
        raise UsageError(f"-K {attention.K} is not between 1 and {MAX_K}", hint=f"the default is -K {DEFAULT_K}")
    if attention.L is not None and not 2 <= attention.L <= MAX_L:
        why = "a key is sampled if two tables agree" if attention.L < 2 else "sampling weights are exact up to there"
        raise UsageError(
            f"-L {attention.L} is not between 2 and {MAX_L:,}: {why}", hint=f"the default is -L {DEFAULT_L}"
        )
    if not 0 <= attention.hash_seed <= MAX_SEED:
        raise UsageError(f"--hash-seed {attention.hash_seed} is not between 0 and {MAX_SEED}", hint="--hash-seed 0")
    if attention.sink is not None and attention.sink < 0:
        raise UsageError(f"--sink {attention.sink} is less than 0", hint=f"the default is --sink {DEFAULT_SINK}")
    if attention.local is not None and attention.local < 1:
        raise UsageError(f"--local {attention.local} is less than 1", hint=f"the default is --local {DEFAULT_LOCAL}")
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads} is less than 1", hint="leave it out to use what this machine gives")
    if missing := [layer for layer in attention.dense_layers or () if not 0 <= layer < shape.layers]:
        raise UsageError(
            f"--dense-layers names layer {', '.join(map(str, missing))}; this model has layers 0 to {shape.layers - 1}",
            hint="--dense-layers auto",
        )


def _check_window(draft: Plan) -> None:
    """Refuse a window longer than the context, of which nothing would ever leave. The default one is always fine."""
    window = draft.sink + draft.local + draft.flush
    if window > max(draft.context, DEFAULT_SINK + DEFAULT_LOCAL + draft.flush):
        raise UsageError(
            f"--sink {draft.sink} and --local {draft.local} with {draft.flush} rows between are a window of "
            f"{window:,} tokens, longer than the context of {draft.context:,}",
            hint=f"the defaults are --sink {DEFAULT_SINK} --local {DEFAULT_LOCAL}",
        )


def _wanted_context(shape: ModelShape, settings: Settings) -> int:
    asked = settings.context
    if asked is None:
        return shape.context
    if asked < 1:
        raise UsageError(f"a context of {asked:,} tokens holds nothing", hint="write it like -c 96k, 98304 or auto")
    if asked > MAX_SIZE:
        raise UsageError(f"a context of more than {MAX_SIZE:,} tokens", hint="write it like -c 96k, 98304 or auto")
    if asked > shape.context and not settings.allow_extrapolation:
        raise ContextError(
            f"a context of {asked:,} tokens was asked for, but this model was made for {shape.context:,}",
            hint=f"-c {shape.context}, or --allow-extrapolation to go beyond what it was trained for",
        )
    return asked


def _weight_type(shape: ModelShape, model: ModelOptions, on_gpu: bool) -> WeightType:
    """In which form linear layers hold their weights. Raises UsageError."""
    if model.quantize not in ("none", "int8"):
        raise UsageError(f"--quantize {model.quantize} is unknown", hint="use none or int8")
    if model.quantize == "int8":
        if on_gpu:
            raise UsageError(
                "--quantize int8 stores linear layers for a CPU; on a GPU it cannot be used yet",
                hint="leave it out, or use --device cpu",
            )
        return "int8"
    return cast(WeightType, read_dtype(model.dtype, shape.dtype, on_gpu=on_gpu))


def _weights_bytes(shape: ModelShape, form: WeightType) -> int:
    """Host bytes of the weights; experts of a mixture are no linear layers of their own and stay float32."""
    extra = shape.int8_extra_bytes if form == "int8" else 0
    experts = shape.expert_params * _DTYPE_BYTES["float32"]
    return (shape.params - shape.expert_params) * _DTYPE_BYTES[form] + experts + extra


def _check_gpu(hardware: Hardware, shape: ModelShape, model: ModelOptions) -> None:
    """Refuse weights that are larger than the GPU. What is free there changes while loading, so the whole counts."""
    _, _, number = model.device.partition(":")
    weights = shape.params * _DTYPE_BYTES[read_dtype(model.dtype, shape.dtype, on_gpu=True)]
    for gpu in hardware.gpus:
        if gpu.index == int(number or 0) and weights > gpu.total_bytes:
            raise MemoryBudgetError(
                f"the weights need {format_bytes(weights)}, but {gpu.name} has {format_bytes(gpu.total_bytes)}",
                hint="use --device cpu, or choose a smaller model",
            )


def _budget(hardware: Hardware, weights: int) -> int:
    """Free memory after weights and runtime. What the process already holds is part of these two."""
    mine = hardware.process_bytes
    left = hardware.memory_free + mine - max(weights + RUNTIME_BYTES, mine)
    if left <= 0:
        raise MemoryBudgetError(
            f"the weights need {format_bytes(weights)} and the program {format_bytes(RUNTIME_BYTES)}, "
            f"but {format_bytes(hardware.memory_free + mine)} of memory are free",
            hint="free some memory, choose a smaller model, or shrink the weights with --dtype bfloat16 "
            "or --quantize int8",
        )
    return left


def _fitting_context(draft: Plan, hardware: Hardware, *, asked: bool) -> int:
    """The context of the draft, or what fits of it if nobody asked for that length."""
    fits = draft.longest_that_fits(draft.context)
    if fits == draft.context:
        return fits
    if asked or fits == 0:
        raise MemoryBudgetError(
            f"one sequence of {draft.context:,} tokens needs {_memory_sum(draft, draft.context)}, but "
            f"{format_bytes(draft.budget_bytes)} are left of {format_bytes(hardware.memory_free)} free memory "
            "beside weights and program",
            hint=_smaller(draft, fits),
        )
    return fits


def _smaller(draft: Plan, fits: int) -> str:
    """What to type for a sequence that fits."""
    if fits == 0:
        return "free some memory, or give smaller values to --sink, --local and -L"
    return f"-c {fits} fits" + ("" if draft.row_dtype == "int8" else ", more do with --kv-dtype int8")


def _memory_sum(plan: Plan, tokens: int) -> str:
    """`8.0 GiB = 5.0 GiB keys and values + 3.0 GiB index`."""
    kv, index = plan.kv_bytes(tokens) + plan.window_bytes(), plan.index_bytes(tokens) + plan.growth_bytes(tokens)
    return f"{format_bytes(kv + index)} = {format_bytes(kv)} keys and values + {format_bytes(index)} index"


def _reasons(draft: Plan, context: int, hardware: Hardware, settings: Settings) -> tuple[str, ...]:
    """One line per choice."""
    shape = draft.shape
    lines = [_context_reason(draft, context, settings), _attention_reason(draft)]
    if shape.rope in ("longrope", "dynamic"):
        lines.append(f"rotary frequencies: those of {context:,} tokens at every length ({shape.rope})")
    windowed = shape.layers - len(shape.full_layers)
    if windowed:
        lines.append(f"{windowed} of {shape.layers} layers attend through a sliding window: exact, no index")
    lines.append(
        f"threads {draft.threads}: "
        + ("as asked" if settings.threads else f"cores {hardware.cores_physical}, usable {hardware.cores_usable}")
    )
    lines.append(_weights_reason(draft, settings.model))
    lines.append(f"rows {draft.row_dtype}: {_ROWS_REASON[draft.row_dtype]}")
    lines.append(
        f"memory: {_memory_sum(draft, context)} per sequence of {context:,} tokens, "
        f"{format_bytes(draft.budget_bytes)} for sequences, up to {draft.sequences_that_fit(context)} together"
    )
    return tuple(lines)


def _context_reason(draft: Plan, context: int, settings: Settings) -> str:
    shape = draft.shape
    if context < draft.context:
        return f"context {context:,}: what fits in memory of the model's {shape.context:,}"
    if settings.context is None:
        scaled = f", {shape.rope} scaling of {shape.trained_context:,}" if shape.trained_context else ""
        return f"context {context:,}: the model's own{scaled}"
    return f"context {context:,}: as asked, the model's own is {shape.context:,}"


def _weights_reason(draft: Plan, model: ModelOptions) -> str:
    asked = model.dtype != "auto" or draft.weight_type == "int8"
    why = "as asked" if asked else f"the model was published in {draft.shape.dtype}"
    if draft.windows_on_host and draft.weight_type != "float32":
        why += "; multiplied as such while generating, in float32 while reading a prompt"
    return f"weights {draft.weight_type}: {why}"


def _attention_reason(draft: Plan) -> str:
    if draft.mode == "exact":
        return "attention exact: as asked"
    sampled = len(draft.sampled_layers)
    if not sampled:
        return f"attention {draft.mode}: no layer can be sampled, all are dense or windowed"
    when = f" from {draft.auto_lsh_from:,} tokens on" if draft.mode == "auto" else ""
    dense = ", ".join(map(str, draft.dense_layers)) or "none"
    return f"attention {draft.mode}: {sampled} layers sampled{when} with K={draft.K} L={draft.L}, dense layers {dense}"
