"""Predicted bytes against what a cache and a process hold, predicted times against sums done by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from magicpig_cli import hardware
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.events import STAGES
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Speeds
from magicpig_cli.model.published import Published
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner import Plan, device_times, plan, predict
from tests.system.test_planner import DESKTOP, LLAMA_8B
from tests.tiny import tiny_model

GIB = 1 << 30
SPEEDS = Speeds(
    threads=8, sequential_bytes_s=40e9, gather_bytes_s=20e9, count_ns=1.0, scan_ns=0.7, visit_ns=20.0,
    product_bytes_s={"float32": 40e9, "bfloat16": 30e9, "int8": 20e9, "int4": 10e9}, operator_us=2.0,
    prompt_multiply_adds_s=4e11,
)  # fmt: skip
MEASURED = replace(DESKTOP, speeds=SPEEDS)
N = 98_304


def planned(shape: ModelShape = LLAMA_8B, machine: hardware.Hardware = MEASURED, **options) -> Plan:
    return plan(machine, shape, Settings(attention=AttentionOptions(**options), context=N))


@pytest.mark.parametrize("turns", [(1200,), (3000,)])
def test_expected_rows_and_index_are_those_of_a_prompt_read_at_once(turns):
    model = tiny_model("llama")
    shape = shape_from_config(model.config)
    options = AttentionOptions(mode="lsh", K=5, L=12)
    chosen = plan(
        hardware.probe(), shape, Settings(attention=options, threads=1, allow_extrapolation=True, context=4096)
    )
    runner = ModelRunner(model, shape, chosen, torch.device("cpu"), hash_seed=0)
    sequence = runner.new_sequence()
    for turn in turns:
        list(runner.prefill(sequence, torch.arange(turn).remainder(250).tolist()))
    parts = {part.name: part.bytes for part in predict(chosen, sum(turns)).host}
    assert parts["keys and values"] == sequence.kv_bytes
    assert parts["index"] == sequence.index_bytes
    assert parts["windows"] == sum(layer.window.rows.nbytes for layer in sequence.layers)


def test_a_batch_takes_the_sequences_part_so_often_and_the_rest_once():
    chosen = planned(mode="lsh")
    one, four = (predict(chosen, N, batch) for batch in (1, 4))
    single, several = ({part.name: part.bytes for part in found.host} for found in (one, four))
    for name in ("keys and values", "index", "windows"):
        assert several[name] == 4 * single[name]
    for name in ("weights", "program", "random directions"):
        assert several[name] == single[name]
    assert one.host_bytes == sum(single.values())


def test_long_answers_grow_the_index():
    chosen = planned(mode="lsh")
    short, long = (predict(chosen, N, generated=generated).host_bytes for generated in (1023, 1024))
    segment = 2 * 150 * 8 * (3 * 1024 + 1025)
    assert long - short == 31 * segment
    assert predict(chosen, N, generated=90_000).host_bytes - short == 31 * 2 * 150 * 8 * (16_384 + 1025)


def test_what_is_expected_is_within_what_is_reserved():
    chosen = planned(mode="lsh", kv_dtype="int8")
    for tokens in (1, 300, 5000, N):
        for batch in (1, 2):
            held = predict(chosen, tokens, batch, generated=tokens)
            assert held.host_bytes <= chosen.weights_bytes + chosen.host_reserve + batch * chosen.sequence_bytes(tokens)


def test_no_time_is_told_of_a_machine_that_was_not_measured():
    found = predict(planned(machine=DESKTOP), N)
    assert found.stages_ms == {}
    assert found.ms_per_token is None
    assert found.missing == ("this machine was not measured",)


def test_time_of_exact_attention_by_hand():
    found = predict(planned(mode="exact"), N)
    assert found.stages_ms.keys() == set(STAGES)
    rows = 32 * 8 * N
    dense = rows * (512 / 40e9 + 2 * 4 * 128 / (1.6 * 40e9)) + 32 * 20 * 2e-6
    products, after = LLAMA_8B.params * 4 / 40e9, 0.25 * rows * 512 / 40e9
    assert found.stages_ms["dense"] == pytest.approx(1e3 * dense)
    assert found.stages_ms["other"] == pytest.approx(1e3 * (products + after + 32 * (28 + 2) * 2e-6))
    assert found.ms_per_token == pytest.approx(sum(found.stages_ms.values()))
    assert all(found.stages_ms[stage] == 0 for stage in ("hash", "retrieve", "attend", "merge", "window"))


def test_time_of_sampled_attention_by_hand():
    chosen = planned(mode="lsh")
    found = predict(chosen, N, 2, sampled_ratio=0.02)
    keys, heads = chosen.offloaded(N), 2 * 32
    look_ups = 31 * heads * (150 * 20e-9 + 150 * keys / 1024 * 1.7 * 1e-9) / 8
    assert found.stages_ms["retrieve"] == pytest.approx(1e3 * look_ups)
    union = keys * (1 - 0.98 ** (4**0.75))
    gathered = 2 * 8 * union * 512 / 20e9
    multiplied = heads * 0.02 * keys * 4 * 128 / (1.6 * 40e9)
    near = 2 * 8 * 132 * (512 / 40e9 + 2 * 4 * 128 / (1.6 * 40e9))
    call = (22 + 2 * 12) * 2e-6
    assert found.stages_ms["attend"] == pytest.approx(1e3 * 31 * (call + gathered + multiplied + near))
    products = LLAMA_8B.params * 4 / 40e9 * (0.85 + 2 * 0.08)
    after = 0.25 * (31 * gathered + 2 * 8 * N * 512 / 40e9)
    operators = (32 * (28 + 2 * 2) + 31 * (18 + 2 * 8)) * 2e-6
    assert found.stages_ms["other"] == pytest.approx(1e3 * (products + after + operators))


def test_signatures_are_compared_with_each_head_and_read_once_per_kv_head():
    chosen = planned(mode="rabitq")
    keys, retrieve = chosen.indexed_keys(N), predict(chosen, N, 2).stages_ms["retrieve"]
    rotated = 128 * 128 * 4 / 40e9 + 2 * 32 * 128 * 128 / (1.6 * 40e9)
    compared = 2 * 32 * keys * SPEEDS.scan_ns * 1e-9 / 8
    assert retrieve == pytest.approx(1e3 * 31 * (rotated + compared + 2 * 8 * keys * 18 / 40e9))


def test_sampling_pays_at_long_contexts_and_more_so_with_fewer_keys():
    exact, sampled = planned(mode="exact"), planned(mode="lsh")
    gain = [predict(exact, n).ms_per_token / predict(sampled, n).ms_per_token for n in (8192, 32_768, N)]
    assert gain == sorted(gain)
    assert gain[-1] > 1
    few, many = (predict(sampled, N, sampled_ratio=ratio).ms_per_token for ratio in (0.01, 0.05))
    assert few < many < predict(exact, N).ms_per_token


def test_fewer_threads_than_were_measured_take_longer():
    half = plan(MEASURED, LLAMA_8B, Settings(context=N, threads=4))
    all_of_them = plan(MEASURED, LLAMA_8B, Settings(context=N))
    more = plan(MEASURED, LLAMA_8B, Settings(context=N, threads=64))
    assert predict(half, N).ms_per_token > 1.5 * predict(all_of_them, N).ms_per_token
    assert predict(more, N).ms_per_token == predict(all_of_them, N).ms_per_token


def test_an_index_that_auto_does_not_build_costs_no_time():
    chosen = planned(mode="auto")
    assert predict(chosen, 4095).stages_ms["retrieve"] == 0
    assert predict(chosen, 4096).stages_ms["retrieve"] > 0


def test_weights_that_are_only_looked_up_are_not_multiplied():
    tied = replace(LLAMA_8B, lookup_params=0)
    untied = replace(LLAMA_8B, lookup_params=128_256 * 4096)
    gap = predict(planned(tied, mode="exact"), N).ms_per_token - predict(planned(untied, mode="exact"), N).ms_per_token
    assert gap == pytest.approx(1e3 * 128_256 * 4096 * 4 / 40e9)
    mixture = replace(LLAMA_8B, params=10_000, expert_params=8000, experts_used=0.25)
    assert [mixture.step_params(batch) for batch in (1, 2, 4, 9)] == [4000, 6000, 10_000, 10_000]


def test_experts_are_multiplied_as_float32_whatever_the_others_are():
    mixture = replace(LLAMA_8B, expert_params=4_000_000_000, experts_used=0.25, dtype="bfloat16")
    rest = replace(mixture, params=mixture.params - mixture.expert_params, expert_params=0)
    rate = SPEEDS.product_bytes_s["float32"]
    for batch, used in ((1, 0.25), (2, 0.5), (4, 1.0), (8, 1.0)):
        both, without = (
            predict(planned(shape, mode="exact"), 1, batch).stages_ms["other"] for shape in (mixture, rest)
        )
        rows = max(1.0, 0.55 + 0.45 * batch * 0.25)  # of one expert
        assert both - without == pytest.approx(1e3 * rows * used * 4_000_000_000 * 4 / rate)


def test_products_of_int4_are_those_of_blocks_and_of_an_int8_output_layer():
    """5/8 of a byte per value with scale and minimum; the embedding that is looked up in is not read."""
    shape = replace(LLAMA_SIZES, int4_params=LINEAR)
    int4, int8 = (
        replace(planned(shape, mode="exact"), weight_type=form, speeds=replace(SPEEDS)) for form in ("int4", "int8")
    )
    rest = 8_030_261_248 - 128_256 * 4096 - LINEAR
    difference = predict(int4, 1, 1).stages_ms["other"] - predict(int8, 1, 1).stages_ms["other"]
    assert difference == pytest.approx(1e3 * (LINEAR * 0.625 / 10e9 + rest / 20e9 - (LINEAR + rest) / 20e9))
    unknown = replace(SPEEDS, product_bytes_s={"float32": 40e9, "bfloat16": 30e9, "int8": 20e9})
    found = predict(replace(int4, speeds=unknown), 1, 1)
    assert found.missing == ("products of int4 weights, which were not measured",)
    assert found.ms_per_token is None


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
def test_products_of_a_batch_never_take_less_than_of_one_sequence(form):
    chosen = replace(planned(mode="exact"), weight_type=form)
    spent = [predict(chosen, 1, batch).stages_ms["other"] for batch in range(1, 9)]
    assert spent == sorted(spent)


CARD = Gpu(0, "Card", 24 * GIB, 24 * GIB, pcie_generation=4, pcie_lanes=16, memory_bytes_s=1000e9)
BESIDE_GPU = replace(
    MEASURED, gpus=(CARD,), speeds=replace(SPEEDS, host_to_device_bytes_s=20e9, device_to_host_bytes_s=10e9)
)
LINEAR = 6_979_321_856  # of Llama-3.1-8B: 32 × (4096·6144 + 4096·4096 + 3·4096·14336)
LLAMA_SIZES = replace(
    LLAMA_8B, linear_params=LINEAR, linear_rows=32 * (6144 + 4096 + 2 * 14_336 + 4096), lookup_params=128_256 * 4096,
    intermediate=14_336, dtype="bfloat16",
)  # fmt: skip


def with_gpu(machine: hardware.Hardware = BESIDE_GPU, shape: ModelShape = LLAMA_SIZES, **model) -> Plan:
    asked = Settings(model=ModelOptions("any", **model), attention=AttentionOptions(mode="lsh"), context=N)
    return plan(machine, shape, asked)


def products_ms(chosen: Plan, batch: int = 1) -> float:
    """What products take: `other` without the GPU's kernels and the index. Launching takes less than both."""
    found = predict(chosen, N, batch)
    return found.stages_ms["other"] - 1e3 * (32 * 33 * 2e-6 + 31 * (18 + batch * 8) * 2e-6)


