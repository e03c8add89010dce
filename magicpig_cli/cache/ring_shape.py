"""Numbers of the buffers that copies go through (`rings`), known to the planner too, which adds their bytes up."""

from __future__ import annotations

from magicpig_cli.kernels import SIGNATURE_ROWS

DEPTH = 2  # buffers of a ring
PUT_BYTES = 1 << 20  # of the host's side, for what is to stay on the device
_ALIGNED = 64  # bytes of which a part of a buffer begins at a multiple


def aligned(size: int) -> int:
    """Bytes that a part of so many takes in a buffer."""
    return -(-size // _ALIGNED) * _ALIGNED


def scan_bytes(heads: int, kv_heads: int, bits: int, keys: int) -> tuple[int, int]:
    """(bytes sent to a device that scans the signatures of one sequence of so many keys, bytes that come back): a
    `Lookup` of the kernels, and a bit per key and query head with a threshold per head."""
    cells = keys // SIGNATURE_ROWS
    there = (heads * 4 * bits, heads * 4 * 4, heads * cells * 2, kv_heads * 4, heads * 3 * 8)
    return sum(map(aligned, there)), aligned(heads * cells * SIGNATURE_ROWS // 8) + aligned(heads * 4)
