"""Numbers of the buffers that copies go through (`rings`), known to the planner too, which adds their bytes up."""

from __future__ import annotations

DEPTH = 2  # buffers of a ring
PUT_BYTES = 1 << 20  # of the host's side, for what is to stay on the device
_ALIGNED = 64  # bytes of which a part of a buffer begins at a multiple


def aligned(size: int) -> int:
    """Bytes that a part of so many takes in a buffer."""
    return -(-size // _ALIGNED) * _ALIGNED