def test_with_a_gpu_rows_of_exact_layers_go_over_pcie():
    found = predict(with_gpu(), N)
    assert found.stages_ms["dense"] == pytest.approx(1e3 * 8 * N * 512 / 20e9)
    words = 32 * (128 + 150) * 4 / 10e9 + 32 * 129 * 4 / 20e9
    assert found.stages_ms["merge"] == pytest.approx(1e3 * 31 * (words + 4 * 10e-6 + 18 * 5e-6))
    assert found.stages_ms["hash"] == 0  # in launches
    assert found.missing == ()
    by_link = predict(with_gpu(replace(BESIDE_GPU, speeds=SPEEDS)), N)
    assert by_link.stages_ms["dense"] == pytest.approx(1e3 * 8 * N * 512 / (device_times.PCIE_SHARE * 16 * 1.969e9))
    assert set(by_link.assumed) - set(found.assumed) == {"copies reach 80% of PCIe 4.0 × 16"}
    unknown = replace(BESIDE_GPU, speeds=SPEEDS, gpus=(replace(CARD, pcie_generation=None),))
    found = predict(with_gpu(unknown), N)
    assert found.stages_ms["dense"] == 0
    assert found.ms_per_token is None
    assert found.missing == ("copies over PCIe, which were not measured",)


