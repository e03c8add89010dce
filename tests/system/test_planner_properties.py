"""What must hold of every plan, over drawn machines, models and requests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.errors import ContextError, MemoryBudgetError
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan, plan
from magicpig_cli.planner.memory import device, reserved_host, sequence_parts, total
from magicpig_cli.profiles import Profile, TableSize

GIB = 1 << 30


@st.composite
def shapes(draw) -> ModelShape:
    layers, kv_heads = draw(st.integers(2, 80)), draw(st.sampled_from([1, 2, 4, 8]))
    heads = kv_heads * draw(st.sampled_from([1, 3, 4, 8]))
    head_dim = draw(st.sampled_from([64, 80, 128, 256]))
    windows = draw(st.sampled_from([(None,) * layers, (4096, None) * (layers // 2) + (None,) * (layers % 2)]))
    return ModelShape(
        family="llama", layers=layers, hidden=heads * head_dim, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=draw(st.integers(1000, 200_000)), layer_windows=windows,
        context=draw(st.sampled_from([8192, 32_768, 131_072, 1_048_576])),
        params=draw(st.integers(10**7, 10**10)), dtype=draw(st.sampled_from(["bfloat16", "float32"])),
    )  # fmt: skip


@st.composite
def machines(draw) -> Hardware:
    free = draw(st.integers(2, 512)) * GIB
    gpus = draw(st.sampled_from([(), (Gpu(0, "Card", 24 * GIB, 23 * GIB),), (Gpu(0, "Card", 80 * GIB, 80 * GIB),)]))
    return Hardware(
        cpu_model="Some CPU", isa="avx2", tiers=("avx2",), cores_physical=8, cores_usable=16, threads=8, numa_nodes=1,
        memory_total=free, memory_free=free, memory_limit=None, process_bytes=0, gpus=gpus,
    )  # fmt: skip


@st.composite
def requests(draw) -> Settings:
    attention = AttentionOptions(
        mode=draw(st.sampled_from(["auto", "lsh", "exact"])),
        kv_dtype=draw(st.sampled_from(["auto", "float32", "int8"])),
        dense_layers=draw(st.sampled_from([None, (), (0, 1)])),
    )
    return Settings(attention=attention, context=draw(st.sampled_from([None, 4096, 8192])))


PROFILE = Profile(
    name="drawn", tables=(TableSize(8, 75, 16_384), TableSize(10, 150, 131_072), TableSize(11, 300)), max_batch=32
)


def planned(hardware: Hardware, shape: ModelShape, settings: Settings) -> Plan | None:
    try:
        return plan(hardware, shape, settings, PROFILE)
    except MemoryBudgetError:
        return None


@given(machines(), shapes(), requests())
def test_the_same_input_gives_the_same_plan(hardware, shape, settings):
    assert planned(hardware, shape, settings) == planned(hardware, shape, settings)


@given(machines(), shapes(), requests())
def test_a_plan_never_exceeds_what_is_free(hardware, shape, settings):
    chosen = planned(hardware, shape, settings)
    if chosen is None:
        return
    host = reserved_host(chosen, chosen.context, chosen.batch_size)
    assert total(host) <= hardware.memory_free
    assert total(sequence_parts(chosen, chosen.context)) == chosen.sequence_bytes(chosen.context)
    if chosen.gpu is not None:
        assert total(device(chosen, chosen.batch_size)) <= chosen.gpu.free_bytes
    assert len({line.partition(":")[0] for line in chosen.reasons}) == len(chosen.reasons)


@given(machines(), shapes(), requests(), st.integers(1, 256))
def test_more_memory_never_gives_a_smaller_batch_or_context(hardware, shape, settings, more_gib):
    less = planned(hardware, shape, settings)
    if less is None:
        return
    more = planned(replace(hardware, memory_free=hardware.memory_free + more_gib * GIB), shape, settings)
    assert more is not None
    assert more.context >= less.context
    if more.context == less.context and (more.K, more.L) == (less.K, less.L):
        assert more.batch_size >= less.batch_size
    elif more.context == less.context:  # larger tables, which fit now
        assert more.batch_size >= 1
        assert more.sequence_bytes(more.context) > less.sequence_bytes(less.context)


@given(shapes(), requests(), st.integers(1, 200_000), st.integers(1, 200_000))
def test_longer_sequences_take_more(shape, settings, one, other):
    big = Hardware(
        cpu_model="Some CPU", isa="avx2", tiers=("avx2",), cores_physical=8, cores_usable=16, threads=8, numa_nodes=1,
        memory_total=1 << 50, memory_free=1 << 50, memory_limit=None, process_bytes=0,
    )  # fmt: skip
    try:
        chosen = plan(big, shape, settings, PROFILE)
    except ContextError:
        return
    short, long = sorted((one, other))
    assert chosen.sequence_bytes(short) <= chosen.sequence_bytes(long)
