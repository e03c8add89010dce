"""Memory written out: what takes how many bytes, and by which formula. Sums of parts are what a plan promises.

`reserved` is what is kept free for sequences however they grow, turn by turn and token by token: refusals and batch
sizes go by it. `expected` is what a process will hold at its peak when prompts are read at once and answers of a stated
length follow. On a GPU both are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from magicpig_cli.config import BLOCK_KEYS, FLASH_KEYS, HALVES_FROM, RECORDED_BATCHES, SCAN_KEYS
from magicpig_cli.kernels import row_bytes, signature_bytes, window_type
from magicpig_cli.planner import forms
from magicpig_cli.planner.copies import copy_buffers
from magicpig_cli.planner.plan import Plan
from magicpig_cli.units import format_bytes

# Resident memory of Python, torch for CPUs, transformers, kernels and a tokenizer, libraries included: 409 MiB after
# loading the demo model, its weights aside, and 37 more (threads, products' workspaces) in a prefill.
PROGRAM_BYTES = 446 << 20
# Of CUDA graphs (docs/decisions/018), none of it measured on a GPU yet. Drivers before CUDA 12.4 take 64 KiB for each
# launch in a graph, later ones less; a segment has 33 of them in Llama, and 63 in Gemma 3, which has the most.
SEGMENT_BYTES = 64 * (64 << 10)
# Per lane: scratch of products (32 MiB on Hopper, less elsewhere), and torch's rounding up of one large and one small
# piece of memory (20 and 2 MiB).
LANE_BYTES = (32 + 20 + 2) << 20
CAST_BYTES = 16 << 20  # buffer in which stored weights become float32 while a prompt is read (model/stored.py)


@dataclass(frozen=True, slots=True)
class Part:
    """One addend."""

    name: str
    bytes: int
    formula: str

    def __str__(self) -> str:
        return f"{self.name} {format_bytes(self.bytes)} = {self.formula}"


def total(parts: Iterable[Part]) -> int:
    """Bytes of all parts."""
    return sum(part.bytes for part in parts)


def written_out(parts: Iterable[Part]) -> str:
    """`15.0 GiB weights + 1.0 GiB program = 16.0 GiB`."""
    found = [part for part in parts if part.bytes]
    terms = " + ".join(f"{format_bytes(part.bytes)} {part.name}" for part in found)
    return f"{terms} = {format_bytes(total(found))}" if len(found) > 1 else terms


def reserved_host(plan: Plan, tokens: int, batch: int = 1) -> tuple[Part, ...]:
    """What `batch` sequences of `tokens` and the program may come to hold in host memory."""
    shared = (
        _host_weights(plan),
        Part("program", plan.host_reserve, f"reserve of profile {plan.profile}"),
    )
    return _some((*shared, *sequence_parts(plan, tokens, batch)))


def sequence_parts(plan: Plan, tokens: int, batch: int = 1) -> tuple[Part, ...]:
    """What `batch` sequences of `tokens` take in host memory, however they grew: `Plan.sequence_bytes` of each."""
    keys, index = plan.indexed_keys(tokens), plan.index
    return (
        _rows(plan, tokens, batch),
        _windows(plan, batch, plan.window_bytes()),
        _index(plan, batch, keys, index.nbytes(keys), index.formula(keys)),
        Part("growth", batch * index.growth_bytes(keys), _times(batch) + index.growth_formula(keys)),
    )


def too_large(plan: Plan, tokens: int, free_bytes: int | None = None) -> str:
    """`a sequence of 9,000 tokens takes 0.4 GiB keys and values + 0.3 GiB index = 0.7 GiB, but 0.5 GiB of memory are
    free for sequences`: what is wrong with one that exceeds the plan's budget by itself, or what is free just now."""
    free = plan.budget_bytes if free_bytes is None else free_bytes
    return (
        f"a sequence of {tokens:,} tokens takes {written_out(sequence_parts(plan, tokens))}, but "
        f"{format_bytes(free)} of memory are free for sequences"
    )


