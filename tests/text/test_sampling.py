"""Token sampling: equal to transformers' generate, seeded per sequence; where each parameter comes from."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine.sampling import SamplingParams, TokenSampler, resolve_sampling
from magicpig_cli.errors import ModelError, UsageError

PROMPT = [5, 9, 9, 17, 40, 3]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def model():
    """A random model whose distributions are flat enough to draw from. It runs transformers' own attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def our_tokens(model, params: SamplingParams, count: int = 24) -> list[int]:
    ids = list(PROMPT)
    sampler = TokenSampler(params, PROMPT)
    for _ in range(count):
        ids.append(sampler.pick(model(torch.tensor([ids])).logits[0, -1]))
    return ids[len(PROMPT) :]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.4},
        {"temperature": 2, "top_k": 3, "top_p": 1, "repetition_penalty": 2},  # whole numbers, as JSON files hold them
    ],
)
def test_tokens_equal_those_of_generate(model, values):
    theirs = {"top_k": 0, "top_p": 1.0, **{name: value for name, value in values.items() if name != "temperature"}}
    theirs = {name: float(value) if name != "top_k" else value for name, value in theirs.items()}
    if values["temperature"]:
        theirs |= {"do_sample": True, "temperature": float(values["temperature"])}
    else:
        theirs |= {"do_sample": False}
    torch.manual_seed(11)  # generate draws from the global generator
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=24, **theirs)[0, len(PROMPT) :].tolist()
    assert our_tokens(model, SamplingParams(max_tokens=24, seed=11, **values)) == expected


def test_a_penalty_changes_the_greedy_answer(model):
    assert our_tokens(model, GREEDY) != our_tokens(model, dataclasses.replace(GREEDY, repetition_penalty=1.8))


def logits_of(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_draws_follow_the_probabilities():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    draws = 4000
    sampler = TokenSampler(SamplingParams(max_tokens=1, temperature=1.0, seed=1), [])
    counts = [0] * 4
    for _ in range(draws):
        counts[sampler.pick(logits_of(probabilities))] += 1
    for count, p in zip(counts, probabilities, strict=True):
        assert abs(count - draws * p) < 4 * (draws * p * (1 - p)) ** 0.5


def test_neighbours_do_not_change_a_sequence():
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=3)
    flat = torch.zeros(1000)
    alone = TokenSampler(params, [])
    expected = [alone.pick(flat) for _ in range(20)]
    one, other = TokenSampler(params, []), TokenSampler(dataclasses.replace(params, seed=4), [])
    interleaved = [(one.pick(flat), other.pick(flat)) for _ in range(20)]
    assert [pair[0] for pair in interleaved] == expected
    assert [pair[1] for pair in interleaved] != expected


def test_where_the_seed_comes_from():
    said = SamplingParams(max_tokens=1, temperature=1.0, seed=7)
    silent = dataclasses.replace(said, seed=None)
    assert TokenSampler(said, [], 9).seed == 7
    assert TokenSampler(silent, [], 9).seed == 9
    assert TokenSampler(dataclasses.replace(said, seed=0), [], 9).seed == 0
    drawn = TokenSampler(silent, [])
    assert drawn.seed != TokenSampler(silent, []).seed
    again = TokenSampler(dataclasses.replace(said, seed=drawn.seed), [])
    flat = torch.zeros(1000)
    assert [drawn.pick(flat) for _ in range(10)] == [again.pick(flat) for _ in range(10)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_float_type_and_no_change_to_the_logits(dtype, temperature):
    logits = torch.tensor([-20.0, 30.0, -10.0], dtype=dtype)
    before = logits.clone()
    params = SamplingParams(max_tokens=1, temperature=temperature, repetition_penalty=1.1, top_p=0.9, seed=0)
    assert TokenSampler(params, [1]).pick(logits) == 1
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_no_numbers_are_an_error(bad, temperature):
    params = SamplingParams(max_tokens=1, temperature=temperature, seed=0)
    with pytest.raises(ModelError, match="not a number"):
        TokenSampler(params, []).pick(torch.tensor([0.0, bad, 1.0]))


def test_forbidden_tokens_are_never_drawn():
    sampler = TokenSampler(SamplingParams(max_tokens=1, temperature=5.0, seed=0), [])
    assert {sampler.pick(torch.tensor([float("-inf"), 1.0, float("-inf")])) for _ in range(50)} == {1}


@pytest.mark.parametrize(
    ("values", "option", "allowed"),
    [
        ({"max_tokens": 0}, "--max-tokens", "1 or more"),
        ({"temperature": -0.1}, "--temperature", "0 or more"),
        ({"temperature": float("nan")}, "--temperature", "0 or more"),
        ({"temperature": float("inf")}, "--temperature", "0 or more"),
        ({"top_p": 1.01}, "--top-p", "0 to 1"),
        ({"top_p": True}, "--top-p", "0 to 1"),
        ({"top_k": -2}, "--top-k", "-1 or more"),
        ({"top_k": 2.5}, "--top-k", "-1 or more"),
        ({"min_p": -1}, "--min-p", "0 to 1"),
        ({"repetition_penalty": 0}, "--repetition-penalty", "0.01 to 100"),
        ({"repetition_penalty": 1e-40}, "--repetition-penalty", "0.01 to 100"),
        ({"repetition_penalty": 1e3}, "--repetition-penalty", "0.01 to 100"),
        ({"temperature": 10**400}, "--temperature", "0 or more"),
        ({"temperature": -(10**5000)}, "--temperature", "0 or more"),
        ({"top_p": 10**5000}, "--top-p", "0 to 1"),
        ({"seed": 10**5000}, "--seed", "0 to 18446744073709551615"),
        ({"max_tokens": -(10**5000)}, "--max-tokens", "1 or more"),
        ({"seed": -1}, "--seed", "0 to 18446744073709551615"),
        ({"seed": 2**64}, "--seed", "0 to 18446744073709551615"),
    ],
)
def test_values_out_of_range(values, option, allowed):
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{"max_tokens": 1, "temperature": 0.7, **values})
    assert option in caught.value.message
    assert allowed in caught.value.message


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="--stop"):
        SamplingParams(max_tokens=1, temperature=0.7, stop=("ok", ""))


