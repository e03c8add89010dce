"""Every kernel in NumPy, one screen each: what the native ones are held to, and a way to run without them.

Same names and arguments as the native modules (trusted: the door has checked them). Integer results are the same bit
for bit; floats are summed in float64, so a bit can differ where a projection is within rounding of zero, and a row
where an estimate is within rounding of its threshold.
"""

from __future__ import annotations

from magicpig_cli.kernels.reference.attend import exact_attend, lsh_attend, lsh_sample, rabitq_attend, rabitq_sample
from magicpig_cli.kernels.reference.block import block_inputs, block_output
from magicpig_cli.kernels.reference.hashing import hash_queries, hash_rows, pack_projection, project
from magicpig_cli.kernels.reference.probe import read_rows, read_sequential
from magicpig_cli.kernels.reference.product import multiply, round_int4, widen_int4
from magicpig_cli.kernels.reference.rows import write_row
from magicpig_cli.kernels.reference.signature import pack_basis, rabitq_lookup, rabitq_scores, sign_rows
from magicpig_cli.kernels.reference.tables import join, segment_codes, truncate_segment

TIER = "reference"

__all__ = [
    "TIER",
    "block_inputs",
    "block_output",
    "exact_attend",
    "hash_queries",
    "hash_rows",
    "join",
    "lsh_attend",
    "lsh_sample",
    "multiply",
    "pack_basis",
    "pack_projection",
    "project",
    "rabitq_attend",
    "rabitq_lookup",
    "rabitq_sample",
    "rabitq_scores",
    "read_rows",
    "read_sequential",
    "round_int4",
    "segment_codes",
    "sign_rows",
    "truncate_segment",
    "widen_int4",
    "write_row",
]
