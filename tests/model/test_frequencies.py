"""Rotary frequencies that depend on the length: settled once, so that chunks and neighbours change nothing."""

from __future__ import annotations

import pytest

from magicpig_cli.model.frequencies import settle
from tests.model.test_parity import expected, greedy, make_runner, prompts
from tests.tiny import tiny_model

LIMIT = 64


def longrope_model():
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    return tiny_model("phi3", max_position_embeddings=512, original_max_position_embeddings=LIMIT,
                      rope_scaling={"type": "longrope", **factors})  # fmt: skip


def dynamic_model():
    return tiny_model("llama", max_position_embeddings=LIMIT, rope_scaling={"type": "dynamic", "factor": 4.0})


@pytest.mark.parametrize(("context", "length"), [(LIMIT, 40), (512, 100)])
def test_on_one_side_of_the_limit_tokens_equal_transformers(context, length):
    model = longrope_model()
    prompt = prompts(256, (length,))[0]
    wanted = expected(model, prompt)
    assert settle(model, context)
    assert greedy(make_runner(model, chunk=16), [prompt])[0] == wanted


@pytest.mark.parametrize("make", [longrope_model, dynamic_model])
def test_chunks_and_neighbours_change_nothing(make):
    model = make()
    assert settle(model, 4 * LIMIT)
    short, crossing, long = prompts(256, (40, 60, 100))
    alone = [greedy(make_runner(model, chunk=1000), [prompt])[0] for prompt in (short, crossing, long)]
    assert greedy(make_runner(model, chunk=16), [short, crossing, long]) == alone


def test_the_context_decides():
    prompt = prompts(256, (40,))[0]
    answers = []
    for context in (LIMIT, LIMIT + 1):
        model = longrope_model()
        settle(model, context)
        answers.append(greedy(make_runner(model), [prompt])[0])
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}]
)
def test_fixed_frequencies_are_left_alone(scaling):
    model = tiny_model("llama", **({"rope_scaling": scaling} if scaling else {}))
    before = model.model.rotary_emb.inv_freq.clone()
    assert not settle(model, 8192)
    assert model.model.rotary_emb.inv_freq.equal(before)
