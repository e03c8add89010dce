"""What the door asks of arguments, in words that name the argument, what was wanted and what came."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MAX_HEAD_DIM = 512
MAX_TABLES = 65535  # hits of one key are counted in 16 bits while a tail is scanned


def want_array(name: str, array: Any, dtype: type, axes: str, sizes: tuple[int | None, ...], kind: str = "") -> None:
    """Require a C-contiguous, aligned array of `dtype` with `sizes` (None = any). TypeError or ValueError."""
    if isinstance(array, np.ndarray) and array.dtype == dtype:
        flags = array.flags
        if _fits(array.shape, sizes) and flags.c_contiguous and flags.aligned:
            return
    _refuse(name, array, dtype, axes, sizes, kind)  # apart, because words cost more than the check


def want_strided(name: str, array: Any, dtype: type, axes: str, sizes: tuple[int | None, ...]) -> None:
    """Require an array of `dtype` with `sizes` (None = any) that is contiguous along its last axis."""
    if isinstance(array, np.ndarray) and array.dtype == dtype and array.flags.aligned:
        close = array.strides[-1] == array.itemsize or array.shape[-1] <= 1 or array.size == 0
        if _fits(array.shape, sizes) and close and all(stride % array.itemsize == 0 for stride in array.strides):
            return
    _refuse(name, array, dtype, axes, sizes, "")


def _fits(shape: tuple[int, ...], sizes: tuple[int | None, ...]) -> bool:
    if len(shape) != len(sizes):
        return False
    for size, there in zip(sizes, shape, strict=True):  # noqa: SIM110 - a generator takes three times as long
        if size is not None and size != there:
            return False
    return True


def _refuse(name: str, array: Any, dtype: type, axes: str, sizes: tuple[int | None, ...], kind: str) -> None:
    wanted = f"{name}: want {kind or np.dtype(dtype).name} [{axes}]"
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{wanted}, got {type(array).__name__}")
    got = f"{array.dtype} {array.shape}"
    if array.dtype != dtype:
        raise TypeError(f"{wanted}, got {got}")
    if not _fits(array.shape, sizes):
        exact = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(f"{wanted} = ({exact}), got {got}")
    raise ValueError(f"{wanted} C-contiguous and aligned, got strides {array.strides} of {got}")


def want_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Require an integer in [low, high]."""
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, int | np.integer)):
        raise TypeError(f"{name}: want an integer, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        bounds = f"{low} or more" if high is None else f"{low} to {high}"
        raise ValueError(f"{name}: want {bounds}, got {value}")


def want_scale(scale: float, softcap: float | None) -> None:
    """The factor of the logits is finite; a soft cap is None or positive and finite."""
    if not math.isfinite(scale):
        raise ValueError(f"scale: want a finite number, got {scale}")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap: want None or a positive number, got {softcap}")


def want_queries(q: Any, kv_heads: int | None, head_dim: int | None) -> None:
    """Require float32 [B, H, D] with H a multiple of Hkv."""
    want_array("q", q, np.float32, "B, H, D", (None, None, head_dim))
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"q: want a head dim of 1 to {MAX_HEAD_DIM}, got {q.shape[2]}")
    if q.shape[1] == 0 or (kv_heads is not None and q.shape[1] % kv_heads):
        raise ValueError(f"q: want query heads in multiples of {kv_heads} kv heads, got {q.shape[1]}")
