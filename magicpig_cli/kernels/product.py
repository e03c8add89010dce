"""Linear layers of a decode step: a few vectors times stored weights, bound by reading the weights once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from magicpig_cli.kernels import isa, reference
from magicpig_cli.kernels.checks import want_array, want_int
from magicpig_cli.kernels.rows import NATIVE_TYPE, NUMPY_TYPE, RowType, widen

WeightType = RowType | Literal["int4"]
INT4_GROUP = 32  # values along K that share a scale and a minimum
_NATIVE_INT4 = 3  # as in cyext/simd/product.h


class Weights:
    """Weights [N, K] of layers that are given the same input, all of one type. They are kept alive, not copied.

    float32, bfloat16 bits (uint16), int8 with a scale for each row (bfloat16 bits, uint16 [N]), or int4: K a multiple
    of 32, codes uint8 [N, K/2], byte i of 16 having value i of its group in the lower half and 16 + i in the upper,
    and float16 [N, K/32, 2], scale and minimum of each group; a value means minimum + scale · code.
    """

    def __init__(self, dtype: WeightType, weights: Sequence[np.ndarray], scales: Sequence[np.ndarray] = ()) -> None:
        if not weights or len(scales) != (len(weights) if dtype in ("int8", "int4") else 0):
            raise ValueError(
                f"weights: want one or more {dtype}, with scales if int8 or int4, "
                f"got {len(weights)} with {len(scales)} scales"
            )
        if dtype == "int4":
            self._want_int4(weights, scales)
        else:
            self._want_plain(dtype, weights, scales)
        self.type = _NATIVE_INT4 if dtype == "int4" else NATIVE_TYPE[dtype]
        self.weights, self.scales = tuple(weights), tuple(scales)
        self.outer = tuple(weight.shape[0] for weight in weights)  # N of each
        at = [scale.ctypes.data for scale in scales] or [0] * len(weights)
        rows = [(weight.ctypes.data, scale, len(weight)) for weight, scale in zip(weights, at, strict=True)]
        self.addresses = np.array(rows, dtype=np.int64)  # [n, 3]: of the values, of the scales or 0, and N

    def _want_plain(self, dtype: RowType, weights: Sequence[np.ndarray], scales: Sequence[np.ndarray]) -> None:
        self.inner = weights[0].shape[-1]
        want_int("K", self.inner, 1)
        for weight in weights:
            want_array("weight", weight, NUMPY_TYPE[dtype], "N, K", (None, self.inner))
        for i, scale in enumerate(scales):
            want_array("scale", scale, np.uint16, "N", (weights[i].shape[0],))

    def _want_int4(self, weights: Sequence[np.ndarray], scales: Sequence[np.ndarray]) -> None:
        self.inner = 2 * weights[0].shape[-1]
        for weight, scale in zip(weights, scales, strict=True):
            want_int4(weight, scale, self.inner)

    @property
    def is_int4(self) -> bool:
        """Whether vectors are rounded before they are multiplied."""
        return self.type == _NATIVE_INT4

    def read(self, i: int) -> np.ndarray:
        """Weight i as float32 [N, K], a copy unless it is float32."""
        if self.is_int4:
            values = np.empty((self.outer[i], self.inner), dtype=np.float32)
            reference.widen_int4(self.weights[i], self.scales[i], values, 1)
            return values
        if self.scales:
            scaled: np.ndarray = self.weights[i] * widen(self.scales[i])[:, None]
            return scaled
        return widen(self.weights[i])


def multiply(x: np.ndarray, weights: Weights, *, threads: int) -> np.ndarray:
    """x float32 [M, K] times each of the weights, in float32: [M, N] of one after the other, as one [Σ M·N].

    The scale of an int8 row multiplies its finished sum. Before int4 weights x is rounded to int8, each 32 values with
    a step of their own (largest / 127). No bit of a result depends on the other vectors, the other weights or the
    threads, and with int4 weights none on the instruction set.
    """
    want_array("x", x, np.float32, "M, K", (None, weights.inner))
    want_int("threads", threads, 1)
    out: np.ndarray = isa.backend().multiply(x, weights, threads)
    return out


def want_int4(codes: np.ndarray, factors: np.ndarray, K: int) -> None:
    """Require codes and factors of int4 weights [N, K]."""
    if K < 1 or K % INT4_GROUP:
        raise ValueError(f"K: want a multiple of {INT4_GROUP} for int4, got {K}")
    want_array("weight", codes, np.uint8, "N, K/2", (None, K // 2))
    want_array("scale", factors, np.float16, "N, K/32, 2", (codes.shape[0], K // INT4_GROUP, 2))


def round_int4(values: np.ndarray, codes: np.ndarray, factors: np.ndarray, *, threads: int) -> None:
    """Write int4 weights (`Weights`) of float32 values [N, K] to codes [N, K/2] and factors [N, K/32, 2].

    The minimum of a group is its smallest value, and 15 steps reach the largest; but values that lie on a grid of
    fewer steps, as those of 4-bit formats without a minimum do, keep that grid. Scale and minimum are rounded to
    float16 before codes are chosen. Numbers beyond float16 (65,504) are not for int4: they become infinite.
    """
    want_array("values", values, np.float32, "N, K", (codes.shape[0], None))
    want_int4(codes, factors, values.shape[1])
    want_int("threads", threads, 1)
    isa.backend().round_int4(values, codes, factors, threads)


def widen_int4(codes: np.ndarray, factors: np.ndarray, out: np.ndarray, *, threads: int) -> None:
    """Write int4 weights (`Weights`) as float32 to out [N, K]: minimum + scale · code, rounded once."""
    want_array("out", out, np.float32, "N, K", (codes.shape[0], None))
    want_int4(codes, factors, out.shape[1])
    want_int("threads", threads, 1)
    isa.backend().widen_int4(codes, factors, out, threads)