@pytest.mark.parametrize(
    ("quantize", "seconds"),
    [
        ("none", (8_030_261_248 - 128_256 * 4096) * 2 / 750e9),
        ("int8", (LINEAR * 5 + (8_030_261_248 - LINEAR - 128_256 * 4096) * 2) / 750e9),
        ("int4", LINEAR * (0.5 + 4 / 64) / 450e9 + (8_030_261_248 - LINEAR - 128_256 * 4096) * 2 / 750e9),
    ],
)
def test_products_on_a_gpu_by_hand(quantize, seconds):
    """75% of the data sheet's 1000 GB/s; int4 60% of that, int8 casts: 1 + 2 + 2 bytes per value."""
    chosen = with_gpu(quantize=quantize)
    assert products_ms(chosen) == pytest.approx(1e3 * seconds)
    found = predict(chosen, N)
    assert found.ms_per_token == pytest.approx(sum(found.stages_ms.values()))
    assert any("75% of 1,000 GB/s" in line for line in found.assumed)


def test_a_measured_product_replaces_the_data_sheet():
    measured = replace(BESIDE_GPU, speeds=replace(BESIDE_GPU.speeds, device_product_bytes_s=900e9))
    chosen = with_gpu(measured)
    assert products_ms(chosen) == pytest.approx(1e3 * (8_030_261_248 - 128_256 * 4096) * 2 / 900e9)
    assert not any("data sheet" in line for line in predict(chosen, N).assumed)


