"""The whole engine on int8 rows: every family, sampled and exact, beside float32 rows."""

from __future__ import annotations

import pytest
import torch

from magicpig_cli.bench.fill import repeat_rows
from magicpig_cli.model.rotary import RotaryShift
from tests.model.test_parity import make_runner, prompts
from tests.tiny import FAMILIES, MIXTURES, tiny_model
from tests.tolerances import close_int8_rows, close_through_int8


def logits_after(runner, ids: list[int], cut: int) -> torch.Tensor:
    """Logits [5, V]: of the prompt, of two tokens, and of two other tokens after a cut back into the store."""
    sequence = runner.new_sequence()
    *_, (_, first) = runner.prefill(sequence, ids)
    found = [first, *(runner.decode([sequence], [token]).logits[0] for token in (5, 9))]
    sequence.truncate(cut)
    found += [runner.decode([sequence], [token]).logits[0] for token in (7, 8)]
    return torch.stack(found)


@pytest.mark.parametrize("mode", ["exact", "lsh", "rabitq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, mode):
    """K = 1 samples every key but the opposite ones, a budget of 1 every one, and all experts are at work: no choice is
    made that could flip."""
    model = tiny_model(family, **({"num_experts_per_tok": 3} if family in MIXTURES else {}))
    (ids,) = prompts(model.config.vocab_size, (500,))
    wanted = logits_after(make_runner(model, mode, K=1, L=60, budget=1.0), ids, cut=440)
    got = logits_after(make_runner(model, mode, kv_dtype="int8", K=1, L=60, budget=1.0), ids, cut=440)
    assert not torch.equal(got, wanted)
    assert close_through_int8(got, wanted)


def test_half_the_bytes():
    model = tiny_model("qwen3")
    (ids,) = prompts(model.config.vocab_size, (500,))
    taken = {}
    for kind in ("bfloat16", "int8"):
        runner = make_runner(model, kv_dtype=kind)
        sequence = runner.new_sequence()
        list(runner.prefill(sequence, ids))
        taken[kind] = sequence.kv_bytes
    assert taken["int8"] * 48 == taken["bfloat16"] * 26  # head dim 24


def test_tiled_rows_stand_where_the_model_would_put_them():
    model = tiny_model("llama", num_hidden_layers=1)
    runner = make_runner(model, kv_dtype="int8")
    (text,) = prompts(model.config.vocab_size, (150,))
    tiled, real = runner.new_sequence(), runner.new_sequence()
    list(runner.prefill(tiled, text))
    list(repeat_rows(tiled, 400, RotaryShift(model, runner.key_rotation)))
    list(runner.prefill(real, (text * 3)[:400]))
    got, wanted = (sequence.layers[0].copy_rows().float() for sequence in (tiled, real))
    assert close_int8_rows(got, wanted, roundings=3)  # two of tiled rows, one of real ones
