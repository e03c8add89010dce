"""What this machine's memory gives when nothing is computed, read with the loads and threads of the kernels."""

from __future__ import annotations

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import want_array, want_int
from magicpig_cli.kernels.rows import RowTable, want_run


def read_sequential(data: np.ndarray, threads: int) -> int:
    """Nanoseconds to read uint8 [bytes] once, from front to back."""
    want_array("data", data, np.uint8, "bytes", (None,))
    want_int("bytes", data.shape[0], 1)
    want_int("threads", threads, 1)
    return int(isa.backend().read_sequential(data, threads)[0])


def read_rows(table: RowTable, kv_head: int, rows: np.ndarray, threads: int) -> int:
    """Nanoseconds to read K and V of the rows int64 [n], n ≥ 1, of one KV head in that order."""
    want_array("rows", rows, np.int64, "n", (None,))
    want_int("rows", rows.shape[0], 1)
    want_int("kv_head", kv_head, 0, table.kv_heads - 1)
    want_int("threads", threads, 1)
    want_run("rows", table, int(rows.min()), int(rows.max()) + 1)
    return int(isa.backend().read_rows(table, kv_head, rows, threads)[0])
