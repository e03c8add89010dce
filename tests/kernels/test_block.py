"""Both sides of a decoder block against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import kernels
from magicpig_cli.kernels import reference
from tests.kernels.data import RELAXED, ROW_TYPES
from tests.kernels.test_int4 import make_int4
from tests.kernels.test_product import make_weights as make_plain
from tests.kernels.test_product import vectors
from tests.tolerances import close_block, close_int4_block

EPS = 1e-5


def make_weights(shapes: list[int], inner: int, dtype: str, seed: int = 0) -> kernels.Weights:
    """Of order 1, or 0.1 with 4 bits."""
    return make_int4(shapes, inner, seed, 0.02) if dtype == "int4" else make_plain(shapes, inner, dtype, seed)


def make_block(
    E: int, heads: int, kv_heads: int, D: int, inner: int, dtype: str = "float32", seed: int = 0, norms: str = "all",
    bias: bool = True, activation: str = "silu", whole_norms: bool = False,
) -> kernels.Block:  # fmt: skip
    rng = np.random.default_rng(seed)

    def norm(size: int) -> kernels.Norm | None:
        return None if norms == "none" else kernels.Norm(rng.uniform(0.5, 1.5, size).astype(np.float32), EPS)

    queries, keys = heads * D, kv_heads * D
    return kernels.Block(
        heads=heads, kv_heads=kv_heads, head_dim=D, qkv=make_weights([queries, keys, keys], E, dtype, seed),
        output=make_weights([E], queries, dtype, seed + 1), gate_up=make_weights([inner, inner], E, dtype, seed + 2),
        down=make_weights([E], inner, dtype, seed + 3), activation=activation,
        qkv_bias=rng.normal(size=queries + 2 * keys).astype(np.float32) if bias else None,
        before_attention=norm(E), after_attention=norm(E), before_mlp=norm(E), after_mlp=norm(E),
        q_norm=norm(queries if whole_norms else D), k_norm=norm(keys if whole_norms else D),
    )  # fmt: skip


def angles(count: int, R: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    turn = np.random.default_rng(seed).uniform(0, 6, size=(count, R // 2)).astype(np.float32)
    return np.tile(np.cos(turn), 2), np.tile(np.sin(turn), 2)


@RELAXED
@given(
    E=st.sampled_from([7, 16, 33, 72, 130]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    D=st.sampled_from([2, 6, 24, 64]),
    inner=st.sampled_from([1, 9, 31, 96]),
    count=st.integers(1, 5),
    dtype=st.sampled_from(ROW_TYPES),
    norms=st.sampled_from(["all", "none"]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 50),
)
def test_equals_the_reference(isa, E, heads, D, inner, count, dtype, norms, activation, flags, seed):
    bias, whole_norms, rotated = flags
    block = make_block(E, *heads, D, inner, dtype, seed, norms, bias, activation, whole_norms)
    x, rotary = vectors(count, E, seed), angles(count, D) if rotated else None
    got = kernels.block_inputs(x, block, rotary, threads=2)
    wanted = reference.block_inputs(x, block, *(rotary or (None, None)), threads=1)
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype, a.flags.c_contiguous) == (b.shape, np.float32, True)
        assert close_block(a, b)
    attended = vectors(count, heads[0] * D, seed + 1)
    out = kernels.block_output(x, attended, block, threads=2)
    assert out.dtype == np.float32
    assert close_block(out, reference.block_output(x, attended, block, 1))


def test_the_reference_is_what_the_formulas_say():
    """Written out once, in float64, without the reference's helpers."""
    block, x, (cosine, sine) = make_block(6, 2, 1, 4, 5), vectors(1, 6), angles(1, 4)
    attended = vectors(1, 8, 9)

    def normed(y: np.ndarray, norm: kernels.Norm) -> np.ndarray:
        return y / np.sqrt(np.mean(y**2) + EPS) * norm.weight

    q, _, v = (part[0] for part in reference.block_inputs(x, block, cosine, sine, 1))
    wide = x[0].astype(np.float64)
    start = normed(wide, block.before_attention)
    head = normed(block.qkv.read(0)[4:] @ start + block.qkv_bias[4:8], block.q_norm)
    turned = [head[0] * cosine[0, 0] - head[2] * sine[0, 0], head[1] * cosine[0, 1] - head[3] * sine[0, 1],
              head[2] * cosine[0, 2] + head[0] * sine[0, 2], head[3] * cosine[0, 3] + head[1] * sine[0, 3]]  # fmt: skip
    assert close_block(q[1], np.array(turned))
    assert close_block(v[0], block.qkv.read(2) @ start + block.qkv_bias[12:])
    middle = wide + normed(block.output.read(0) @ attended[0], block.after_attention)
    gate, up = (block.gate_up.read(i) @ normed(middle, block.before_mlp) for i in range(2))
    down = block.down.read(0) @ (gate / (1 + np.exp(-gate)) * up)
    wanted = middle + normed(down, block.after_mlp)
    assert close_block(reference.block_output(x, attended, block, 1)[0], wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_int4_blocks_equal_the_reference(isa, bias):
    """Norms differ by rounding, after which some value of x may be another integer."""
    block = make_block(128, 4, 2, 24, 96, "int4", bias=bias)
    x, rotary, attended = vectors(3, 128), angles(3, 24), vectors(3, 96, 8)
    got = kernels.block_inputs(x, block, rotary, threads=2)
    for a, b in zip(got, reference.block_inputs(x, block, *rotary, threads=1), strict=True):
        assert close_int4_block(a, b)
    out = kernels.block_output(x, attended, block, threads=2)
    assert close_int4_block(out, reference.block_output(x, attended, block, 1))


@pytest.mark.parametrize("dtype", [*ROW_TYPES, "int4"])
def test_no_bit_depends_on_threads_or_neighbours(native_isa, dtype):
    E, inner = (128, 320) if dtype == "int4" else (130, 333)
    block, x, attended = make_block(E, 4, 2, 24, inner, dtype), vectors(6, E), vectors(6, 96, 8)
    cosine, sine = angles(6, 24)
    inputs = kernels.block_inputs(x, block, (cosine, sine), threads=1)
    out = kernels.block_output(x, attended, block, threads=1)
    for threads in (2, 3):
        again = kernels.block_inputs(x, block, (cosine, sine), threads=threads)
        assert all(np.array_equal(a, b) for a, b in zip(inputs, again, strict=True))
        assert np.array_equal(kernels.block_output(x, attended, block, threads=threads), out)
    for first, last in ((0, 1), (1, 4), (3, 6)):
        some = [np.ascontiguousarray(part[first:last]) for part in (x, attended, cosine, sine)]
        alone = kernels.block_inputs(some[0], block, (some[2], some[3]), threads=2)
        assert all(np.array_equal(a[first:last], b) for a, b in zip(inputs, alone, strict=True))
        assert np.array_equal(kernels.block_output(some[0], some[1], block, threads=2), out[first:last])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_at_the_ends_of_their_range(isa, activation):
    """Large gates pass or close, and give no NaN."""
    gates = np.array([-3e4, -90, -30, -1e-30, 0, 1e-30, 30, 90, 3e4], dtype=np.float32)
    one = lambda outer, inner: kernels.Weights("float32", [np.ones((n, inner), np.float32) for n in outer])  # noqa: E731
    for gate in gates:
        block = kernels.Block(
            heads=1, kv_heads=1, head_dim=2, qkv=one((2, 2, 2), 1), output=one((1,), 2), gate_up=one((1, 1), 1),
            down=one((1,), 1), activation=activation,
        )  # fmt: skip
        x = np.array([[gate]], dtype=np.float32)
        out = kernels.block_output(x, np.zeros((1, 2), np.float32), block, threads=1)
        opened = max(float(gate), 0.0) if abs(gate) > 20 else gate / 2
        assert close_block(out[0], gate + np.array([opened * np.float64(gate)]))


def test_no_vector_at_all(isa):
    block = make_block(16, 2, 1, 8, 9)
    q, k, v = kernels.block_inputs(np.zeros((0, 16), np.float32), block, None, threads=2)
    assert (q.shape, k.shape, v.shape) == ((0, 2, 8), (0, 1, 8), (0, 1, 8))
    assert (
        kernels.block_output(np.zeros((0, 16), np.float32), np.zeros((0, 16), np.float32), block, threads=2).size == 0
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"down": make_weights([5], 4, "float32")}, r"down: want weights of \(6,\) rows of 5, got \(5,\) of 4"),
        ({"qkv": make_weights([8, 4], 6, "float32")}, "qkv: want weights"),
        ({"qkv_bias": np.zeros(15, np.float32)}, "qkv_bias: want float32"),
        ({"before_mlp": kernels.Norm(np.ones(5, np.float32), EPS)}, "before_mlp: want 6 weights, got 5"),
        ({"q_norm": kernels.Norm(np.ones(5, np.float32), EPS)}, "q_norm: want 4 or 8 weights, got 5"),
        ({"activation": "relu"}, "activation: want one of silu, gelu_tanh, got 'relu'"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(change, problem):
    block = make_block(6, 2, 1, 4, 5)
    parts = {name: part for name, part in vars(block).items() if name != "activation_kind"}
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.Block(**(parts | change))


@pytest.mark.parametrize(
    ("x", "rotary", "problem"),
    [
        (np.zeros((1, 5), np.float32), None, "x: want float32"),
        (np.zeros((1, 6), np.float32), angles(2, 4), "cosine: want float32"),
        (np.zeros((1, 6), np.float32), angles(1, 6), "cosine: want an even number of values up to 4, got 6"),
        (np.zeros((1, 6), np.float32), (angles(1, 4)[0], angles(1, 2)[1]), "sine: want float32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x, rotary, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        kernels.block_inputs(x, make_block(6, 2, 1, 4, 5), rotary, threads=1)
