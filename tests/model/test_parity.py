"""Greedy tokens equal transformers' own `generate` for every verified family: chunks, ragged batches, truncation.

float32 rows and exact attention are the parity mode of the determinism contract (DESIGN.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magicpig_cli import hardware
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import plan
from tests.tiny import FAMILIES, tiny_model
from tests.tolerances import close_logits

NEW_TOKENS = 12


def make_runner(
    model, mode: str = "exact", chunk: int = 16, auto_from: int = 4096, kv_dtype: str = "float32", **attention
) -> ModelRunner:
    options = AttentionOptions(mode=mode, kv_dtype=kv_dtype, **attention)
    shape = shape_from_config(model.config)
    chosen = plan(hardware.probe(), shape, Settings(attention=options, threads=1))
    return ModelRunner(
        model, shape, replace(chosen, chunk=chunk, auto_lsh_from=auto_from), torch.device("cpu"), options.hash_seed
    )


def prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]


def expected(model, prompt: list[int]) -> list[int]:
    """What transformers generates greedily, with its own attention."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    finally:
        model.set_attn_implementation("magicpig")
    return out[0, len(prompt) :].tolist()


def greedy(runner: ModelRunner, batch: list[list[int]]) -> list[list[int]]:
    """Prefill each, then decode all together."""
    sequences, answers = [], []
    for prompt in batch:
        sequence = runner.new_sequence()
        *_, (_, logits) = runner.prefill(sequence, prompt)
        sequences.append(sequence)
        answers.append([int(logits.argmax())])
    for _ in range(NEW_TOKENS - 1):
        step = runner.decode(sequences, [answer[-1] for answer in answers])
        for answer, logits in zip(answers, step.logits, strict=True):
            answer.append(int(logits.argmax()))
    return answers


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family):
    model = tiny_model(family)
    batch = prompts(model.config.vocab_size, (170, 33, 5, 1))
    wanted = [expected(model, prompt) for prompt in batch]
    assert greedy(make_runner(model), batch) == wanted


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16])
def test_any_group_size(group):
    heads = 2 * group
    model = tiny_model("llama", num_attention_heads=heads, num_key_value_heads=2, hidden_size=12 * heads, head_dim=8)
    batch = prompts(model.config.vocab_size, (150, 20))
    assert greedy(make_runner(model), batch) == [expected(model, prompt) for prompt in batch]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dim_need_not_be_hidden_over_heads(head_dim):
    model = tiny_model("qwen3", hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim)
    batch = prompts(model.config.vocab_size, (140, 9))
    assert greedy(make_runner(model), batch) == [expected(model, prompt) for prompt in batch]


@pytest.mark.parametrize("length", [*range(1, 6), 63, 64, 65, 66, 67, 68, 69, 131, 132, 133, 196])
def test_prompts_around_every_boundary(length):
    model = tiny_model("llama")
    (prompt,) = prompts(model.config.vocab_size, (length,))
    assert greedy(make_runner(model), [prompt]) == [expected(model, prompt)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_chunk_size_changes_no_token(family):
    model = tiny_model(family)
    (prompt,) = prompts(model.config.vocab_size, (150,))
    assert greedy(make_runner(model, chunk=1000), [prompt]) == greedy(make_runner(model, chunk=7), [prompt])


def test_truncated_sequence_continues_like_a_fresh_one():
    model = tiny_model("llama")
    runner = make_runner(model)
    (prompt,) = prompts(model.config.vocab_size, (200,))
    other = prompts(model.config.vocab_size, (40, 40))[1]
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, prompt))
    for token in other[:20]:
        runner.decode([sequence], [token])
    for keep in (190, 130, 68, 3):
        sequence.truncate(keep)
        *_, (_, logits) = runner.prefill(sequence, other)
        fresh = runner.new_sequence()
        *_, (_, wanted) = runner.prefill(fresh, prompt[:keep] + other)
        assert sequence.ids == fresh.ids
        assert close_logits(logits, wanted)
        assert logits.argmax() == wanted.argmax()
        sequence.truncate(keep)


def test_failed_forward_leaves_the_sequence_as_it_was(monkeypatch):
    model = tiny_model("llama")
    runner = make_runner(model)
    (prompt,) = prompts(model.config.vocab_size, (150,))
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, prompt[:140]))
    second_layer = model.model.layers[1].mlp.forward

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.decode([sequence], [prompt[140]])
    with pytest.raises(KeyboardInterrupt):
        list(runner.prefill(sequence, prompt[140:]))
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", second_layer)
    assert [layer.length for layer in sequence.layers] == [140] * len(sequence.layers)
    *_, (_, logits) = runner.prefill(sequence, prompt[140:])
    fresh = runner.new_sequence()
    *_, (_, wanted) = runner.prefill(fresh, prompt)
    assert logits.argmax() == wanted.argmax()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_sampling_with_every_key_hit_equals_exact(family):
    """K = 1 with many tables hits every key twice with probability 1 − 2⁻²⁹⁰: the estimate is the exact result."""
    model = tiny_model(family)
    batch = prompts(model.config.vocab_size, (420, 380))
    exact = greedy(make_runner(model), batch)
    assert greedy(make_runner(model, mode="lsh", K=1, L=300, dense_layers=(0,)), batch) == exact


def test_windowed_layers_have_no_index():
    model = tiny_model("gemma2")
    runner = make_runner(model, mode="lsh", K=4, L=10)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, prompts(model.config.vocab_size, (400,))[0]))
    windows = shape_from_config(model.config).layer_windows
    assert any(windows)
    for number, (window, layer) in enumerate(zip(windows, sequence.layers, strict=True)):
        assert (layer.index is None) == (window is not None or number == 0)


def test_auto_starts_sampling_in_the_middle_of_an_answer():
    """Every key is hit (K = 1, L = 300), so the tokens equal exact attention's before and after the switch."""
    model = tiny_model("llama")
    (prompt,) = prompts(model.config.vocab_size, (394,))
    runner = make_runner(model, mode="auto", auto_from=400, K=1, L=300)
    sequence = runner.new_sequence()
    *_, (_, logits) = runner.prefill(sequence, prompt)
    assert sequence.index_bytes == 0
    tokens, ratios = [int(logits.argmax())], []
    for _ in range(NEW_TOKENS - 1):
        step = runner.decode([sequence], [tokens[-1]])
        tokens.append(int(step.logits.argmax()))
        ratios.append(step.stats.sampled_ratio)
    assert tokens == expected(model, prompt)
    assert ratios == [None] * 6 + [1.0] * 5


def test_mean_is_taken_again_after_a_longer_prompt_and_not_while_generating():
    model = tiny_model("llama")
    runner = make_runner(model, mode="lsh", K=4, L=10)
    more, text = prompts(model.config.vocab_size, (300, 400))
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, text))
    first = sequence.layers[1].index
    for token in more[:200]:
        runner.decode([sequence], [token])
    assert sequence.layers[1].index is first
    assert first.outgrown
    list(runner.prefill(sequence, more[200:]))
    assert sequence.layers[1].index is not first
    assert sequence.layers[1].index.length == sequence.layers[1].store.length