def expected_host(plan: Plan, tokens: int, batch: int, generated: int) -> tuple[Part, ...]:
    """What a process holds at its peak with `batch` sequences of `tokens`, the last `generated` of them answers."""
    on_host = plan.gpu is None
    keys = plan.indexed_keys(tokens)
    program = PROGRAM_BYTES if on_host else plan.host_reserve
    why = "Python, torch and libraries, measured" if on_host else f"reserve of profile {plan.profile}"
    parts = (
        _host_weights(plan),
        Part("program", program, why),
        _activations(plan, batch) if on_host else Part("activations", 0, "on the GPU"),
        _directions(plan, copies=2),
        _rows(plan, tokens, batch),
        _windows(plan, batch, plan.window_bytes()),
        _index(plan, batch, keys, *plan.index.read_at_once(keys)),
        _expected_growth(plan, tokens, batch, generated),
    )
    return _some(parts)


def device(plan: Plan, batch: int) -> tuple[Part, ...]:
    """What `batch` sequences take on the GPU, whatever their lengths: the long middle of a context is not there."""
    if plan.gpu is None:
        return ()
    parts = (
        Part("weights", plan.device_weights_bytes, forms.written(forms.on_device(plan.shape, plan.weight_type))),
        Part("reserve", plan.device_reserve, f"CUDA context and workspaces, profile {plan.profile}"),
        _activations(plan, batch),
        _hashing(plan),
        _signatures(plan, batch),
        _scan(plan, batch),
        _copies(plan, batch),
        _directions(plan, copies=1),
        _windows(plan, batch, plan.device_window_bytes()),
        _graphs(plan, batch),
    )
    return _some(parts)


def with_signature_copies(plan: Plan) -> Plan:
    """The plan with copies of signatures on its GPU, of one sequence of the whole context at least; else as it is.

    Sequences share the room: all that may be decoded together and whose keys host memory holds have enough, or what the
    GPU has left. There are fewer of them where one copy has no room beside the windows of more.
    """
    each, _ = plan.index.device_copy(plan.indexed_keys(plan.context))
    if plan.gpu is None or plan.sampler != "rabitq" or not each:
        return plan
    held = each * plan.budget_bytes // plan.sequence_bytes(plan.context)  # shorter sequences hold no more keys
    one = replace(plan, signature_room=each)
    for most in range(plan.max_batch, 0, -1):
        left = plan.gpu.free_bytes - total(device(one, most))
        if left >= 0:
            return replace(one, max_batch=most, signature_room=min(most * each, max(each, held), each + left))
    return plan


def _some(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.bytes)


def _host_weights(plan: Plan) -> Part:
    """Nothing where a GPU holds them."""
    words = forms.written(forms.on_host(plan.shape, plan.weight_type)) if plan.weights_bytes else ""
    return Part("weights", plan.weights_bytes, words)


def _rows(plan: Plan, tokens: int, batch: int) -> Part:
    shape, per_row = plan.shape, row_bytes(plan.shape.head_dim, plan.row_dtype)
    size = plan.kv_bytes(tokens)
    rows = size // (shape.layers * shape.kv_heads * per_row)
    formula = f"{_times(batch)}{shape.layers} layers × {shape.kv_heads} heads × {rows:,} keys × {per_row} B"
    return Part("keys and values", batch * size, formula)


def _windows(plan: Plan, batch: int, size: int) -> Part:
    shape, per_row = plan.shape, row_bytes(plan.shape.head_dim, window_type(plan.row_dtype))
    formula = f"{_times(batch)}{shape.layers} layers × {shape.kv_heads} heads × {plan.window_rows} keys × {per_row} B"
    return Part("windows", batch * size, formula)


def _times(batch: int) -> str:
    return f"{batch} sequences × " if batch > 1 else ""


def _index(plan: Plan, batch: int, keys: int, size: int, formula: str) -> Part:
    return Part("index", batch * size, _times(batch) + formula if keys else "no index")


def _expected_growth(plan: Plan, tokens: int, batch: int, generated: int) -> Part:
    """What stands beside the indexes while they are built, and while answers of that length come."""
    keys = plan.indexed_keys(tokens)
    if not keys or not plan.sampled_layers:
        return Part("growth", 0, "no index")
    once, each, words = plan.index.expected_growth(keys, generated)
    return Part("growth", once + batch * each, words)


