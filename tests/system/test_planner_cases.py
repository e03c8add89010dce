"""The planner over hardware × model × request: rows whose bytes were added up by hand, and what it chooses to fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from transformers import AutoConfig

from magicpig_cli.cards import card
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.errors import MemoryBudgetError, UsageError
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner import Plan, plan
from magicpig_cli.planner.memory import device, reserved_host, total
from magicpig_cli.planner.quality import expected_ratio
from magicpig_cli.profiles import BUILT_IN, Profile, TableSize

GIB, MIB = 1 << 30, 1 << 20
CONFIGS = json.loads((Path(__file__).parents[2] / "scripts" / "plan_models.json").read_text(encoding="utf-8"))
SHAPES: dict[str, ModelShape] = {
    name: shape_from_config(AutoConfig.for_model(**fields)) for name, fields in CONFIGS.items()
}
MACHINE = Hardware(
    cpu_model="Some CPU", isa="avx2", tiers=("portable", "avx2"), cores_physical=16, cores_usable=32, threads=16,
    numa_nodes=1, memory_total=0, memory_free=0, memory_limit=None, process_bytes=0,
)  # fmt: skip
# As the shipped ones: dense layers of the paper, tables by context.
PAPER = Profile(
    name="paper", sampler="lsh",
    tables=(TableSize(8, 75, 16_384), TableSize(9, 120, 32_768), TableSize(10, 150, 131_072), TableSize(11, 300)),
    dense_layers=(0, 16, 32, 48, 64), chunk=2048, max_batch=32, host_reserve=3 * GIB, device_reserve=1536 * MIB,
)  # fmt: skip


def machine(memory_gib: float, gpu: str | None) -> Hardware:
    free = int(memory_gib * GIB)
    return replace(MACHINE, memory_total=free, memory_free=free, gpus=(card(gpu),) if gpu else ())


def settings(context: int | None = None, **values) -> Settings:
    attention = {k: v for k, v in values.items() if k in AttentionOptions.__dataclass_fields__}
    model = {k: v for k, v in values.items() if k in ModelOptions.__dataclass_fields__}
    extrapolate = values.get("allow_extrapolation", False)
    return Settings(
        attention=AttentionOptions(**attention), model=ModelOptions(**model), context=context,
        allow_extrapolation=extrapolate,
    )  # fmt: skip


# By hand, bytes of one sequence. Keys: tokens − 68, whole flushes of 64. Rows: blocks of 1,024 keys, and one more from
# half of the last on. Index: layers × heads × 2 × (L × (keys + segments × (2^K + 1) + 1,600)) + 2 × 1,600 × layers.
# Growth: a segment of 16,384 keys in each layer, one of 65,472 (or all) keys and the codes of one head in one layer.
LLAMA_96K = (
    32 * 8 * (97 * 1024) * 512
    + 30 * (8 * 150 * 2 * (98_176 + 14 * 1025 + 1600) + 2 * 1600)
    + 2 * 150 * 8 * (30 * (16_384 + 1025) + 65_472 + 1025) + 2 * 150 * 65_472
)  # fmt: skip
QWEN_32K = (
    28 * 4 * (33 * 1024) * 512
    + 26 * (4 * 120 * 2 * (32_640 + 6 * 513 + 1600) + 2 * 1600)
    + 2 * 120 * 4 * (26 * (16_384 + 513) + 32_640 + 513) + 2 * 120 * 32_640
)  # fmt: skip
MISTRAL_8K = (
    32 * 8 * (9 * 1024) * 512
    + 30 * (8 * 75 * 2 * (8_064 + 3 * 257 + 1600) + 2 * 1600)
    + 2 * 75 * 8 * (30 * (8_064 + 257) + 8_064 + 257) + 2 * 75 * 8_064
)  # fmt: skip
LLAMA_WEIGHTS = 8_030_261_248 * 2  # on the GPU


@pytest.mark.parametrize(
    ("model", "context", "gpu", "memory_gib", "tables", "sequence", "batch"),
    [
        ("Llama-3.1-8B", 98_304, "RTX 4090", 64, (10, 150), LLAMA_96K, 2),
        ("Llama-3.1-8B", 98_304, "RTX 4090", 128, (10, 150), LLAMA_96K, 5),
        ("Llama-3.1-8B", 98_304, "A100-SXM4-80GB", 512, (10, 150), LLAMA_96K, 24),
        ("Qwen2.5-7B", 32_768, "RTX 4090", 32, (9, 120), QWEN_32K, 9),
        ("Qwen2.5-7B", 32_768, "L20", 512, (9, 120), QWEN_32K, 32),
        ("Mistral-7B-v0.3", 8192, "RTX 4090", 32, (8, 75), MISTRAL_8K, 16),
    ],
)
def test_rows_added_up_by_hand(model, context, gpu, memory_gib, tables, sequence, batch):
    chosen = plan(machine(memory_gib, gpu), SHAPES[model], settings(context), PAPER)
    assert tables == (chosen.K, chosen.L)
    assert chosen.sequence_bytes(context) == sequence
    assert chosen.budget_bytes == memory_gib * GIB - 3 * GIB
    assert batch == min(32, chosen.budget_bytes // sequence)
    assert chosen.batch_size == batch
    assert total(reserved_host(chosen, context, batch)) == 3 * GIB + batch * sequence


def test_what_a_gpu_holds_of_llama():
    chosen = plan(machine(64, "RTX 4090"), SHAPES["Llama-3.1-8B"], settings(98_304), PAPER)
    per_token = (2 * 4096 + 2 * (32 + 16) * 128 + 3 * 14_336) * 2 + 3 * 4096 * 4
    block, estimate, hashed = 8 * 1024 * 512, 32 * 128 * 4 + 32 * 4, 1024 * 512
    half, other_half = 2 * 2048 * 8 + block + estimate, 2 * 64 + block + estimate
    # One graph of a batch of one, or two of it (of 1 and 2) and one of its halves; each has q, k, v, the result of
    # attention and logits of its batch size, and there is memory that a lane has once.
    for batch, graphs, lanes in ((1, 1, 1), (2, 3, 2)):
        parts = {part.name: part.bytes for part in device(chosen, batch)}
        step = batch * (32 * (2 * 32 + 2 * 8) * 128 + 128_256) * 2
        assert parts == {
            "weights": LLAMA_WEIGHTS,
            "reserve": 1536 * MIB,
            "activations": 2048 * per_token + 2 * 2048 * 32 * 512 * 4 + batch * 2 * 128_256 * 4,
            "hashing": 4096 * 1500 * 13,
            "copies": 2 * (half + hashed + (other_half if batch == 2 else 0)) + 2 * block,
            "random directions": 30 * 128 * 1500 * 4,
            "windows": batch * 32 * 8 * 132 * 512,
            "graphs": graphs * (33 * 4 * MIB + step) + lanes * 54 * MIB,
        }
    assert total(device(chosen, chosen.batch_size)) <= chosen.gpu.free_bytes


def test_weights_of_70b_fit_no_single_card_but_the_largest():
    for gpu in ("RTX 4090", "L20", "A100-SXM4-80GB"):
        with pytest.raises(MemoryBudgetError, match=r"has no room: 131\.4 GiB weights") as caught:
            plan(machine(256, gpu), SHAPES["Llama-3.1-70B"], settings(32_768), PAPER)
        assert "--device cpu" in caught.value.hint
    assert plan(machine(256, "H200"), SHAPES["Llama-3.1-70B"], settings(32_768), PAPER).batch_size > 1


def test_a_gpu_with_little_room_reads_prompts_in_shorter_chunks_and_decodes_fewer():
    llama = SHAPES["Llama-3.1-8B"]
    roomy = plan(machine(512, "RTX 4090"), llama, settings(8192), PAPER)
    needed = total(device(roomy, 1))
    tight = replace(machine(512, None), gpus=(replace(card("RTX 4090"), free_bytes=needed - 1),))
    shorter = plan(tight, llama, settings(8192), PAPER)
    assert roomy.chunk == 2048
    assert shorter.chunk == 1024
    assert any("chunk 1024: profile paper has 2048, for which the GPU has no room" in line for line in shorter.reasons)
    per_sequence = total(device(roomy, 2)) - needed
    few = replace(machine(512, None), gpus=(replace(card("RTX 4090"), free_bytes=needed + 2 * per_sequence + 5),))
    chosen = plan(few, llama, settings(8192), PAPER)
    assert (chosen.max_batch, chosen.batch_size) == (3, 3)
    assert any(line.startswith("batch 3: what fits on the GPU") for line in chosen.reasons)
    own_limit = plan(machine(512, "A100-SXM4-80GB"), llama, settings(8192), BUILT_IN)
    assert any(line.startswith("batch 32: no more are decoded together on a GPU") for line in own_limit.reasons)


def test_graphs_are_left_out_where_that_is_asked_for_or_the_gpu_has_no_room():
    llama = SHAPES["Llama-3.1-8B"]
    roomy = plan(machine(512, "RTX 4090"), llama, settings(8192), PAPER)
    without = plan(machine(512, "RTX 4090"), llama, settings(8192, no_cuda_graphs=True), PAPER)
    assert (roomy.graphs, without.graphs) == (True, False)
    parts = [{part.name: part.bytes for part in device(chosen, 1)} for chosen in (roomy, without)]
    graphs = parts[0].pop("graphs")
    assert parts[0] == parts[1]
    assert "no CUDA graphs: as asked, every operator is launched by itself" in without.reasons
    shortest = total(device(replace(roomy, chunk=128), 1))
    tight = [replace(machine(512, None), gpus=(replace(card("RTX 4090"), free_bytes=n),)) for n in
             (shortest, shortest - 1, shortest - graphs, shortest - graphs - 1)]  # fmt: skip
    chosen = [plan(few, llama, settings(8192), PAPER) for few in tight[:3]]
    assert [(few.graphs, few.chunk, few.max_batch) for few in chosen] == [
        (True, 128, 1),
        (False, 128, 11),  # what graphs would take has room for ten more sequences of 17.5 MiB
        (False, 128, 1),
    ]
    assert "no CUDA graphs: the GPU has no room for them, every operator is launched by itself" in chosen[1].reasons
    with pytest.raises(MemoryBudgetError, match="has no room"):
        plan(tight[3], llama, settings(8192), PAPER)
    assert not plan(machine(512, None), llama, settings(8192, device="cpu"), PAPER).graphs


def test_a_gpu_keeps_graphs_of_few_batch_sizes_however_many_sequences_there_are():
    chosen = plan(machine(512, "A100-SXM4-80GB"), SHAPES["Llama-3.1-8B"], settings(8192), PAPER)
    sizes = [next(p.bytes for p in device(chosen, batch) if p.name == "graphs") for batch in (8, 9, 16)]
    step = (32 * (2 * 32 + 2 * 8) * 128 + 128_256) * 2
    assert [b - a for a, b in pairwise(sizes)] == [8 * step, 8 * 7 * step]


def test_smaller_tables_are_taken_where_the_recommended_ones_do_not_fit():
    llama = SHAPES["Llama-3.1-8B"]
    need = {
        size: plan(machine(512, "RTX 4090"), llama, settings(98_304, K=size[0], L=size[1]), PAPER).sequence_bytes(
            98_304
        )
        for size in ((10, 150), (9, 120), (8, 75))
    }
    assert need[10, 150] > need[9, 120] > need[8, 75]
    for size, free in (((10, 150), need[10, 150]), ((9, 120), need[10, 150] - 1), ((8, 75), need[9, 120] - 1)):
        chosen = plan(machine((free + 3 * GIB) / GIB, "RTX 4090"), llama, settings(98_304), PAPER)
        assert size == (chosen.K, chosen.L)
        assert chosen.batch_size == 1
        told = [line for line in chosen.reasons if line.startswith(f"tables K={size[0]} L={size[1]}: ")]
        assert ("profile paper has K=10 L=150" in told[0]) == (size != (10, 150))
    with pytest.raises(MemoryBudgetError):
        plan(machine((need[8, 75] + 3 * GIB - 1) / GIB, "RTX 4090"), llama, settings(98_304), PAPER)
    asked = settings(98_304, K=10, L=150)
    with pytest.raises(MemoryBudgetError) as caught:  # what was asked for is never replaced
        plan(machine((need[10, 150] + 3 * GIB - 1) / GIB, "RTX 4090"), llama, asked, PAPER)
    assert "-K 8 -L 75" in caught.value.hint


def test_rows_never_become_int8_by_themselves():
    for memory_gib in (24, 20, 16, 12, 8):
        chosen = plan(machine(memory_gib, "RTX 4090"), SHAPES["Llama-3.1-8B"], settings(), PAPER)
        assert chosen.row_dtype == "bfloat16"


def test_tables_follow_the_context_that_is_chosen():
    llama = SHAPES["Llama-3.1-8B"]
    for context, tables in ((8192, (8, 75)), (16_384, (8, 75)), (16_385, (9, 120)), (131_072, (10, 150))):
        chosen = plan(machine(256, "RTX 4090"), llama, settings(context), PAPER)
        assert tables == (chosen.K, chosen.L)
    beyond = settings(200_000, allow_extrapolation=True)
    chosen = plan(machine(256, "RTX 4090"), llama, beyond, PAPER)
    assert (chosen.K, chosen.L) == (11, 300)


def test_auto_takes_the_longest_context_that_fits_with_any_tables():
    llama = SHAPES["Llama-3.1-8B"]
    hardware = machine(16, "RTX 4090")
    chosen = plan(hardware, llama, settings(), PAPER)
    assert 0 < chosen.context < 131_072
    assert chosen.sequence_bytes(chosen.context) <= chosen.budget_bytes
    for K, L in ((8, 75), (9, 120), (10, 150)):
        with pytest.raises(MemoryBudgetError):
            plan(hardware, llama, settings(chosen.context + 1, K=K, L=L), PAPER)
    # so little that the tables for short contexts are the recommended ones again
    little = plan(machine(5, "RTX 4090"), llama, settings(), PAPER)
    assert little.context <= 16_384
    assert (little.K, little.L) == (8, 75)
    assert not any("these sample more keys" in line for line in little.reasons)


REFUSED = [
    ("Llama-3.1-8B", 131_072, None, 32, {}),
    ("Llama-3.1-8B", 131_072, None, 32, {"dtype": "float32"}),
    ("Llama-3.1-8B", 131_072, None, 17, {}),
    ("Llama-3.1-8B", 131_072, None, 6, {}),
    ("Llama-3.1-8B", 131_072, "RTX 4090", 16, {}),
    ("Llama-3.1-8B", 524_288, "RTX 4090", 64, {"allow_extrapolation": True}),
    ("Llama-3.1-8B", 32_768, "RTX 3080", 64, {}),
    ("Llama-3.1-70B", 32_768, "L20", 256, {}),
    ("Llama-3.1-70B", 131_072, None, 128, {}),
    ("Qwen2.5-7B", 131_072, "RTX 4090", 8, {"K": 12, "L": 300}),
    ("Mistral-7B-v0.3", None, None, 12, {}),
    ("Mistral-7B-v0.3", 32_768, None, 17, {"local": 32_000, "kv_dtype": "float32", "mode": "exact"}),
]


@pytest.mark.parametrize(("model", "context", "gpu", "memory_gib", "options"), REFUSED)
def test_ways_out_of_a_refusal_work(model, context, gpu, memory_gib, options):
    hardware, asked = machine(memory_gib, gpu), settings(context, **options)
    with pytest.raises(MemoryBudgetError) as refused:
        plan(hardware, SHAPES[model], asked, PAPER)
    error = refused.value
    sums = re.search(r"(?:fit|room|sequences): (.*), but ([\d.]+ [KMGT]iB) (?:of .* )?are free", error.message)
    assert sums, error.message
    assert_adds_up(sums[1])
    ways = error.hint.split("; or ")
    assert 1 <= len(ways) <= 3
    for way in ways:
        if way.startswith("-"):
            typed(hardware, SHAPES[model], asked, way)
        elif match := re.fullmatch(r"a GPU with ([\d.]+) GiB free", way):
            size = int(float(match[1]) * GIB)
            larger = tuple(replace(found, total_bytes=size, free_bytes=size) for found in hardware.gpus)
            plan(replace(hardware, gpus=larger), SHAPES[model], asked, PAPER)
        elif match := re.fullmatch(r"([\d.]+) GiB more free memory", way):
            more = replace(hardware, memory_free=hardware.memory_free + int((float(match[1]) + 0.05) * GIB))
            plan(more, SHAPES[model], asked, PAPER)
        else:
            assert re.fullmatch(r"a model like it of [\d.]+[BM] parameters", way), way


def typed(hardware: Hardware, shape: ModelShape, asked: Settings, options: str) -> Plan:
    """Plan with the options of a hint typed."""
    for name, value in re.findall(r"(-[-\w]+) (\S+)", options):
        if name == "-c":
            asked = replace(asked, context=int(value))
        elif name in ("-K", "-L", "--sink", "--local"):
            asked = replace(asked, attention=replace(asked.attention, **{name.lstrip("-"): int(value)}))
        elif name in ("--kv-dtype", "--attention"):
            field = {"--kv-dtype": "kv_dtype", "--attention": "mode"}[name]
            asked = replace(asked, attention=replace(asked.attention, **{field: value}))
        else:
            asked = replace(asked, model=replace(asked.model, **{name[2:]: value}))
    return plan(hardware, shape, asked, PAPER)


def assert_adds_up(text: str) -> None:
    """`15.0 GiB weights + 512.0 MiB windows = 15.5 GiB`, rounded as written."""
    left, _, right = text.partition(" = ")
    sizes = [in_gib(*found) for found in re.findall(r"([\d.]+) ([KMGT]?i?B)", left)]
    assert sizes
    if right:
        (found,) = re.findall(r"([\d.]+) ([KMGT]?i?B)", right)
        assert abs(sum(sizes) - in_gib(*found)) <= 0.051 * (len(sizes) + 1)


def in_gib(number: str, unit: str) -> float:
    return float(number) / 1024 ** {"B": 3, "KiB": 2, "MiB": 1, "GiB": 0, "TiB": -1}[unit]


def test_three_ways_where_there_are_three():
    with pytest.raises(MemoryBudgetError) as caught:
        plan(machine(32, None), SHAPES["Llama-3.1-8B"], settings(131_072), BUILT_IN)
    ways = caught.value.hint.split("; or ")
    assert len(ways) == 3
    assert ways[0].startswith("-c ")


@pytest.mark.parametrize(
    ("published", "context", "memory_gib", "options", "way"),
    [
        # beyond the model's own context, where that was allowed: the longest that fits, not the model's own
        ("bfloat16", 524_288, 64, {"allow_extrapolation": True}, r"-c 2\d{5}"),
        # weights that nobody asked to have as float32
        ("float32", 8192, 24, {}, "--dtype bfloat16"),
        # neither a shorter context nor an option alone
        ("bfloat16", 131_072, 17, {}, r"--quantize int8 -c \d+"),
        ("bfloat16", 131_072, 18.3, {"local": 120_000}, "--sink 4 --local 64 .*"),
    ],
)
def test_the_way_out_that_comes_first(published, context, memory_gib, options, way):
    hardware, shape = machine(memory_gib, None), replace(SHAPES["Llama-3.1-8B"], dtype=published)
    with pytest.raises(MemoryBudgetError) as caught:
        plan(hardware, shape, settings(context, **options), PAPER)
    first = caught.value.hint.split("; or ")[0]
    assert re.fullmatch(way, first), caught.value.hint
    chosen = typed(hardware, shape, settings(context, **options), first)
    if "-c" in first:
        assert chosen.budget_bytes < chosen.sequence_bytes(chosen.context + 1024)


def test_what_is_expected_to_be_sampled():
    """The four ratios of EVIDENCE.md section 1, which the spread of angles was fitted to."""
    for (K, L), measured in {(8, 75): 0.082, (9, 120): 0.072, (10, 150): 0.045, (11, 300): 0.053}.items():
        assert expected_ratio(K, L) == pytest.approx(measured, rel=0.03)
    told = Profile(name="told", tables=(TableSize(10, 150, sampled_ratio=0.02),))
    hardware, llama = machine(128, None), SHAPES["Llama-3.1-8B"]
    assert plan(hardware, llama, settings(), told).sampled_ratio == 0.02
    assert plan(hardware, llama, settings(K=10, L=150), told).sampled_ratio == 0.02
    assert plan(hardware, llama, settings(K=8, L=75), told).sampled_ratio == expected_ratio(8, 75)


def test_a_profile_is_followed_and_named():
    profile = Profile(
        name="mine", sampler="lsh", sink=2, local=128, chunk=256, threads=4, max_batch=3, auto_lsh_from=2048,
        host_reserve=2 * GIB, dense_layers=(0, 5, 99), tables=(TableSize(7, 60),),
    )  # fmt: skip
    hardware, llama = machine(256, None), SHAPES["Llama-3.1-8B"]
    chosen = plan(hardware, llama, settings(16_384), profile, "as asked")
    assert (chosen.sink, chosen.local, chosen.chunk, chosen.threads, chosen.max_batch) == (2, 128, 256, 4, 3)
    assert (chosen.auto_lsh_from, chosen.host_reserve, chosen.dense_layers) == (2048, 2 * GIB, (0, 5))
    assert (chosen.K, chosen.L) == (7, 60)
    assert chosen.budget_bytes == 256 * GIB - 2 * GIB - chosen.weights_bytes
    text = "\n".join(chosen.reasons)
    for words in ("profile mine: as asked", "chunk 256: profile mine", "threads 4: profile mine has no more",
                  "batch 3: profile mine decodes no more together", "tables K=7 L=60: profile mine"):  # fmt: skip
        assert words in text
    asked = settings(16_384, K=9, L=100, sink=8, local=32, dense_layers=(1,), mode="lsh", kv_dtype="int8")
    text = "\n".join(plan(hardware, llama, asked, profile).reasons)
    for words in ("tables K=9 L=100: as asked", "sink 8: as asked", "local 32: as asked", "dense layers 1: as asked",
                  "attention lsh: as asked", "rows int8: as asked"):  # fmt: skip
        assert words in text


def test_what_is_refused_on_a_gpu_names_the_gpu_that_would_do():
    with pytest.raises(MemoryBudgetError) as caught:
        plan(machine(256, "L20"), SHAPES["Llama-3.1-70B"], settings(32_768), PAPER)
    assert len(caught.value.hint.split("; or ")) == 3
    assert "a GPU with" in caught.value.hint


def test_signatures_lie_on_a_gpu_where_that_is_asked_for_and_it_has_room():
    """Llama-3.1-8B at 96k on an RTX 4090: 98,048 keys of 18 B in each layer, and in one more while an index grows."""
    llama, asked = SHAPES["Llama-3.1-8B"], settings(98_304, mode="rabitq", signatures="device")
    chosen = plan(machine(64, "RTX 4090"), llama, asked, BUILT_IN)
    host = plan(machine(64, "RTX 4090"), llama, settings(98_304, mode="rabitq"), BUILT_IN)
    sampled, keys = len(chosen.sampled_layers), 383 * 256
    assert chosen.scans_there
    assert not host.scans_there
    parts, others = ({part.name: part.bytes for part in device(one, 1)} for one in (chosen, host))
    each = (sampled + 1) * 8 * keys * 18
    assert parts["signatures"] == each
    assert total(device(chosen, chosen.max_batch)) <= chosen.gpu.free_bytes
    assert chosen.max_batch == host.max_batch
    assert parts["scan"] == 262_144 * (128 + 16 * 4 + 8 + 18) + 8 * chosen.indexed_keys(98_304) * 16 + 32 * 32 * 256 * 8
    assert parts["copies"] > others["copies"]
    assert {name: size for name, size in parts.items() if name not in ("signatures", "scan", "copies")} == {
        name: size for name, size in others.items() if name != "copies"
    }
    assert chosen.sequence_bytes(98_304) == host.sequence_bytes(98_304)  # the host keeps its own
    assert any(line.endswith("for copies; one of 98,304 tokens takes 430.9 MiB") for line in chosen.reasons)
    assert any(line.startswith("signatures host: default, as no GPU has been measured") for line in host.reasons)
    alone = total(device(replace(chosen, signature_room=each), 1))
    for short, fits in ((0, True), (1 << 20, False)):
        tight = replace(machine(64, None), gpus=(replace(card("RTX 4090"), free_bytes=alone - short),))
        found = plan(tight, llama, asked, BUILT_IN)
        assert found.scans_there == fits
        assert found.chunk == chosen.chunk
        assert (found.max_batch, found.signature_room) == (1, each) if fits else found.max_batch > 1
    (line,) = (line for line in found.reasons if line.startswith("signatures host"))
    assert "has 1.0 MiB too little for a copy of 430.9 MiB" in line


@pytest.mark.parametrize(
    ("ram", "gpu", "bound"),
    [(64, "RTX 4090", "host"), (1024, "RTX 4090", "GPU"), (1024, "H200", "batch")],
)
def test_the_room_for_signatures_is_no_larger_than_what_comes_to_be(ram, gpu, bound):
    """Of the keys that host memory holds, of the sequences decoded together, and within what the GPU has."""
    found = plan(
        machine(ram, gpu), SHAPES["Llama-3.1-8B"], settings(98_304, mode="rabitq", signatures="device"), BUILT_IN
    )
    each, _ = found.index.device_copy(found.indexed_keys(98_304))
    room, most, fit = found.signature_room, found.max_batch, found.batch_size
    parts = [{part.name: part.bytes for part in device(found, batch)}["signatures"] for batch in (1, fit, most)]
    assert parts == [each, min(fit * each, room), room]
    left = found.gpu.free_bytes - total(device(found, most))
    if bound == "host":
        assert fit * each <= room < (fit + 1) * each
        assert fit < most
        assert left > each
    elif bound == "GPU":
        assert left == 0
        assert each < room < fit * each
    else:
        assert room == most * each
        assert left > 0


def test_the_room_for_signatures_is_that_of_the_context_that_host_memory_leaves():
    llama, asked = SHAPES["Llama-3.1-8B"], settings(None, mode="rabitq", signatures="device")
    free = replace(card("RTX 4090"), free_bytes=total(device(plan(machine(6, "RTX 4090"), llama, asked, BUILT_IN), 1)))
    found = plan(replace(machine(6, None), gpus=(free,)), llama, asked, BUILT_IN)
    assert found.context < 65_536 < llama.context
    assert found.scans_there


def test_on_a_cpu_or_with_tables_nobody_else_scans_and_that_is_said():
    llama = SHAPES["Llama-3.1-8B"]
    cpu = plan(machine(512, None), llama, settings(8192, mode="rabitq", signatures="device", device="cpu"), BUILT_IN)
    assert not cpu.scans_there
    assert "without effect on attention rabitq: --signatures device, as no GPU is used" in cpu.reasons
    tables = plan(machine(512, "RTX 4090"), llama, settings(8192, mode="lsh", signatures="device"), BUILT_IN)
    assert not tables.scans_there
    assert "without effect on attention lsh: --signatures device" in tables.reasons
    assert not any(line.startswith("signatures") for plan_ in (cpu, tables) for line in plan_.reasons)
    with pytest.raises(UsageError, match="--signatures gpu is unknown"):
        plan(machine(512, None), llama, settings(8192, mode="rabitq", signatures="gpu", device="cpu"), BUILT_IN)