HOT = [1e30, 3e38, 1e308]
COLD = [1e-5, 1e-6, 1e-38, 5e-324]
LOGITS = {
    "usual": [1.0, -2.0, 30.0, 5.0],
    "large": [1e4, -1e4, 3e4, 0.0],
    "forbidden": [float("-inf"), -1.0, 2.0, float("-inf")],
    "tied": [7.0, 7.0, 7.0, 7.0],
    "negative": [-3e4, -2e4, -1.0, -9.0],
}


@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS)
@pytest.mark.parametrize("temperature", [0.0, *COLD, 1.0, *HOT])
@pytest.mark.parametrize("penalty", [None, 0.01, 100.0])
def test_extreme_values_draw_a_token_that_is_allowed(logits, temperature, penalty):
    params = SamplingParams(5, temperature, top_p=0.99, min_p=1e-300, repetition_penalty=penalty, seed=1)
    token = TokenSampler(params, [1]).pick(torch.tensor(logits))
    assert logits[token] > float("-inf")


@pytest.mark.parametrize("temperature", COLD)
def test_a_tiny_temperature_takes_the_likeliest_token(temperature):
    sampler = TokenSampler(SamplingParams(1, temperature, seed=1), [])
    assert {sampler.pick(torch.tensor([1.0, 1.01, 0.99])) for _ in range(50)} == {1}


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.7])
def test_scores_that_a_penalty_makes_infinite_are_a_model_error(temperature):
    sampler = TokenSampler(SamplingParams(1, temperature, repetition_penalty=0.01, seed=1), [0])
    with pytest.raises(ModelError, match="not a number"):
        sampler.pick(torch.tensor([1e38, 1.0]))


@pytest.mark.parametrize("values", [{"top_p": 0, "seed": 2**64 - 1}, {"top_k": 10**6}, {"top_k": -1}, {"min_p": 1}])
def test_values_at_the_edge_work(values):
    params = SamplingParams(**{"max_tokens": 1, "temperature": 0.01, "seed": 0, **values})
    assert TokenSampler(params, []).pick(torch.tensor([0.0, 9.0, 1.0])) == 1


@pytest.mark.parametrize(
    ("file", "temperature"),
    [
        ({"eos_token_id": 2}, 0.7),  # base models and conversions say nothing
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, 0.6),  # Llama 3
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, 1.0),  # Gemma 3
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.9}, 0.9),  # Llama 2's first files
        ({"temperature": 0.3}, 0.3),
        ({"top_p": 0.8}, 0.7),
    ],
)
def test_temperature_from_the_models_file(file, temperature):
    assert resolve_sampling(GenerationOptions(), GenerationConfig(**file)).temperature == temperature
    assert resolve_sampling(GenerationOptions(temperature=0.25), GenerationConfig(**file)).temperature == 0.25
    assert resolve_sampling(GenerationOptions(temperature=0), GenerationConfig(**file)).temperature == 0


def test_option_before_file_before_default():
    file = GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05, max_new_tokens=2048
    )
    assert resolve_sampling(GenerationOptions(), file) == SamplingParams(2048, 0.7, 0.8, 20, None, 1.05)
    said = GenerationOptions(
        max_tokens=9, temperature=0.1, top_p=1.0, top_k=0, min_p=0.1, repetition_penalty=1.0, stop=("x",), seed=0
    )
    assert resolve_sampling(said, file) == SamplingParams(9, 0.1, 1.0, 0, 0.1, 1.0, ("x",), 0)
    assert resolve_sampling(GenerationOptions(), None) == SamplingParams(512, 0.7)


def test_fallbacks_of_transformers_are_not_the_models_word():
    params = resolve_sampling(GenerationOptions(), GenerationConfig(max_length=20))
    assert params == SamplingParams(max_tokens=512, temperature=0.7)


def test_stop_strings_of_the_models_file():
    for stop in ("###", ["###"]):
        assert resolve_sampling(GenerationOptions(), GenerationConfig(stop_strings=stop)).stop == ("###",)
    assert resolve_sampling(GenerationOptions(stop=("a",)), GenerationConfig(stop_strings="###")).stop == ("a",)
