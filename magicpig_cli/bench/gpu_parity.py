"""The same random model on the CPU and on another device: the same tokens, and logits that differ by rounding only."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from magicpig_cli import hardware
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.model import blocks, hook, linear  # noqa: F401  hook registers the attention function
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import plan

# Every key is hit in two tables with probability 1 − 2⁻²⁹⁰: what is compared is rounding, not two draws. Codes of keys
# that lie on a hash plane may differ between devices, so other tables would sample other keys.
_K, _L = 1, 300


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many are read and how many are then decoded."""

    prompt: int
    steps: int


def compare_devices(config: dict[str, Any], mode: str, device: torch.device, tokens: Tokens) -> dict[str, Any]:
    """Greedy steps of a random model on the CPU, as a run there computes them, and on `device` over the same tokens.

    Where `device` is the CPU too (a dry run), the model's own code stands for it.
    """
    made = _random(config)
    here = deepcopy(made)
    linear.hold(here, "float32")
    blocks.compute_by_kernels(here)
    cpu, ratio = _steps(_runner(here, mode, torch.device("cpu")), tokens, None)
    chosen = [int(step.argmax()) for step in cpu]
    runner = _runner(made.to(device), mode, device)  # type: ignore[arg-type]
    there, _ = _steps(runner, tokens, chosen)
    differences = [float((a - b).abs().max()) for a, b in zip(cpu, there, strict=True)]
    return {
        "tokens_equal": chosen == [int(step.argmax()) for step in there],
        "max_logit_diff": max(differences),
        "max_logit": max(float(step.abs().max()) for step in cpu),
        "tokens": len(cpu),
        "sampled_ratio": ratio,
        "graphs": runner.segments.replayed > 0,
    }


def compare_halves(config: dict[str, Any], mode: str, device: torch.device, tokens: Tokens) -> dict[str, Any]:
    """The same of two sequences on `device`, decoded by one forward and by two that overlap."""
    model = _random(config).to(device)  # type: ignore[arg-type]
    logits: list[list[torch.Tensor]] = []
    for halves in (False, True):
        runner = _runner(model, mode, device)
        runner.halves = halves
        sequences = [runner.new_sequence() for _ in range(2)]
        for number, sequence in enumerate(sequences):
            for _ in runner.prefill(sequence, _prompt(runner, tokens.prompt, seed=number)):
                pass
        steps = [runner.decode(sequences, [3 + number, 4 + number]) for number in range(tokens.steps)]
        logits.append([step.logits.cpu() for step in steps])
    whole, both = (torch.stack(each) for each in logits)
    return {
        "tokens_equal": torch.equal(whole.argmax(-1), both.argmax(-1)),
        "max_logit_diff": float((whole - both).abs().max()),
        "max_logit": float(whole.abs().max()),
        "tokens": whole[..., 0].numel(),
        "sampled_ratio": steps[-1].stats.sampled_ratio,
    }


def _prompt(runner: ModelRunner, count: int, seed: int) -> list[int]:
    vocab = runner.model.config.vocab_size
    ids: list[int] = torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def _random(config: dict[str, Any]) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            AutoConfig.for_model(**config), dtype=torch.float32, attn_implementation="magicpig"
        )
    made.train(False).requires_grad_(False)
    return made


def _runner(model: PreTrainedModel, mode: str, device: torch.device) -> ModelRunner:
    attention = AttentionOptions(mode, K=_K, L=_L, kv_dtype="float32")
    settings = Settings(ModelOptions(device=str(device), dtype="float32"), attention)
    shape = shape_from_config(model.config)
    return ModelRunner(model, shape, plan(hardware.probe(), shape, settings), device, hash_seed=0)


def _steps(
    runner: ModelRunner, tokens: Tokens, follow: list[int] | None
) -> tuple[list[torch.Tensor], float | None]:  # fmt: skip
    """Logits [V] after the prompt and of each step, on the host, and the sampled ratio of the last step.

    follow: tokens to take instead of the likeliest.
    """
    sequence = runner.new_sequence()
    *_, (_, last) = runner.prefill(sequence, _prompt(runner, tokens.prompt, seed=1))
    logits, ratio = [last.cpu()], None
    for number in range(tokens.steps):
        token = int(logits[-1].argmax()) if follow is None else follow[number]
        step = runner.decode([sequence], [token])
        ratio = step.stats.sampled_ratio
        logits.append(step.logits[0].cpu())
    return logits, ratio
