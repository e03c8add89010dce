"""Every family that is promised, as people know its models, and what is found when a tiny one of them runs.

`examine` does all of it once per case: tests assert its findings, scripts/family_table.py prints them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magicpig_cli.attention.estimator import cosine, inclusion_probability
from magicpig_cli.engine.recording import Queries, teacher_force
from magicpig_cli.model import blocks, linear
from magicpig_cli.model.frequencies import settle
from magicpig_cli.model.shape import shape_from_config
from tests.model.test_parity import expected, greedy, make_runner, prompts
from tests.tiny import MIXTURES, tiny_model

RAGGED = (170, 33, 5, 1)  # tokens of prompts that are decoded together
LONG = (420, 380)  # with enough behind the window to sample from
SEEDS = 16  # hash seeds of the mean sampled ratio
RATIO_K, RATIO_L = 4, 12
FORCED_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A model family by the name that people know it by, with what makes its configs differ from others'."""

    name: str
    family: str  # transformers' model_type
    overrides: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    ragged: tuple[int, ...] = RAGGED
    context: int | None = None  # tokens for which frequencies are chosen that would switch with the length

    def model(self):
        return tiny_model(self.family, **self.overrides)


_LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
_GRANITE = {
    "attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
}  # fmt: skip


def _longrope(half: int, original: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * half, "long_factor": [1.0 + 0.5 * i for i in range(half)]}
    return {"original_max_position_embeddings": original, "rope_scaling": {"type": "longrope", **factors}}