def _activations(plan: Plan, batch: int) -> Part:
    """What a prompt chunk, and the logits of a step, hold beside weights: one layer's worth at a time.

    Per token the residual stream twice, queries, keys and values before and after rotary embedding, the output of
    attention three times in float32, and three arrays as wide as the MLP; per chunk a block of scores or history.
    """
    shape, on_host = plan.shape, plan.gpu is None
    value = 4 if on_host or plan.weight_type == "float32" else 2
    qkv, out = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim
    per_token = (2 * shape.hidden + 2 * qkv + 3 * shape.inner) * value + 3 * out * 4
    if on_host:
        block = FLASH_KEYS * shape.kv_heads * 2 * shape.head_dim * 4
        block += CAST_BYTES if plan.weight_type != "float32" else 0
    else:
        block = 2 * plan.chunk * shape.heads * BLOCK_KEYS * 4
    if forms.is_cast_whole(shape, plan.weight_type, on_gpu=not on_host):  # the largest weight, in what is multiplied
        block += shape.inner * shape.hidden * value
    logits = 2 * batch * shape.vocab * 4
    formula = (
        f"a chunk of {plan.chunk:,} tokens × {per_token:,} B, a block of {format_bytes(block)}, "
        f"{batch} × {shape.vocab:,} logits"
    )
    return Part("activations", plan.chunk * per_token + block + logits, formula)


def _directions(plan: Plan, copies: int) -> Part:
    size, formula = plan.index.drawn()
    return Part("random directions", copies * size, f"{copies} × {formula}" if copies > 1 else formula)


def _copies(plan: Plan, batch: int) -> Part:
    """Buffers, and a block of the store as float32."""
    block = plan.shape.kv_heads * plan.block_rows * 2 * plan.shape.head_dim * 4
    buffers = copy_buffers(plan, batch).device
    formula = f"buffers of {format_bytes(buffers)}, a block of {plan.block_rows:,} keys as float32"
    return Part("copies", buffers + block, formula)


def _hashing(plan: Plan) -> Part:
    size, formula = plan.index.device_hashing()
    return Part("hashing", size if plan.sampled_layers else 0, formula)


def _signatures(plan: Plan, batch: int) -> Part:
    """Copies of the indexes, where the GPU scans them: of the whole context, or what there is room for."""
    if not plan.scans_there:
        return Part("signatures", 0, "none")
    each, words = plan.index.device_copy(plan.indexed_keys(plan.context))
    if batch * each <= plan.signature_room:
        return Part("signatures", batch * each, _times(batch) + words)
    return Part("signatures", plan.signature_room, f"room for all; a sequence of {plan.context:,} tokens has {words}")


def _scan(plan: Plan, batch: int) -> Part:
    """What a scan of one sequence and layer holds (`attention.scan`), in each half of a batch.

    Of SCAN_KEYS signatures at a time what their bytes name, twice, as torch's `embedding_bag` keeps a number for each
    too, sums, shares and a copy; of all scores, and flags on their way to bits; and look-up tables for whole bytes.
    """
    if not plan.scans_there:
        return Part("scan", 0, "on the host")
    shape, lanes = plan.shape, 2 if batch >= HALVES_FROM else 1
    group, keys = shape.heads // shape.kv_heads, shape.kv_heads * plan.indexed_keys(plan.context)
    at_once, each = min(keys, SCAN_KEYS), plan.bits + 16 * group + 8 + signature_bytes(plan.bits)
    tables = shape.heads * plan.bits // 4 * 256 * 2 * 4
    size = at_once * each + keys * 4 * group + tables
    formula = f"{lanes} × ({at_once:,} signatures × {each} B + {keys:,} × {4 * group} B + tables of {tables:,} B)"
    return Part("scan", lanes * size, formula)


def _graphs(plan: Plan, batch: int) -> Part:
    """Decode steps as CUDA graphs: those of the batch sizes that are kept, each with what its attention is given and
    gives back and its logits; the second lane has halves of a batch (`hook.Forward.lane`)."""
    if not plan.graphs:
        return Part("graphs", 0, "none")
    shape, value = plan.shape, 4 if plan.weight_type == "float32" else 2
    lanes = [size for size in (batch, batch // 2) if size]
    kept = sum(min(size, RECORDED_BATCHES) for size in lanes)
    layer = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * value
    step = batch * (shape.layers * layer + shape.vocab * value)
    size = kept * ((shape.layers + 1) * SEGMENT_BYTES + step) + len(lanes) * LANE_BYTES
    formula = (
        f"{kept} × ({shape.layers + 1} segments × {format_bytes(SEGMENT_BYTES)} + {batch} × {step // batch:,} B) + "
        f"{len(lanes)} × {format_bytes(LANE_BYTES)}"
    )
    return Part("graphs", size, formula)