def test_products_of_an_unknown_card_are_left_out():
    found = predict(with_gpu(replace(BESIDE_GPU, gpus=(replace(CARD, memory_bytes_s=None),))), N)
    assert found.ms_per_token is None
    assert found.missing == ("products on the GPU, whose memory bandwidth is not known",)


def test_products_of_weights_that_were_published_quantized():
    """All of their bytes but the embedding that is only looked up in; on a CPU nobody knows how fast."""
    shape = replace(LLAMA_SIZES, published=Published("gptq", 5_700_000_000, 2_100_000_000))
    read = 5_700_000_000 - 128_256 * 4096 * 2
    assert products_ms(with_gpu(shape=shape)) == pytest.approx(1e3 * read / 450e9)
    found = predict(planned(shape, mode="lsh"), N)
    assert found.missing == ("products of gptq weights, which were not measured",)
    assert found.ms_per_token is None


def beside(speeds: dict[str, float], **model) -> Plan:
    return with_gpu(replace(BESIDE_GPU, speeds=replace(BESIDE_GPU.speeds, **speeds)), **model)


def fast_card(**model) -> Plan:
    """Beside a GPU that multiplies in no time."""
    return beside({"device_product_bytes_s": 1e18}, **model)


@pytest.mark.parametrize("batch", [1, 4])
def test_launching_counts_as_far_as_the_gpu_does_not_take_as_long(monkeypatch, batch):
    """A graph for each layer and one more instead of 33 kernels a layer; attention's own launches stay."""
    monkeypatch.setattr(device_times, "HALVES_FROM", 99)
    attention = 31 * (15 + (batch - 1) * 8) * 5e-6 + 32 * batch * 2 * 2e-6
    for without, launching in ((False, 33 * 10e-6), (True, 32 * 33 * 5e-6)):
        terms = predict(fast_card(no_cuda_graphs=without), N, batch).time.terms
        (term,) = (term for term in terms if term.stage == "other" and "launches" in term.formula)
        assert term.seconds == pytest.approx(launching + attention - 32 * 33 * 2e-6, rel=1e-4)
    saved = predict(fast_card(no_cuda_graphs=True), N).ms_per_token - predict(fast_card(), N).ms_per_token
    assert saved == pytest.approx(1e3 * (32 * 33 * 5e-6 - 33 * 10e-6))
    slow = [predict(with_gpu(no_cuda_graphs=without), N).ms_per_token for without in (True, False)]
    assert slow[0] == slow[1]  # launched while it multiplies
    assert any("10 µs for all between two calls" in line for line in predict(fast_card(), N).assumed)
    assert not any("graph" in line for line in predict(fast_card(no_cuda_graphs=True), N).assumed)


