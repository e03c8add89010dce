"""The door to the kernels: arguments are checked here, trusted inside; NumPy in and out, torch is unknown here.

Letters: B sequences, H query heads, Hkv kv heads, G = H / Hkv, N rows, D head dim, K bits per table, L tables.
Rows lie in a `RowTable`; `Projection` turns keys and queries into codes; `build_segment` turns codes into tables;
`lsh_attend` samples through them. `sign_rows` turns keys into signatures on a `SignatureBasis`; `rabitq_attend` samples
by them. `exact_attend` reads everything; `multiply` is the linear layers of a step, `block_*` a whole decoder block
around attention. Which instruction set does it: `isa`.
Errors of use are TypeError or ValueError and name the argument, what was wanted and what came.
"""

from __future__ import annotations

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.attend import Attended, Run, Sampled, SampledRows, exact_attend, lsh_attend, lsh_sample
from magicpig_cli.kernels.block import Activation, Block, Norm, block_inputs, block_output
from magicpig_cli.kernels.hashing import Projection, hash_queries, hash_rows
from magicpig_cli.kernels.jitter import jitter_pool
from magicpig_cli.kernels.probe import read_rows, read_sequential
from magicpig_cli.kernels.product import INT4_GROUP, Weights, WeightType, multiply, round_int4, widen_int4
from magicpig_cli.kernels.rabitq import (
    Lookup,
    Reached,
    bounds_of,
    rabitq_attend,
    rabitq_lookup,
    rabitq_sample,
    rabitq_scores,
)
from magicpig_cli.kernels.rows import (
    NUMPY_TYPE,
    RowTable,
    RowType,
    row_bytes,
    row_width,
    widen,
    window_type,
    write_row,
)
from magicpig_cli.kernels.segment import (
    MAX_SEGMENT_ROWS,
    MAX_TAIL_ROWS,
    Joining,
    Segment,
    Tail,
    build_segment,
    merge_segments,
    segment_codes,
    truncate_segment,
)
from magicpig_cli.kernels.signature import SignatureBasis, SignatureBlock, SignedRows, sign_rows
from magicpig_cli.kernels.signature_shape import (
    JITTER_ROWS,
    MAX_SIGNATURE_BITS,
    SIGNATURE_ROWS,
    Z_HIGH,
    Z_LOW,
    rotation_share,
    signature_bytes,
    want_signature_bits,
)

__all__ = [
    "INT4_GROUP",
    "JITTER_ROWS",
    "MAX_SEGMENT_ROWS",
    "MAX_SIGNATURE_BITS",
    "MAX_TAIL_ROWS",
    "NUMPY_TYPE",
    "SIGNATURE_ROWS",
    "Z_HIGH",
    "Z_LOW",
    "Activation",
    "Attended",
    "Block",
    "Joining",
    "Lookup",
    "Norm",
    "Projection",
    "Reached",
    "RowTable",
    "RowType",
    "Run",
    "Sampled",
    "SampledRows",
    "Segment",
    "SignatureBasis",
    "SignatureBlock",
    "SignedRows",
    "Tail",
    "WeightType",
    "Weights",
    "block_inputs",
    "block_output",
    "bounds_of",
    "build_segment",
    "exact_attend",
    "hash_queries",
    "hash_rows",
    "isa",
    "jitter_pool",
    "lsh_attend",
    "lsh_sample",
    "merge_segments",
    "multiply",
    "rabitq_attend",
    "rabitq_lookup",
    "rabitq_sample",
    "rabitq_scores",
    "read_rows",
    "read_sequential",
    "rotation_share",
    "round_int4",
    "row_bytes",
    "row_width",
    "segment_codes",
    "sign_rows",
    "signature_bytes",
    "truncate_segment",
    "want_signature_bits",
    "widen",
    "widen_int4",
    "window_type",
    "write_row",
]