CASES = (
    Case("Llama 2", "llama", {"num_key_value_heads": 4}, "a KV head for each query head"),
    Case("Llama 3", "llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    Case("Llama 3.1", "llama", {"rope_parameters": {**_LLAMA3, "factor": 8.0}}, "llama3 scaling"),
    Case("Llama 3.2", "llama", {"rope_parameters": {**_LLAMA3, "factor": 32.0}, "tie_word_embeddings": True,
         "head_dim": 24}, "llama3 scaling, tied head"),
    Case("Llama 2 at 32k", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}},
         "linear scaling"),
    Case("Mistral 0.1", "mistral", {"sliding_window": 48}, "a window in every layer: nothing is sampled"),
    Case("Mistral 0.3", "mistral", {"sliding_window": None}),
    Case("Mistral Nemo", "mistral", {"sliding_window": None, "head_dim": 24}, "head dim is not hidden / heads"),
    Case("Mixtral 8x7B", "mixtral", {"sliding_window": None}, "experts"),
    Case("Qwen2", "qwen2", {"tie_word_embeddings": True}, "biases on q, k and v, tied head"),
    Case("Qwen2.5", "qwen2", {"use_sliding_window": False, "sliding_window": 48}, "names a window, uses none"),
    Case("Qwen2.5 beyond 32k", "qwen2", {"rope_parameters": _YARN}, "YaRN scaling"),
    Case("Qwen2, later layers windowed", "qwen2",
         {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}),
    Case("Qwen2 MoE (Qwen1.5-MoE)", "qwen2_moe", {}, "experts and a shared one"),
    Case("Qwen3", "qwen3", {}, "norms of q and k"),
    Case("Qwen3 beyond 32k", "qwen3", {"rope_parameters": _YARN}, "YaRN scaling"),
    Case("Qwen3 MoE (30B-A3B)", "qwen3_moe", {"norm_topk_prob": True}, "experts"),
    Case("Qwen3 MoE, some layers dense", "qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2},
         "experts in every second layer"),
    Case("Phi-3 mini 4k", "phi3", {"sliding_window": 48}, "a window in every layer: nothing is sampled"),
    Case("Phi-3 mini 128k, short", "phi3", {**_longrope(8, 1024), "sliding_window": None}, "longrope",
         context=1024),
    Case("Phi-3 mini 128k, long", "phi3", {**_longrope(8, 64), "sliding_window": None}, "longrope",
         ragged=(170, 130, 90, 70), context=2048),
    Case("Phi-4-mini, short", "phi3", {**_longrope(6, 1024), "partial_rotary_factor": 0.75, "sliding_window": None,
         "tie_word_embeddings": True}, "longrope on three quarters of a head, tied head", context=1024),
    Case("Phi-4-mini, long", "phi3", {**_longrope(6, 64), "partial_rotary_factor": 0.75, "sliding_window": None,
         "tie_word_embeddings": True}, "longrope on three quarters of a head, tied head",
         ragged=(170, 130, 90, 70), context=2048),
    Case("Phi-4", "phi3",
         {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}),
    Case("Gemma 2", "gemma2", {}, "soft caps, norms around both halves"),
    Case("Gemma 2, head dim 256", "gemma2", {"head_dim": 256, "query_pre_attn_scalar": 256}, "soft caps"),
    Case("Gemma 3", "gemma3_text", {}, "two sets of rotary frequencies"),
    Case("Gemma 3 from 4B", "gemma3_text", {"rope_parameters": {
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
         "linear scaling of the full layers"),
    Case("Granite, attention multiplier", "granite", {}),
    Case("Granite 3", "granite", _GRANITE, "multipliers of embedding, residual and logits"),
    Case("OLMo 2", "olmo2", {}, "norms after both halves only"),
    Case("SmolLM3", "smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
         "every second layer without positions"),
)  # fmt: skip

# Families that people ask for and that cannot be used; the reasons are `unsupported_reason`'s.
REFUSED = (
    "gpt_oss", "deepseek_v3", "kimi_linear", "llama4_text", "qwen3_next", "qwen3_5_text", "gemma3", "gemma4_text",
    "mamba2", "jamba", "granitemoehybrid", "granite_swa", "diffllama", "stablelm", "nemotron", "falcon", "bloom",
    "gpt2", "t5",
)  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """What running a case has shown."""

    layers: int
    windowed: int  # layers with a sliding window
    exact_equal: bool  # greedy tokens of a ragged batch in chunks equal `generate` one by one
    blocks: int  # that the kernels compute
    blocks_equal: bool  # and with them the tokens are the same
    everything_equal: bool | None  # every key sampled: tokens equal exact attention's; None where nothing is sampled
    ratio: tuple[float, float, float] | None  # sampled over hash seeds: mean, closed form, standard error of the mean
    finite: bool  # all logits at the default K and L
    held_back: bool  # layers with a window have no index, all others but the dense one have

    @property
    def ratio_expected(self) -> bool:
        """Within four standard errors of the closed form."""
        if self.ratio is None:
            return True
        mean, predicted, error = self.ratio
        return abs(mean - predicted) <= 4 * error

    @property
    def lsh_sane(self) -> bool:
        return self.everything_equal is not False and self.ratio_expected and self.finite and self.held_back


@functools.cache
def _by_name() -> dict[str, Case]:
    return {case.name: case for case in CASES}


@functools.cache
def examine(name: str) -> Findings:
    """Everything about the case of this name."""
    case = _by_name()[name]
    model = case.model()
    shape = shape_from_config(model.config)
    batch = prompts(model.config.vocab_size, case.ragged)
    wanted = [expected(model, prompt) for prompt in batch]
    if case.context is not None:
        settle(model, case.context)
    exact_equal = greedy(make_runner(model), batch) == wanted
    windowed = sum(window is not None for window in shape.layer_windows)
    long = prompts(model.config.vocab_size, LONG)
    everything_equal = ratio = None
    if windowed < shape.layers:
        sampled = greedy(make_runner(model, "lsh", chunk=128, K=1, L=300, dense_layers=()), long)
        everything_equal = sampled == greedy(make_runner(model, chunk=128), long)
        ratio = _sampled_ratio(model, long[0], shape.full_layers[-1])
    finite, held_back = _default_tables(model, long[0], shape.layer_windows)
    linear.hold(model, "float32")
    by_kernels = blocks.compute_by_kernels(model)
    blocks_equal = greedy(make_runner(model), batch) == wanted
    return Findings(
        shape.layers, windowed, exact_equal, by_kernels, blocks_equal, everything_equal, ratio, finite, held_back
    )


def _default_tables(model, prompt: list[int], windows: tuple[int | None, ...]) -> tuple[bool, bool]:
    """Whether logits are finite at the default K and L, and which layers have an index as they should."""
    runner = make_runner(model, "lsh", chunk=128, dense_layers=(0,))
    sequence = runner.new_sequence()
    *_, (_, logits) = runner.prefill(sequence, prompt)
    finite = bool(logits.isfinite().all())
    for token in range(3, 3 + FORCED_STEPS):
        finite &= bool(runner.decode([sequence], [token]).logits.isfinite().all())
    wanted = [window is None and layer != 0 for layer, window in enumerate(windows)]
    return finite, [layer.index is not None for layer in sequence.layers] == wanted


def _sampled_ratio(model, prompt: list[int], layer: int) -> tuple[float, float, float]:
    """Sampled ratio of one layer over hash seeds beside the closed form on the same queries and keys.

    All layers before it are exact, so that its queries are the same whatever is sampled.
    """
    dense = tuple(n for n in range(model.config.num_hidden_layers) if n != layer)
    tokens = list(range(3, 3 + FORCED_STEPS))
    runner = make_runner(model, chunk=1000)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, prompt))
    prefilled = sequence.fork()
    store = sequence.layers[layer].store
    keys = store.read(0, store.length)[:, :, 0].double().numpy()
    queries = Queries()
    list(teacher_force(runner, sequence, tokens, queries))
    assert store.length == keys.shape[1]  # nothing left the window meanwhile
    q = queries.stacked(layer).double().numpy()  # [S, H, D]
    centred = np.repeat(keys - keys.mean(axis=1, keepdims=True), q.shape[1] // keys.shape[0], axis=0)
    predicted = inclusion_probability(cosine(q[:, :, None], centred[None]), RATIO_K, RATIO_L).mean()
    found = []
    for seed in range(SEEDS):
        runner = make_runner(model, "lsh", K=RATIO_K, L=RATIO_L, dense_layers=dense, hash_seed=seed)
        fork = prefilled.fork()
        runner.build_index(fork)
        steps = [runner.decode([fork], [token]) for token in tokens]
        found.append(sum(step.sampled[0] for step in steps) / sum(step.offloaded[0] for step in steps))
    return float(np.mean(found)), float(predicted), float(np.std(found, ddof=1) / SEEDS**0.5)


def own_code(case: Case) -> bool:
    """Whether this case is known to have blocks that the kernels do not compute."""
    return case.family in MIXTURES or "residual_multiplier" in case.overrides
