"""A decoder block of a decode step, on both sides of attention: norms, products, rotary embedding and gated MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from magicpig_cli.kernels import isa
from magicpig_cli.kernels.checks import want_array, want_int
from magicpig_cli.kernels.product import Weights

Activation = Literal["silu", "gelu_tanh"]
_NATIVE_ACTIVATION: dict[str, int] = {"silu": 0, "gelu_tanh": 1}  # as in cyext/simd/layers.h


@dataclass(frozen=True, slots=True)
class Norm:
    """x / √(mean x² + eps) · weight, over as many values at a time as there are weights."""

    weight: np.ndarray  # float32 [n]
    eps: float


class Block:
    """Weights of one block with E hidden values.

    [norm] → q, k, v [bias] [norms] … attention … output [norm], added to the input; then [norm] → gate and up → down
    [norm], added again. What stands in brackets is optional.
    """

    def __init__(
        self, *, heads: int, kv_heads: int, head_dim: int, qkv: Weights, output: Weights, gate_up: Weights,
        down: Weights, activation: Activation, qkv_bias: np.ndarray | None = None,
        before_attention: Norm | None = None, q_norm: Norm | None = None, k_norm: Norm | None = None,
        after_attention: Norm | None = None, before_mlp: Norm | None = None, after_mlp: Norm | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv, self.output, self.gate_up, self.down = qkv, output, gate_up, down
        self.qkv_bias = qkv_bias  # float32 [(H + 2·Hkv)·D] or None
        self.before_attention, self.q_norm, self.k_norm = before_attention, q_norm, k_norm
        self.after_attention, self.before_mlp, self.after_mlp = after_attention, before_mlp, after_mlp
        if activation not in _NATIVE_ACTIVATION:
            raise ValueError(f"activation: want one of {', '.join(_NATIVE_ACTIVATION)}, got {activation!r}")
        self.activation = activation
        self.activation_kind = _NATIVE_ACTIVATION[activation]
        self._want_sizes()

    @property
    def rounds_vectors(self) -> bool:
        """Whether some of its products round their vectors before they multiply."""
        return any(weights.is_int4 for weights in (self.qkv, self.output, self.gate_up, self.down))

    def _want_sizes(self) -> None:
        queries, keys, E = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.qkv.inner
        inner = self.gate_up.outer[0]
        for name, weights, outer, values in (
            ("qkv", self.qkv, (queries, keys, keys), E), ("output", self.output, (E,), queries),
            ("gate_up", self.gate_up, (inner, inner), E), ("down", self.down, (E,), inner),
        ):  # fmt: skip
            if weights.outer != outer or weights.inner != values:
                raise ValueError(
                    f"{name}: want weights of {outer} rows of {values}, got {weights.outer} of {weights.inner}"
                )
        if self.qkv_bias is not None:
            want_array("qkv_bias", self.qkv_bias, np.float32, "(H + 2·Hkv)·D", (queries + 2 * keys,))
        for name, whole in (
            ("before_attention", E), ("after_attention", E), ("before_mlp", E), ("after_mlp", E),
            ("q_norm", queries), ("k_norm", keys),
        ):  # fmt: skip
            norm: Norm | None = getattr(self, name)
            if norm is None:
                continue
            want_array(name, norm.weight, np.float32, "n", (None,))
            sizes = (self.head_dim, whole) if name in ("q_norm", "k_norm") else (whole,)
            if len(norm.weight) not in sizes:
                raise ValueError(f"{name}: want {' or '.join(map(str, sizes))} weights, got {len(norm.weight)}")


def block_inputs(
    x: np.ndarray, block: Block, rotary: tuple[np.ndarray, np.ndarray] | None, *, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What attention is given: q float32 [M, H, D], k and v float32 [M, Hkv, D], for x float32 [M, E].

    rotary: cosine and sine, float32 [M, R], of the first R ≤ D values of each head of q and k (None: no rotation).
    """
    want_array("x", x, np.float32, "M, E", (None, block.qkv.inner))
    want_int("threads", threads, 1)
    cosine, sine = rotary or (None, None)
    if cosine is not None:
        want_array("cosine", cosine, np.float32, "M, R", (x.shape[0], None))
        want_array("sine", sine, np.float32, "M, R", cosine.shape)
        if cosine.shape[1] % 2 or cosine.shape[1] > block.head_dim:
            raise ValueError(f"cosine: want an even number of values up to {block.head_dim}, got {cosine.shape[1]}")
    q, k, v = isa.backend().block_inputs(x, block, cosine, sine, threads)
    return q, k, v


def block_output(x: np.ndarray, attended: np.ndarray, block: Block, *, threads: int) -> np.ndarray:
    """The block's output float32 [M, E], from its input x float32 [M, E] and attention's, float32 [M, H·D].

    No bit depends on the other vectors or the threads.
    """
    want_array("x", x, np.float32, "M, E", (None, block.qkv.inner))
    want_array("attended", attended, np.float32, "M, H·D", (x.shape[0], block.output.inner))
    want_int("threads", threads, 1)
    out: np.ndarray = isa.backend().block_output(x, attended, block, threads)
    return out
