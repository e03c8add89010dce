"""Bytes of the buffers that copies between a GPU and the host go through (`cache.staging`), by what they are for.

    tokens       both sides    ids and positions of a chunk or a step
    blocks       both sides    rows of the store that a chunk or a dense layer attends to
    rows         host          rows that leave a window
    queries      host          queries of a step, and for hash tables their codes
    estimates    both sides    what the kernels make of them, and its LSE
    shares       host          how much of an estimated error is left in the end
    lookups      both sides    what a GPU that scans signatures makes their scores of
    reached      host          which rows these have led to
    signatures   host          signatures on their way to a GPU that keeps them
    hashed rows  both sides    keys of one head that the GPU hashes
    codes        host          what it makes of them

Each is a ring of DEPTH buffers. Every half of a batch has its own; what is hashed for an index has others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from magicpig_cli.cache.ring_shape import DEPTH, PUT_BYTES, aligned, scan_bytes
from magicpig_cli.config import HALVES_FROM, HASH_ROWS, ROWS_AT_ONCE
from magicpig_cli.kernels import JITTER_ROWS, row_bytes, window_type
from magicpig_cli.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes of all buffers, on either side."""

    device: int = 0
    host: int = 0

    def __add__(self, other: Buffers) -> Buffers:
        return Buffers(self.device + other.device, self.host + other.host)


def copy_buffers(plan: Plan, batch: int) -> Buffers:
    """What `batch` sequences take at most, whatever their lengths, in prompts and steps; nothing on a CPU."""
    if plan.gpu is None:
        return Buffers()
    halves = 2 if batch >= HALVES_FROM and plan.sampled_layers else 1
    lanes = [-(-batch // halves), *([batch // 2] if halves == 2 else [])]
    total = Buffers()
    for lane, sequences in enumerate(lanes):
        for device, host in _of_lane(plan, sequences, reads=lane == 0):
            total += Buffers(DEPTH * aligned(device), DEPTH * aligned(host))
    if plan.sampled_layers and plan.sampler == "lsh":
        rows = min(plan.block_rows, HASH_ROWS)
        keys = rows * row_bytes(plan.shape.head_dim, plan.row_dtype)
        total += Buffers(DEPTH * aligned(keys), DEPTH * (aligned(keys) + aligned(rows * plan.L * 2)))
    if plan.scans_there:  # the jitter; copies by who builds an index, and in each half by who has a block more
        total += Buffers(2 * 2 * JITTER_ROWS, (halves + 1) * DEPTH * PUT_BYTES)
    return total


def _of_lane(plan: Plan, sequences: int, *, reads: bool) -> Iterator[tuple[int, int]]:
    """(bytes on the GPU, bytes of the host) of each buffer of a half; reads: prompts are read with its buffers too."""
    shape = plan.shape
    tokens = 2 * aligned(8 * max(sequences, plan.chunk if reads else 0))
    yield tokens, tokens
    block = shape.kv_heads * plan.block_rows * row_bytes(shape.head_dim, plan.row_dtype)
    yield block, block
    leaving = -(-plan.chunk // plan.flush) * plan.flush if reads else plan.flush
    window_row = row_bytes(shape.head_dim, window_type(plan.row_dtype))
    yield 0, shape.kv_heads * min(leaving, ROWS_AT_ONCE) * window_row
    if plan.sampled_layers:
        queries = aligned(4 * sequences * shape.heads * shape.head_dim)
        sums = aligned(4 * sequences * shape.heads)
        codes = aligned(2 * sequences * shape.heads * plan.L) if plan.sampler == "lsh" else 0
        yield 0, queries + codes
        yield queries + sums, queries + sums
        yield 0, len(plan.sampled_layers) * sequences * shape.heads * 4
    if plan.scans_there:
        keys = plan.indexed_keys(plan.context)
        there, back = (sequences * size for size in scan_bytes(shape.heads, shape.kv_heads, plan.bits, keys))
        yield there, there
        yield 0, back
