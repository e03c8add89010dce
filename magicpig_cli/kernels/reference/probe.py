"""Bandwidth."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from magicpig_cli.kernels.rows import RowTable


def read_sequential(data: np.ndarray, threads: int) -> tuple[int, float]:
    """Nanoseconds to read every byte once, from front to back, and what the reading summed up."""
    began = time.perf_counter_ns()
    total = _sum_of(data)
    return time.perf_counter_ns() - began, total


def read_rows(table: RowTable, kv_head: int, rows: np.ndarray, threads: int) -> tuple[int, float]:
    """Nanoseconds to read K and V of the listed rows, and what the reading summed up."""
    began, total = time.perf_counter_ns(), 0.0
    for row in rows.tolist():
        block, offset = divmod(row, table.block_rows)
        total += _sum_of(table.blocks[block][kv_head, offset])
    return time.perf_counter_ns() - began, total


def _sum_of(data: np.ndarray) -> float:
    """Whatever it holds, summed as float32; a rest shorter than one vector step of the kernels byte by byte."""
    raw = data.reshape(-1).view(np.int8)
    whole = raw.size // 256 * 256
    with np.errstate(all="ignore"):
        return float(raw[:whole].view(np.float32).sum()) + float(raw[whole:].sum())
