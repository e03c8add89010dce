"""How long samplers take to find keys, on one thread: by tables of hash codes, and by comparing signatures."""

from __future__ import annotations

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.attention.estimator import log_normal_table
from magicpig_cli.config import DEFAULT_K, DEFAULT_L
from magicpig_cli.planner.times import SCAN_BITS


class LookUps:
    """Tables over random codes, and query heads that visit buckets which none has visited for long."""

    def __init__(self, rows: int, heads: int, K: int = DEFAULT_K, L: int = DEFAULT_L) -> None:
        """heads: query heads per round, one after another on one thread."""
        random = np.random.default_rng(rows)
        self.tables, self.heads = L, heads
        self.ids = L * rows / (1 << K)  # that a query head counts on average
        codes = random.integers(0, 1 << K, (1, L, rows), dtype=np.uint16)
        table = kernels.RowTable(1, 1, "bfloat16", rows)
        table.append_block(np.zeros((1, rows, 2, 1), dtype=np.uint16))
        segment = kernels.build_segment(codes, K, 0, threads=1)
        self._source = kernels.SampledRows(table, np.zeros((1, 1), dtype=np.float32), [segment])
        self._visits = random.permuted(np.tile(np.arange(1 << K, dtype=np.uint16), (L, 1)), axis=1)  # [L, 2**K]

    @classmethod
    def of_this_tier(cls) -> tuple[LookUps, LookUps]:
        """Long and short lists: of a full segment, and of one that has just been begun."""
        if kernels.isa.current() == kernels.reference.TIER:  # NumPy: a thousandth of the work takes as long
            return cls(4096, 1), cls(1024, 1)
        return cls(kernels.MAX_SEGMENT_ROWS, 32), cls(4096, 32)

    def head_ns(self, number: int) -> float:
        """Nanoseconds for the look-up of one query head, in round `number`."""
        columns = np.arange(number * self.heads, (number + 1) * self.heads) % self._visits.shape[1]
        codes = np.ascontiguousarray(self._visits[:, columns].T)[None]  # [1, heads, L]
        queries, weights = np.zeros((1, self.heads, 1), dtype=np.float32), np.zeros(2, dtype=np.float32)
        done = kernels.lsh_attend(queries, codes, [self._source], weights, scale=1.0, threads=1, with_error=False)
        return done.stage_ns["retrieve"] / self.heads


def per_id_and_visit(long: LookUps, long_ns: float, short: LookUps, short_ns: float) -> tuple[float, float]:
    """ns per id counted and per table visited, from what one query head takes with long and with short lists.

    Where noise has made the short ones as slow as the long ones, all of it is put down to the ids.
    """
    count_ns = (long_ns - short_ns) / (long.ids - short.ids)
    if count_ns <= 0:
        return long_ns / long.ids, 0.0
    return count_ns, max(0.0, short_ns - count_ns * short.ids) / short.tables


class Scan:
    """Random signatures of the planner's size, and a group of query heads that are compared with all of them."""

    GROUP, HEAD_DIM = 4, 32  # query heads per KV head; values per row, of which few are read
    BUDGET = 0.01

    def __init__(self, kv_heads: int, rows: int) -> None:
        random = np.random.default_rng(rows)
        table = kernels.RowTable(kv_heads, self.HEAD_DIM, "bfloat16", rows)
        table.append_block(np.zeros((kv_heads, rows, 2, self.HEAD_DIM), dtype=np.uint16))  # pages that few touch
        blocks = kernels.SignatureBlock(
            random.integers(0, 256, (kv_heads, rows // 32, SCAN_BITS // 4, 16), dtype=np.uint8),
            np.full((kv_heads, rows), 0x3F80, dtype=np.uint16),  # 1 as bfloat16
            np.zeros((kv_heads, rows // kernels.SIGNATURE_ROWS, self.HEAD_DIM), dtype=np.uint16),
        )
        self._source = kernels.SignedRows(table, (blocks,))
        heads = kv_heads * self.GROUP
        self._q = random.standard_normal((1, heads, self.HEAD_DIM), dtype=np.float32)
        self._basis = kernels.SignatureBasis(random.standard_normal((SCAN_BITS, self.HEAD_DIM), dtype=np.float32))
        self._weights = log_normal_table()
        self._budget = np.full((1, heads), self.BUDGET, dtype=np.float32)
        self._compared = heads * rows

    @classmethod
    def of_this_tier(cls) -> Scan:
        if kernels.isa.current() == kernels.reference.TIER:
            return cls(1, 1024)
        return cls(8, 32_768)  # 4 MiB of signatures

    def signature_ns(self, _: int) -> float:
        """Nanoseconds for one signature and one query head, on one thread."""
        done = kernels.rabitq_attend(
            self._q, self._basis, [self._source], self._weights, budget=self._budget, tail=0.0, key=(0, 0), scale=1.0,
            threads=1, with_error=False,
        )  # fmt: skip
        return done.stage_ns["retrieve"] / self._compared