def test_windows_count_as_far_as_the_kernels_do_not_take_as_long():
    usual = predict(with_gpu(), N).stages_ms
    quick = predict(beside({"operator_us": 1e-6, "visit_ns": 1.0}), 400).stages_ms
    assert usual["window"] == 0 < usual["retrieve"] + usual["attend"]
    assert 0 < quick["window"] == pytest.approx(1e3 * 31 * 7 * 2e-6 - quick["retrieve"] - quick["attend"])


def test_launches_of_blocks_count_where_copying_them_takes_less():
    narrow = replace(LLAMA_SIZES, kv_heads=1)
    found = predict(with_gpu(shape=narrow), N)
    assert found.stages_ms["dense"] == pytest.approx(1e3 * N / 1024 * 16 * 5e-6)
    assert N * 512 / 20e9 < N / 1024 * 16 * 5e-6


QUICK_KERNELS = {"sequential_bytes_s": 1e13, "gather_bytes_s": 1e13, "count_ns": 1e-3, "visit_ns": 1e-2}


@pytest.mark.parametrize(
    ("speeds", "busiest"),
    [
        ({}, "kernels"),
        ({"device_product_bytes_s": 30e9}, "GPU"),
        ({"host_to_device_bytes_s": 2e9}, "PCIe"),
        ({**QUICK_KERNELS, "device_product_bytes_s": 1e14, "host_to_device_bytes_s": 1e12}, "Python"),
        ({"host_to_device_bytes_s": 8e9, "device_to_host_bytes_s": 2e6}, "one of them alone"),
    ],
)
@pytest.mark.parametrize("batch", [2, 5])
def test_halves_of_a_batch_take_as_long_as_the_busiest_of_what_they_share(monkeypatch, speeds, busiest, batch):
    chosen = beside(speeds)
    found = predict(chosen, N, batch)
    told = found.time.terms[0].formula
    figures = {
        name: float(ms) for name, ms in re.findall(r"(GPU|kernels|Python|PCIe|one of them alone) ([\d.]+)", told)
    }
    assert max(figures, key=figures.get) == busiest
    assert found.ms_per_token == pytest.approx(figures[busiest], abs=0.06)
    monkeypatch.setattr(device_times, "HALVES_FROM", 99)
    halves = [predict(chosen, N, count) for count in (-(-batch // 2), batch // 2)]
    assert figures["one of them alone"] == pytest.approx(halves[0].ms_per_token, abs=0.06)
    assert sum(half.ms_per_token for half in halves) > found.ms_per_token
    kernels = sum(half.stages_ms[stage] for half in halves for stage in ("retrieve", "attend"))
    upkeep = sum(31 * (18 + count * 8) for count in (-(-batch // 2), batch // 2)) * chosen.speeds.operator_us * 1e-3
    assert figures["kernels"] == pytest.approx(kernels + upkeep, abs=0.06)
    assert figures["PCIe"] == pytest.approx(1e3 * batch * 8 * N * 512 / chosen.speeds.host_to_device_bytes_s, abs=0.06)
    assert not any("halves" in line for line in halves[0].assumed)
    assert any("halves" in line for line in found.assumed)


def test_exact_attention_is_not_halved():
    chosen = replace(with_gpu(), mode="exact")
    assert not any("halves" in term.formula for term in predict(chosen, N, 2).time.terms)
    one, two = predict(chosen, N, 1), predict(chosen, N, 2)
    assert two.stages_ms["dense"] == pytest.approx(2 * one.stages_ms["dense"])
    assert two.ms_per_token < 2 * one.ms_per_token


def test_terms_add_up_to_the_stages_and_say_how():
    of_one = [with_gpu(), with_gpu(quantize="int4"), fast_card(), planned(mode="lsh"), planned(mode="rabitq")]
    for chosen, batch in [*((chosen, 1) for chosen in of_one), (with_gpu(), 3)]:
        found = predict(chosen, N, batch)
        for stage, ms in found.stages_ms.items():
            assert ms == pytest.approx(sum(1e3 * term.seconds for term in found.time.terms if term.stage == stage))
        assert all(term.formula for term in found.time.terms)
