"""Tiled fills: rows of a prefilled text repeated to a longer context, in memory of their own, at fresh positions."""

from __future__ import annotations

import torch

from magicpig_cli.bench.fill import duplicate, repeat_rows
from magicpig_cli.model.rotary import RotaryShift
from tests.model.test_parity import make_runner, prompts
from tests.tiny import tiny_model


def test_repeated_rows_stand_where_the_model_would_put_them():
    """A model whose hidden states ignore position: one layer. Prefilling the text twice gives what repeating gives."""
    model = tiny_model("llama", num_hidden_layers=1)
    runner = make_runner(model)
    (text,) = prompts(model.config.vocab_size, (150,))
    tiled, real = runner.new_sequence(), runner.new_sequence()
    list(runner.prefill(tiled, text))
    list(repeat_rows(tiled, 400, RotaryShift(model)))
    list(runner.prefill(real, (text * 3)[:400]))
    assert tiled.ids == real.ids
    assert tiled.length == 400
    wanted, got = real.layers[0].copy_rows(), tiled.layers[0].copy_rows()
    # Rounding of the model's own float32 angles, up to 400·2⁻²⁴ each, times the largest key.
    assert (got - wanted).abs().max() <= 2.0**-22 * 400 * float(wanted.abs().max())
    for token in (5, 6, 7):  # and decoding goes on from there
        assert torch.equal(
            runner.decode([tiled], [token]).logits.argmax(), runner.decode([real], [token]).logits.argmax()
        )


def test_duplicate_shares_no_memory():
    model = tiny_model("llama")
    runner = make_runner(model, mode="lsh", K=4, L=8)

    class Holder:  # what `duplicate` needs of an engine
        def __init__(self) -> None:
            self.runner = runner

        def new_sequence(self):
            return runner.new_sequence()

    (text,) = prompts(model.config.vocab_size, (500,))
    first = runner.new_sequence()
    list(runner.prefill(first, text))
    second = duplicate(Holder(), first)
    assert second.ids == first.ids
    before = [layer.copy_rows() for layer in second.layers]
    a = runner.decode([second], [9]).logits
    first.truncate(100)
    list(runner.prefill(first, text[:300]))
    second.truncate(500)
    assert all(torch.equal(layer.copy_rows(), rows) for layer, rows in zip(second.layers, before, strict=True))
    assert torch.equal(runner.decode([second], [9]).logits, a)
