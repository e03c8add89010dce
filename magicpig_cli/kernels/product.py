"""Linear layers of a decode step: a few vectors times stored weights, bound by reading the weights once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import want_array, want_int
from magicpig_cli.kernels.rows import NATIVE_TYPE, NUMPY_TYPE, RowType, widen


class Weights:
    """Weights [N, K] of layers that are given the same input, all of one type. They are kept alive, not copied.

    float32, bfloat16 bits (uint16), or int8 with a scale for each row: bfloat16 bits, uint16 [N].
    """

    def __init__(self, dtype: RowType, weights: Sequence[np.ndarray], scales: Sequence[np.ndarray] = ()) -> None:
        if not weights or len(scales) != (len(weights) if dtype == "int8" else 0):
            raise ValueError(
                f"weights: want one or more {dtype}, with scales if int8, got {len(weights)} with {len(scales)} scales"
            )
        self.inner = weights[0].shape[-1]
        want_int("K", self.inner, 1)
        for weight in weights:
            want_array("weight", weight, NUMPY_TYPE[dtype], "N, K", (None, self.inner))
        for i, scale in enumerate(scales):
            want_array("scale", scale, np.uint16, "N", (weights[i].shape[0],))
        self.type = NATIVE_TYPE[dtype]
        self.weights, self.scales = tuple(weights), tuple(scales)
        self.outer = tuple(weight.shape[0] for weight in weights)  # N of each
        at = [scale.ctypes.data for scale in scales] or [0] * len(weights)
        rows = [(weight.ctypes.data, scale, len(weight)) for weight, scale in zip(weights, at, strict=True)]
        self.addresses = np.array(rows, dtype=np.int64)  # [n, 3]: of the values, of the scales or 0, and N

    def read(self, i: int) -> np.ndarray:
        """Weight i as float32 [N, K], a copy unless it is float32."""
        if self.scales:
            scaled: np.ndarray = self.weights[i] * widen(self.scales[i])[:, None]
            return scaled
        return widen(self.weights[i])


def multiply(x: np.ndarray, weights: Weights, *, threads: int) -> np.ndarray:
    """x float32 [M, K] times each of the weights, in float32: [M, N] of one after the other, as one [Σ M·N].

    The scale of a row multiplies its finished sum. No bit of a result depends on the other vectors, the other weights
    or the threads.
    """
    want_array("x", x, np.float32, "M, K", (None, weights.inner))
    want_int("threads", threads, 1)
    out: np.ndarray = isa.backend().multiply(x, weights, threads)
    return out
