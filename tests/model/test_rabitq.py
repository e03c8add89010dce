"""The whole engine with the signature sampler: every family beside exact attention, and other ways to the same rows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from magicpig_cli.config import BUDGET_RANGE
from tests.model.test_parity import make_runner, prompts
from tests.tiny import FAMILIES, tiny_model
from tests.tolerances import close_logits


def steps(runner, ids: list[int], count: int, mode: str | None = None) -> list:
    """Greedy decode steps after a prompt, and the sequence that they were of."""
    sequence = runner.new_sequence()
    *_, (_, logits) = runner.prefill(sequence, ids, mode)
    found = []
    for _ in range(count):
        found.append(runner.decode([sequence], [int(logits.argmax())], mode))
        logits = found[-1].logits[0]
    return [*found, sequence]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_budget_of_everything_is_exact(family):
    model = tiny_model(family)
    (ids,) = prompts(model.config.vocab_size, (900,))
    exact = steps(make_runner(model, "exact"), ids, 12)
    every = steps(make_runner(model, "rabitq", budget=1.0), ids, 12)
    for one, other in zip(exact[:-1], every[:-1], strict=True):
        assert int(one.logits.argmax()) == int(other.logits.argmax())
        assert close_logits(other.logits[0], one.logits[0])
        if family != "mistral":  # all of whose layers have a window
            assert other.stats.sampled_ratio == other.stats.budget == 1.0
            assert other.stats.error_estimate == 0.0


def test_a_share_is_sampled_and_its_error_is_told():
    model = tiny_model("llama")
    (ids,) = prompts(model.config.vocab_size, (1500,))
    runner = make_runner(model, "rabitq", budget=0.1, dense_layers=(0,))
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, ids))
    ratios, told, true = [], [], []
    for token in ids[:30]:
        step = runner.decode([sequence], [token], measure_error=True)
        assert step.stats.sampled.keys() == step.stats.squares.keys() == {1, 2}
        assert step.stats.budget == step.budgets[0] == 0.1
        ratios.append(step.stats.sampled_ratio)
        told.append(step.stats.error_estimate)
        assert step.errors is not None
        true.append(float(step.errors.view(2, -1).square().mean(dim=1).sqrt().mean()))
    assert 0.05 < sum(ratios) / 30 < 0.15
    # Random weights: keys are of one size, and errors are tenths. Measured: 0.87.
    assert 0.5 < sum(told) / sum(true) < 1.5


def test_the_estimate_is_the_mean_over_layers_of_the_root_mean_square_over_heads():
    model = tiny_model("llama")
    first, second = prompts(model.config.vocab_size, (1000, 700))
    runner = make_runner(model, "rabitq")
    alone = [steps(runner, ids, 1)[0] for ids in (first, second)]
    sequences = [runner.new_sequence(), runner.new_sequence()]
    tokens = []
    for sequence, ids in zip(sequences, (first, second), strict=True):
        *_, (_, logits) = runner.prefill(sequence, ids)
        tokens.append(int(logits.argmax()))
    both = runner.decode(sequences, tokens)
    for mine, own in zip(both.squares, alone, strict=True):
        assert mine == pytest.approx(own.squares[0], rel=1e-4)  # products of two rows and of one round differently
    means = [(both.squares[0][layer] + both.squares[1][layer]) / 2 for layer in (1, 2)]
    assert both.stats.error_estimate == pytest.approx(sum(mean**0.5 for mean in means) / 2)


@pytest.mark.parametrize("way", ["chunks", "one by one", "forked", "regrown"])
def test_whichever_way_led_there_the_same_is_sampled(way):
    """Rows that decode steps store are those of a prompt up to rounding, so sequences grow by decode steps here."""
    model = tiny_model("llama")
    (ids,) = prompts(model.config.vocab_size, (1100,))
    runner = make_runner(model, "rabitq", chunk=64)

    def grown(start: int, sequence) -> None:
        for token in ids[start:]:
            runner.decode([sequence], [token], "exact")  # so that no step depends on what was sampled before

    wanted = runner.new_sequence()
    list(runner.prefill(wanted, ids[:200], "exact"))
    grown(200, wanted)
    runner.build_index(wanted)

    got = runner.new_sequence()
    list(runner.prefill(got, ids[:200], "exact"))
    if way == "chunks":
        for stop in (500, 501, 800, 1100):
            for token in ids[got.length : stop]:
                runner.decode([got], [token], "exact")
            runner.build_index(got)
    elif way == "one by one":
        grown(200, got)
        for _ in range(10):
            for layer, cache in enumerate(got.layers):
                if runner._indexed(layer):
                    runner._attention()._index(layer, cache).step()
    elif way == "forked":
        grown(200, got)
        got.truncate(700)
        runner.build_index(got)
        got = runner.fork(got)
        grown(700, got)
        runner.build_index(got)
    else:
        grown(200, got)
        runner.build_index(got)
        got.truncate(600)
        grown(600, got)
        runner.build_index(got)
    for _ in range(5):
        one, other = (runner.decode([sequence], [7]) for sequence in (wanted, got))
        assert torch.equal(one.logits, other.logits)
        assert one.sampled == other.sampled
        assert one.offloaded == other.offloaded


def test_heads_read_their_shares_of_the_budget():
    """On average over layers and heads it is the budget; with a target error each head finds its own."""
    model = tiny_model("llama")
    (ids,) = prompts(model.config.vocab_size, (1500,))
    heads = model.config.num_attention_heads
    shares = {1: (0.25,) * heads, 2: (0.5,) * (heads - 1) + (1.75 * heads - 0.5 * (heads - 1),)}

    def read(**attention):
        runner = make_runner(model, "rabitq", dense_layers=(0,), **attention)
        runner.follow(replace(runner.plan, head_shares=shares))
        return steps(runner, ids, 20)

    found = read(budget=0.1)[:-1]
    assert all(step.stats.budget == step.budgets[0] == pytest.approx(0.1) for step in found)
    taken = {layer: sum(step.stats.sampled[layer] for step in found) for layer in (1, 2)}
    assert 5 < taken[2] / taken[1] < 9
    offloaded = sum(step.offloaded[0] for step in found)
    assert sum(taken.values()) / offloaded == pytest.approx(0.1, rel=0.2)
    moving = read(target_error=0.3)[0]
    assert moving.budgets == [pytest.approx(0.02)]
    assert moving.stats.sampled[2] < 3 * moving.stats.sampled[1]
    every = read(budget=1.0)[0]
    assert every.stats.sampled_ratio == 1.0
    assert every.stats.error_estimate == 0.0


def test_budgets_move_until_errors_are_below_the_target():
    model = tiny_model("llama")
    (ids,) = prompts(model.config.vocab_size, (1500,))
    low, high = BUDGET_RANGE
    loose = steps(make_runner(model, "rabitq", target_error=50.0), ids, 12)
    assert loose[0].stats.budget == 0.02
    assert loose[-2].stats.budget == pytest.approx(low)
    tight = steps(make_runner(model, "rabitq", target_error=1e-6), ids, 6)
    assert [step.stats.budget for step in tight[:4]] == [0.02, 0.04, 0.08, 0.16]
    assert tight[-2].stats.budget == pytest.approx(high)
    assert tight[-2].stats.error_estimate < loose[-2].stats.error_estimate
    asked = steps(make_runner(model, "rabitq", target_error=1e-6, budget=0.5), ids, 1)
    assert asked[0].stats.budget == pytest.approx(high)


def test_budgets_belong_to_the_sequence():
    """They are forked with it, begin anew after a prompt, and do not know of neighbours."""
    model = tiny_model("llama")
    first, second = prompts(model.config.vocab_size, (1500, 900))
    runner = make_runner(model, "rabitq", target_error=0.3)
    *alone, sequence = steps(runner, first, 8)
    budgets = [step.budgets[0] for step in alone]
    assert len(set(budgets)) > 2
    fork = runner.fork(sequence)
    following = [runner.decode([one], [5]).budgets[0] for one in (sequence, fork)]
    assert following[0] == following[1] != 0.02
    list(runner.prefill(fork, [9]))
    assert runner.decode([fork], [5]).budgets[0] == 0.02

    pair = [runner.new_sequence(), runner.new_sequence()]
    tokens = []
    for one, ids in zip(pair, (first, second), strict=True):
        *_, (_, logits) = runner.prefill(one, ids)
        tokens.append(int(logits.argmax()))
    beside = []
    for _ in range(8):
        step = runner.decode(pair, tokens)
        tokens = step.logits.argmax(dim=-1).tolist()
        beside.append(step.budgets[0])
    assert beside == budgets


def test_modes_take_turns_on_forks():
    """As bench and eval do: each fork has the index of its mode, and none is in another's way."""
    model = tiny_model("llama")
    (ids,) = prompts(model.config.vocab_size, (1000,))
    runner = make_runner(model, "exact", K=4, L=20)
    shared = runner.new_sequence()
    list(runner.prefill(shared, ids, "exact"))
    assert shared.index_bytes == 0
    found = {}
    for mode in ("lsh", "rabitq", "exact"):
        fork = runner.fork(shared)
        runner.build_index(fork, mode)
        assert runner.samples(fork, mode) == (mode != "exact")
        found[mode] = runner.decode([fork], [5], mode)
        names = {cache.index.sampler for cache in fork.layers if cache.index is not None}
        assert names == ({mode} - {"exact"})
    fork = runner.fork(shared)
    for mode in ("rabitq", "lsh"):  # one that has another's index gets its own
        runner.build_index(fork, mode)
        fork.truncate(1000)
        again = runner.decode([fork], [5], mode)
        assert torch.equal(again.logits, found[mode].logits)


def test_the_reference_samples_the_same():
    """Everything again on the NumPy twins, in a process of its own."""
    code = (
        "from tests.model.test_rabitq import *\n"
        "model = tiny_model('llama')\n"
        "(ids,) = prompts(model.config.vocab_size, (700,))\n"
        "*found, _ = steps(make_runner(model, 'rabitq', budget=0.05, dense_layers=(0,)), ids, 3)\n"
        "print([int(step.logits.argmax()) for step in found], [step.sampled for step in found])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MAGICPIG_ISA": isa},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for isa in ("reference", "avx2")
    ]
    assert said[0] == said[1]
