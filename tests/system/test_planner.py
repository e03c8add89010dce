"""Choices, refusals and byte sums of the planner, for shapes and machines written out as literals."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from magicpig_cli.config import JOINED_ROWS, TAIL_ROOM, TAIL_ROWS, AttentionOptions, ModelOptions, Settings
from magicpig_cli.errors import ContextError, MemoryBudgetError, ModelError, UsageError
from magicpig_cli.hardware import Gpu, Hardware
from magicpig_cli.kernels import MAX_SEGMENT_ROWS
from magicpig_cli.model.published import Published
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import most_segments, plan
from magicpig_cli.planner.memory import device, reserved_host
from magicpig_cli.profiles import BUILT_IN

GIB = 1 << 30
RUNTIME_BYTES = BUILT_IN.host_reserve

DESKTOP = Hardware(
    cpu_model="Some CPU", isa="avx2", tiers=("portable", "avx2"), cores_physical=8, cores_usable=16, threads=8,
    numa_nodes=1, memory_total=128 * GIB, memory_free=110 * GIB, memory_limit=None, process_bytes=0,
)  # fmt: skip
LLAMA_8B = ModelShape(
    family="llama", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=128_256,
    layer_windows=(None,) * 32, context=131_072, rope="llama3", trained_context=8192, params=8_030_261_248,
)  # fmt: skip
QWEN_7B = ModelShape(
    family="qwen2", layers=28, hidden=3584, heads=28, kv_heads=4, head_dim=128, vocab=152_064,
    layer_windows=(None,) * 28, context=32_768, params=7_615_616_512,
)  # fmt: skip
MISTRAL_7B = ModelShape(
    family="mistral", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, vocab=32_000,
    layer_windows=(4096,) * 32, context=32_768, params=7_241_732_096,
)  # fmt: skip


def settings(**values) -> Settings:
    attention = {k: v for k, v in values.items() if k in AttentionOptions.__dataclass_fields__}
    model = {k: v for k, v in values.items() if k in ModelOptions.__dataclass_fields__}
    rest = {k: v for k, v in values.items() if k not in attention and k not in model}
    return Settings(attention=AttentionOptions(**attention), model=ModelOptions(**model), **rest)


def test_defaults():
    chosen = plan(DESKTOP, LLAMA_8B, Settings())
    assert (chosen.mode, chosen.K, chosen.L, chosen.sink, chosen.local) == ("auto", 10, 150, 4, 64)
    assert (chosen.flush, chosen.chunk, chosen.block_rows, chosen.auto_lsh_from) == (64, 512, 1024, 4096)
    assert chosen.row_dtype == "bfloat16"
    assert chosen.threads == 8
    assert chosen.dense_layers == (0,)
    assert chosen.sampled_layers == tuple(range(1, 32))
    assert chosen.context == 131_072


# Llama-3.1-8B at 98,304 tokens: 98,304 − 4 − 64 = 98,236 keys, in whole flushes of 64: 98,176; 96 blocks of 1,024 rows.
LLAMA_96K_KEYS = 98_176
LLAMA_96K_KV = 32 * 8 * (97 * 1024) * (2 * 128 * 2)  # 96 blocks of rows, and one that is ready for further ones
LLAMA_96K_INDEX = 31 * 8 * 150 * 2 * (LLAMA_96K_KEYS + 14 * 1025 + 1600) + 31 * 2 * 1600  # segments and tail
# Beside that while it grows: 16,384 rows in every layer, and a longest segment and the codes of a head in one layer.
LLAMA_96K_GROWTH = 2 * 150 * (31 * 8 * (16_384 + 1025) + 8 * (65_472 + 1025) + 65_472)


def test_bytes_of_llama_at_96k():
    chosen = plan(DESKTOP, LLAMA_8B, settings(mode="lsh"))
    assert chosen.offloaded(98_304) == LLAMA_96K_KEYS
    assert chosen.kv_bytes(98_304) == LLAMA_96K_KV == 12 * GIB * 97 // 96
    assert chosen.index_bytes(98_304) == LLAMA_96K_INDEX
    assert chosen.sequence_bytes(98_304) == (
        LLAMA_96K_KV + LLAMA_96K_INDEX + LLAMA_96K_GROWTH + 32 * 8 * 132 * (2 * 128 * 2)
    )


def test_float32_rows_take_twice_the_bytes():
    half, full = (plan(DESKTOP, QWEN_7B, settings(kv_dtype=kind)) for kind in ("bfloat16", "float32"))
    assert full.kv_bytes(9000) == 2 * half.kv_bytes(9000)
    assert full.index_bytes(9000) == half.index_bytes(9000)


def test_int8_rows_take_a_byte_per_value_and_two_for_each_scale():
    whole, half = (plan(DESKTOP, LLAMA_8B, settings(mode="lsh", kv_dtype=kind)) for kind in ("bfloat16", "int8"))
    assert half.kv_bytes(98_304) == LLAMA_96K_KV * 130 // 256
    assert half.window_bytes() == whole.window_bytes()  # near the model rows are bfloat16
    assert half.index_bytes(98_304) == whole.index_bytes(98_304)
    assert any("rows int8: as asked, a quarter of the memory" in reason for reason in half.reasons)


@pytest.mark.parametrize(
    ("options", "tokens", "indexed"),
    [
        ({"mode": "exact"}, 30_000, False),
        ({"mode": "auto"}, 4095, False),
        ({"mode": "auto"}, 4096, True),
        ({"mode": "lsh"}, 4095, True),
        ({"mode": "lsh"}, 4 + 64 + 256, True),
        ({"mode": "lsh"}, 4 + 64 + 255, False),
        ({"mode": "lsh", "dense_layers": tuple(range(28))}, 30_000, False),
        ({"mode": "lsh"}, 1, False),
    ],
)
def test_when_there_is_an_index(options, tokens, indexed):
    assert (plan(DESKTOP, QWEN_7B, settings(**options)).index_bytes(tokens) > 0) == indexed


def test_each_segment_has_its_own_offsets():
    chosen = plan(DESKTOP, LLAMA_8B, settings(mode="lsh", K=12, L=10))
    one, two = chosen.index_bytes(4 + 64 + 3072), chosen.index_bytes(4 + 64 + 3136)
    assert two - one == 31 * 8 * 10 * 2 * (64 + 4097)


def test_keys_that_are_all_in_the_tail_have_no_tables():
    chosen = plan(DESKTOP, LLAMA_8B, settings(mode="lsh", K=16))
    assert chosen.index_bytes(4 + 64 + 960) == 31 * (8 * 150 + 1) * 2 * 1600
    assert chosen.growth_bytes(4 + 64 + 960) > 0
    assert chosen.growth_bytes(4 + 64 + 255) == 0


def fewest_keys(segments: int) -> list[int]:
    """By exhaustion: the fewest keys in lists of 1, 2, … segments that the rule of LshIndex would not join.

    Prefills and cuts join up to MAX_SEGMENT_ROWS. Steps join up to JOINED_ROWS, newest first: before they made the
    newer segment of two, it was a tail and segments each less than half of the older one next to it. So it has fewer
    rows than the older one, to which it is the neighbour, and a tail: together both exceed JOINED_ROWS only if the
    older has more than half of JOINED_ROWS - TAIL_ROOM.
    """
    low, high = TAIL_ROWS, MAX_SEGMENT_ROWS
    sizes = np.arange(low, high + 1)
    never = 1 << 40
    totals, fewest = sizes.astype(np.int64), []
    for _ in range(segments):
        fewest.append(int(totals.min()))
        up_to = np.append(never, np.minimum.accumulate(totals))  # [i]: lists that start with a size below low + i
        from_on = np.append(np.minimum.accumulate(totals[::-1])[::-1], never)
        twice = up_to[np.maximum((sizes - 1) // 2 - low + 1, 0)]
        joined = np.where(
            sizes >= (JOINED_ROWS - TAIL_ROOM) // 2, from_on[np.maximum(JOINED_ROWS + 1 - sizes, low) - low], never
        )
        longest = from_on[np.minimum(np.maximum(high + 1 - sizes, low), high + 1) - low]
        totals = sizes + np.minimum(np.minimum(twice, joined), longest)
    return fewest


def test_no_list_of_segments_is_longer_than_planned():
    fewest = fewest_keys(40)
    assert all(most_segments(keys) >= count for count, keys in enumerate(fewest, start=1))
    assert [most_segments(keys) for keys in fewest[:6]] == [1, 2, 3, 4, 5, 6]
    assert [most_segments(keys - 1) for keys in fewest[:5]] == [0, 1, 2, 3, 4]
    assert most_segments(fewest[-1]) <= 40 + 1


def test_windows_count_where_they_are_in_host_memory():
    chosen = plan(DESKTOP, QWEN_7B, settings(sink=8, local=1000, kv_dtype="float32"))
    assert chosen.window_bytes() == 28 * 4 * (8 + 1000 + 64) * 2 * 128 * 4
    assert chosen.sequence_bytes(1) == chosen.window_bytes()
    card = Gpu(0, "Some GPU", 24 * GIB, 23 * GIB)
    assert plan(replace(DESKTOP, gpus=(card,)), QWEN_7B, settings(local=1000)).window_bytes() == 0


def test_a_machine_for_which_no_context_is_short_enough():
    tight = replace(DESKTOP, memory_free=30 * GIB + RUNTIME_BYTES)
    with pytest.raises(MemoryBudgetError) as caught:
        plan(tight, LLAMA_8B, settings(local=100_000))
    assert "-c 0" not in caught.value.hint
    assert "--local" in caught.value.hint


def test_where_int8_is_too_large_int4_is_the_way_out():
    shape = replace(LLAMA_8B, int4_params=LINEAR)
    tight = replace(DESKTOP, memory_free=7 * GIB + RUNTIME_BYTES)
    with pytest.raises(MemoryBudgetError) as caught:
        plan(tight, shape, settings(context=4096))
    assert caught.value.hint.startswith("--quantize int4; ")
    assert "int8" not in caught.value.hint.replace("--kv-dtype int8", "")
    assert plan(tight, shape, settings(context=4096, quantize="int4")).context == 4096


def test_windowed_layers_are_never_sampled():
    chosen = plan(DESKTOP, MISTRAL_7B, settings(mode="lsh"))
    assert chosen.sampled_layers == ()
    assert chosen.index_bytes(30_000) == 0
    assert any("no layer can be sampled" in reason for reason in chosen.reasons)
    mixed = replace(MISTRAL_7B, layer_windows=(4096, None) * 16)
    assert plan(DESKTOP, mixed, settings(mode="lsh", dense_layers=(3,))).sampled_layers == (1, *range(5, 32, 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"K": 0}, "-K 0"),
        ({"K": 17}, "-K 17"),
        ({"L": 1}, "-L 1"),
        ({"L": 1001}, "-L 1001 is not between 2 and 1,000"),
        ({"hash_seed": -1}, "--hash-seed -1"),
        ({"hash_seed": 2**64}, "--hash-seed 18446744073709551616"),
        ({"local": 32_768 - 4 - 64 + 1}, "--local 32701 with 64 rows between are a window of 32,769 tokens"),
        ({"sink": 10**30}, "longer than the context of 32,768"),
        ({"context": 500, "local": 500}, "longer than the context of 500"),
        ({"context": 10**5000, "allow_extrapolation": True}, "more than 1,125,899,906,842,624"),
        ({"sink": -1}, "--sink -1"),
        ({"local": 0}, "--local 0"),
        ({"threads": 0}, "--threads 0"),
        ({"dense_layers": (0, 28)}, "layer 28; this model has layers 0 to 27"),
        ({"dense_layers": (-1,)}, "layer -1"),
        ({"mode": "topk"}, "topk"),
        ({"kv_dtype": "float16"}, "float16"),
        ({"quantize": "int2"}, "int2"),
        ({"context": 0}, "0 tokens"),
    ],
)
def test_refused_values(options, words):
    with pytest.raises(UsageError) as caught:
        plan(DESKTOP, QWEN_7B, settings(**options))
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "options",
    [
        {"K": 1, "L": 2}, {"K": 16, "L": 2}, {"K": 1, "L": 1000}, {"dense_layers": (27, 0, 27)}, {"sink": 0},
        {"hash_seed": 2**64 - 1}, {"local": 32_768 - 4 - 64}, {"context": 1},
    ],
)  # fmt: skip
def test_accepted_values(options):
    chosen = plan(DESKTOP, QWEN_7B, settings(**options))
    assert (chosen.K, chosen.L, chosen.sink) == tuple(
        options.get(k, v) for k, v in {"K": 10, "L": 150, "sink": 4}.items()
    )
    assert chosen.dense_layers == ((0, 27) if "dense_layers" in options else (0,))


def test_context_beyond_the_model_needs_permission():
    with pytest.raises(ContextError) as caught:
        plan(DESKTOP, QWEN_7B, settings(context=65_536))
    assert "65,536" in caught.value.message
    assert "32,768" in caught.value.message
    assert "-c 32768" in caught.value.hint
    assert "--allow-extrapolation" in caught.value.hint
    assert plan(DESKTOP, QWEN_7B, settings(context=65_536, allow_extrapolation=True)).context == 65_536
    assert plan(DESKTOP, QWEN_7B, settings(context=1024)).context == 1024


SMALL = replace(DESKTOP, memory_free=40 * GIB)


def test_a_context_that_was_asked_for_must_fit():
    with pytest.raises(MemoryBudgetError) as caught:
        plan(SMALL, LLAMA_8B, settings(context=131_072, mode="lsh"))
    assert "keys and values" in caught.value.message
    assert "index" in caught.value.message
    fits = int(re.findall(r"-c (\d+)", caught.value.hint)[0])
    chosen = plan(SMALL, LLAMA_8B, settings(context=fits, mode="lsh"))
    assert chosen.sequence_bytes(fits) <= chosen.budget_bytes < chosen.sequence_bytes(fits + 1024)


def test_a_context_nobody_asked_for_shrinks_to_what_fits():
    chosen = plan(SMALL, LLAMA_8B, settings(mode="lsh"))
    assert 0 < chosen.context < 131_072
    assert chosen.sequence_bytes(chosen.context) <= chosen.budget_bytes
    assert chosen.batch_size == 1
    assert "what fits in memory" in chosen.reasons[0]


def test_weights_that_do_not_fit_are_refused_with_the_sum():
    with pytest.raises(MemoryBudgetError, match=r"29\.9 GiB .* 20\.0 GiB"):
        plan(replace(DESKTOP, memory_free=20 * GIB), LLAMA_8B, Settings())
    assert plan(replace(DESKTOP, memory_free=20 * GIB), LLAMA_8B, settings(dtype="bfloat16")).budget_bytes > 0


@pytest.mark.parametrize(
    ("published", "options", "form", "bytes_per_value"),
    [
        ("float32", {}, "float32", 4),
        ("float16", {}, "float32", 4),
        ("bfloat16", {}, "bfloat16", 2),
        ("float32", {"dtype": "bfloat16"}, "bfloat16", 2),
        ("bfloat16", {"dtype": "float32"}, "float32", 4),
        ("bfloat16", {"quantize": "int8"}, "int8", 1),
        ("float32", {"quantize": "int8", "dtype": "float32"}, "int8", 1),
    ],
)
def test_bytes_of_weights_on_a_cpu(published, options, form, bytes_per_value):
    chosen = plan(DESKTOP, replace(LLAMA_8B, dtype=published), settings(**options))
    assert chosen.weight_type == form
    assert chosen.weights_bytes == LLAMA_8B.params * bytes_per_value
    assert any(reason.startswith(f"weights {form}: ") for reason in chosen.reasons)


def test_experts_of_a_mixture_stay_float32():
    mixture = replace(LLAMA_8B, expert_params=5_000_000_000)
    chosen = plan(DESKTOP, mixture, settings(quantize="int8"))
    assert chosen.weights_bytes == 3_030_261_248 + 4 * 5_000_000_000
    weights = reserved_host(replace(chosen, shape=replace(mixture, int8_extra_bytes=7)), 1)[0]
    assert weights.formula == (
        "3,030,261,248 values as int8 + 7 B of scales and of what int8 cannot take"
        " + 5,000,000,000 of experts as float32"
    )


def test_bytes_of_int4_on_a_cpu():
    """Rows that are no whole groups, embedding and output layer stay int8: each row with a scale of 2 bytes."""
    shape = replace(LLAMA_8B, int4_params=6_000_000_000, int4_rows=1_000_000, int8_extra_bytes=5_000_000)
    chosen = plan(DESKTOP, shape, settings(quantize="int4"))
    assert chosen.weight_type == "int4"
    assert chosen.weights_bytes == 6_000_000_000 * 5 // 8 + 2_030_261_248 + 5_000_000 - 2 * 1_000_000
    assert reserved_host(chosen, 1)[0].formula == (
        "6,000,000,000 values as int4 + 2,030,261,248 values as int8 + "
        "3,000,000 B of scales and of what int8 cannot take"
    )
    assert "weights int4: as asked, embedding and output layer int8; multiplied as such" in " ".join(chosen.reasons)


ON_GPU = replace(DESKTOP, gpus=(Gpu(0, "Some GPU", 24 * GIB, 23 * GIB),))
LINEAR, ROWS = 6_979_321_856, 1_376_256  # of Llama-3.1-8B: weights of linear layers, and their output rows
LLAMA_SIZES = replace(LLAMA_8B, linear_params=LINEAR, linear_rows=ROWS, dtype="bfloat16")


@pytest.mark.parametrize(
    ("quantize", "size", "formula"),
    [
        ("none", 8_030_261_248 * 2, "8,030,261,248 values as bfloat16"),
        (
            "int8", LINEAR + 5 * ROWS + (8_030_261_248 - LINEAR) * 2,
            "6,979,321,856 values of linear layers × 1 B + 1,376,256 rows × 5 B for their scales + "
            "1,050,939,392 others as bfloat16",
        ),
        (
            "int4", LINEAR // 2 + LINEAR // 64 * 4 + (8_030_261_248 - LINEAR) * 2,
            "6,979,321,856 values of linear layers × 0.5 B + 109,051,904 scales of 64 values × 4 B + "
            "1,050,939,392 others as bfloat16",
        ),
    ],
)  # fmt: skip
def test_bytes_of_weights_on_a_gpu(quantize, size, formula):
    chosen = plan(ON_GPU, LLAMA_SIZES, settings(quantize=quantize))
    assert (chosen.weights_bytes, chosen.device_weights_bytes) == (0, size)
    weights = device(chosen, 1)[0]
    assert (weights.name, weights.bytes, weights.formula) == ("weights", size, formula)
    assert any(line.startswith(f"weights {chosen.weight_type}: ") for line in chosen.reasons)


def test_experts_on_a_gpu_stay_bfloat16():
    mixture = replace(LLAMA_SIZES, expert_params=5_000_000_000, linear_params=1_000_000_000, linear_rows=1000)
    chosen = plan(ON_GPU, mixture, settings(quantize="int8"))
    assert chosen.device_weights_bytes == 1_000_000_000 + 5000 + 7_030_261_248 * 2


PUBLISHED = replace(LLAMA_8B, dtype="bfloat16", published=Published("gptq", 5_700_000_000, 2_100_000_000, counted=True))


def test_weights_that_were_published_quantized_count_as_their_files():
    here = plan(ON_GPU, PUBLISHED, Settings())
    assert (here.weight_type, here.device_weights_bytes) == ("gptq", 5_700_000_000)
    assert device(here, 1)[0].formula == "5,700,000,000 B of gptq weights, in its files"
    chosen = plan(DESKTOP, PUBLISHED, Settings())
    assert chosen.weights_bytes == 7_800_000_000  # what was bfloat16 becomes float32
    formula = reserved_host(chosen, 1)[0].formula
    assert formula.endswith("in its files + 2,100,000,000 B more for what becomes float32")


@pytest.mark.parametrize(
    ("machine", "shape", "options", "words"),
    [
        (ON_GPU, LLAMA_8B, {"quantize": "int8", "dtype": "float32"}, "--dtype float32 with quantized weights"),
        (ON_GPU, PUBLISHED, {"quantize": "int8"}, r"published quantized \(gptq\)"),
        (DESKTOP, PUBLISHED, {"quantize": "int8"}, r"published quantized \(gptq\)"),
        (DESKTOP, PUBLISHED, {"dtype": "bfloat16"}, "what is not quantized is float32 on a CPU"),
    ],
)
def test_forms_of_weights_that_cannot_be_had(machine, shape, options, words):
    with pytest.raises(UsageError, match=words) as caught:
        plan(machine, shape, settings(**options))
    assert caught.value.hint
    assert plan(ON_GPU, LLAMA_SIZES, settings(quantize="int8", device="cpu")).weight_type == "int8"


def test_a_gpu_too_small_for_bfloat16_is_answered_with_quantized_weights():
    small = replace(DESKTOP, gpus=(Gpu(0, "Small GPU", 12 * GIB, 12 * GIB),))
    with pytest.raises(MemoryBudgetError, match=r"15\.0 GiB weights") as caught:
        plan(small, LLAMA_SIZES, settings(context=98_304))
    assert "--quantize int8" in caught.value.hint
    assert "--quantize int4" in caught.value.hint
    assert plan(small, LLAMA_SIZES, settings(context=98_304, quantize="int4")).device_weights_bytes < 7 * GIB


def test_the_budget_is_the_same_before_and_after_loading():
    before = plan(DESKTOP, LLAMA_8B, Settings())
    held = before.weights_bytes + RUNTIME_BYTES
    after = plan(replace(DESKTOP, memory_free=DESKTOP.memory_free - held, process_bytes=held), LLAMA_8B, Settings())
    assert after.budget_bytes == before.budget_bytes == 110 * GIB - held


def test_weights_on_a_gpu_leave_host_memory_to_sequences():
    card = Gpu(0, "Some GPU", 24 * GIB, 23 * GIB)
    chosen = plan(replace(DESKTOP, gpus=(card,)), LLAMA_8B, Settings())
    assert chosen.weights_bytes == 0
    assert chosen.budget_bytes == 109 * GIB
    assert plan(replace(DESKTOP, gpus=(card,)), LLAMA_8B, settings(device="cpu")).weights_bytes > 0


@pytest.mark.parametrize(
    ("gpus", "device", "words"),
    [
        ((), "cuda", "--device cuda: there is no such GPU here"),
        ((Gpu(0, "Some GPU", 24 * GIB, 23 * GIB),), "cuda:1", "--device cuda:1: .*; cuda:0 is Some GPU"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(gpus, device, words):
    with pytest.raises(ModelError, match=words) as caught:
        plan(replace(DESKTOP, gpus=gpus), LLAMA_8B, settings(device=device))
    assert "--device auto" in caught.value.hint


def test_weights_larger_than_the_gpu_are_refused():
    cards = (Gpu(0, "Big", 24 * GIB, 23 * GIB), Gpu(1, "Small", 12 * GIB, 12 * GIB))
    machine = replace(DESKTOP, gpus=cards)
    with pytest.raises(MemoryBudgetError, match=r"Small has no room: 15\.0 GiB weights .* 12\.0 GiB are free"):
        plan(machine, LLAMA_8B, settings(device="cuda:1"))
    with pytest.raises(MemoryBudgetError, match=r"Big has no room: 29\.9 GiB weights .* 24\.0 GiB are free"):
        plan(machine, LLAMA_8B, settings(device="cuda", dtype="float32"))
    assert plan(machine, LLAMA_8B, settings(device="cuda")).weights_bytes == 0


@pytest.mark.parametrize(("tokens", "expected"), [(131_072, 2), (98_304, 3), (32_768, 8), (1, 8)])
def test_batch_size(tokens, expected):
    assert plan(DESKTOP, LLAMA_8B, settings(mode="lsh")).sequences_that_fit(tokens) == expected


def test_threads():
    assert plan(DESKTOP, QWEN_7B, settings(threads=3)).threads == 3
    assert plan(replace(DESKTOP, threads=4), QWEN_7B, Settings()).threads == 4


def test_every_choice_has_a_reason():
    text = "\n".join(plan(DESKTOP, LLAMA_8B, Settings()).reasons)
    for words in (
        "context 131,072",
        "llama3 scaling of 8,192",
        "attention auto",
        "rabitq",
        "threads 8",
        "bfloat16",
    ):
        assert words in text
    phi = replace(LLAMA_8B, rope="longrope", trained_context=4096)
    assert any("those of 8,192 tokens" in reason for reason in plan(DESKTOP, phi, settings(context=8192)).reasons)
