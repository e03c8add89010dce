"""A decoder block around attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from magicpig_cli.kernels.reference.product import multiply

if TYPE_CHECKING:
    from magicpig_cli.kernels.block import Block, Norm


def block_inputs(
    x: np.ndarray, block: Block, cosine: np.ndarray | None, sine: np.ndarray | None, threads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q float32 [M, H, D], k and v float32 [M, Hkv, D] of x float32 [M, E]."""
    flat = multiply(_normed(x, block.before_attention), block.qkv, threads)
    parts: list[np.ndarray] = []
    done = 0
    for outer, heads in zip(block.qkv.outer, (block.heads, block.kv_heads, block.kv_heads), strict=True):
        part = flat[len(x) * done : len(x) * (done + outer)].reshape(len(x), outer)
        if block.qkv_bias is not None:
            part = part + block.qkv_bias[done : done + outer]
        norm = {0: block.q_norm, 1: block.k_norm}.get(len(parts))
        by_head = _normed(part, norm).reshape(len(x), heads, block.head_dim)
        parts.append(by_head if len(parts) == 2 else _rotated(by_head, cosine, sine))
        done += outer
    q, k, v = parts
    return q, k, v


def _normed(x: np.ndarray, norm: Norm | None) -> np.ndarray:
    """RMS norm of each n values of x [M, m·n], n weights."""
    if norm is None:
        return x
    wide = x.astype(np.float64).reshape(len(x), x.shape[1] // len(norm.weight), len(norm.weight))
    size = np.sqrt((wide**2).mean(axis=2, keepdims=True) + norm.eps)
    normed: np.ndarray = (wide / size * norm.weight).reshape(x.shape).astype(np.float32)
    return normed


def _rotated(x: np.ndarray, cosine: np.ndarray | None, sine: np.ndarray | None) -> np.ndarray:
    """Rotary embedding of the first R values of x [M, heads, D]."""
    if cosine is None or sine is None:
        return x
    turned, rest = x[..., : cosine.shape[1]], x[..., cosine.shape[1] :]
    first, second = np.split(turned, 2, axis=-1)
    turned = turned * cosine[:, None] + np.concatenate([-second, first], axis=-1) * sine[:, None]
    return np.concatenate([turned, rest], axis=-1)


def block_output(x: np.ndarray, attended: np.ndarray, block: Block, threads: int) -> np.ndarray:
    """The block's output float32 [M, E]."""
    added = x + _normed(multiply(attended, block.output, threads).reshape(x.shape), block.after_attention)
    both = multiply(_normed(added, block.before_mlp), block.gate_up, threads).reshape(2, len(x), block.down.inner)
    gate, up = both.astype(np.float64)
    at = gate if block.activation == "silu" else 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    with np.errstate(over="ignore"):
        gated = (gate / (1 + np.exp(-at)) * up).astype(np.float32)
    out: np.ndarray = added + _normed(multiply(gated, block.down, threads).reshape(x.shape), block.after_mlp)
    return out
