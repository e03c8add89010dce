"""Samples of the modes at one context and batch size as rows of CLI.md's bench JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from magicpig_cli.bench.noise import complaints, variation
from magicpig_cli.bench.predicted import predicted
from magicpig_cli.bench.samples import Samples
from magicpig_cli.events import STAGES, StepStats, mean_budget, mean_of_roots

if TYPE_CHECKING:
    from magicpig_cli.bench.fill import Fill
    from magicpig_cli.engine.engine import Engine

Row = dict[str, Any]  # one of the `rows` of CLI.md's bench JSON


@dataclass(frozen=True, slots=True)
class Case:
    """What the modes of one comparison have in common."""

    context: int  # tokens, the generated ones included
    batch: int
    filled: Fill
    launch_ms: dict[str, float | None] | None = None  # `bench.launch`


def rows(engine: Engine, case: Case, samples: Mapping[str, Samples]) -> Iterator[Row]:
    """One row for each mode, in the order of `samples`; every one has at least one repetition."""
    for mode, sample in samples.items():
        yield _row(engine, case, mode, sample, samples.get("exact"))


def _row(engine: Engine, case: Case, mode: str, sample: Samples, exact: Samples | None) -> Row:
    sampling = mode != "exact"
    wall_ms = sample.wall_ms
    p50, p90, p99 = (float(value) for value in np.percentile(wall_ms, [50, 90, 99]))
    means = sample.means()
    return {
        "mode": mode,
        "context": case.context,
        "batch": case.batch,
        "fill": case.filled.kind,
        "fill_fresh_positions": case.filled.fresh_positions,
        "prefilled_tokens": case.filled.prefilled,
        "beyond_model_context": case.context > engine.shape.context,
        **engine.plan.options_of(engine.plan.sampler_of(mode)),
        "gen_tokens": len(sample.repetitions[0]),
        "reps": len(sample.repetitions),
        "sampled_ratio": _sampled_ratio(sample.steps, engine.shape.layers) if sampling else None,
        "tpot_ms": {"mean": float(wall_ms.mean()), "std": float(wall_ms.std()), "p50": p50, "p90": p90, "p99": p99},
        "cv": variation(means),
        "decode_tok_s": float(case.batch * 1000 / wall_ms.mean()),
        "prefill_tok_s": case.filled.prefill_tok_s,
        "ttft_s": case.filled.ttft_s(mode),
        "index_s": case.filled.index_s[mode] if sampling else None,
        "stages_ms": {stage: float(np.mean([step.stages_ms[stage] for step in sample.steps])) for stage in STAGES},
        "launch_ms": case.launch_ms,
        "memory": sample.memory if sampling else _without_index(sample.memory),
        "attn_error": _errors(sample.errors),
        "attn_error_estimate": _estimate(sample.steps),
        "budget_used": mean_budget(step.budget for step in sample.steps),
        "predicted": predicted(engine.plan, mode, case.context, case.batch, len(sample.repetitions[0])),
        "speedup_vs_exact": None if exact is None else float(np.median(exact.wall_ms)) / p50,
        "conditions": sample.conditions().as_json(),
        "warnings": [
            *complaints(means, exact.means() if exact is not None and sampling else None),
            *sample.conditions().complaints(engine.threads),
            *_nothing_sampled(sample, sampling),
            *engine.new_notices(),
        ],
        "samples_ms": [float(ms) for ms in wall_ms],
    }


def _without_index(memory: dict[str, int]) -> dict[str, int]:
    """Exact attention alone: the tables that stand beside it, for the other mode, are not its own."""
    return {**memory, "index_bytes": 0, "rss_bytes": memory["rss_bytes"] - memory["index_bytes"]}


def _nothing_sampled(sample: Samples, sampling: bool) -> list[str]:
    if sampling and not any(step.offloaded for step in sample.steps):
        return ["nothing was sampled: so short a context is attended exactly"]
    return []


def _errors(errors: list[np.ndarray]) -> dict[str, float] | None:
    """Percentiles of ‖õ − o‖ / ‖o‖ over layers, steps and query heads, and the scalar of CLI.md, "error"."""
    if not errors:
        return None
    by_layer = np.concatenate(errors, axis=1)  # [sampled layers, steps · B · H]
    p50, p90 = np.percentile(by_layer, [50, 90])
    rms = np.sqrt(np.square(by_layer).mean(axis=1)).mean()
    return {"p50": float(p50), "p90": float(p90), "rms": float(rms)}


def _estimate(steps: list[StepStats]) -> float | None:
    """The samplers' own estimate of the error: RMS over heads and steps, averaged over sampled layers."""
    by_layer: dict[int, list[float]] = {}
    for step in steps:
        for layer, square in step.squares.items():
            by_layer.setdefault(layer, []).append(square)
    return mean_of_roots(float(np.mean(squares)) for squares in by_layer.values())


def _sampled_ratio(steps: list[StepStats], layers: int) -> Row:
    """Sampled ratio over all steps and layers, its spread over steps, and by layer (None: not a sampled layer)."""
    ratios = [step.sampled_ratio for step in steps if step.sampled_ratio is not None]
    if not ratios:
        return {"mean": None, "p5": None, "p95": None, "per_layer": [None] * layers}
    sampled: dict[int, int] = {}
    offloaded: dict[int, int] = {}
    for step in steps:
        for layer, count in step.sampled.items():
            sampled[layer] = sampled.get(layer, 0) + count
            offloaded[layer] = offloaded.get(layer, 0) + step.offloaded[layer]
    p5, p95 = np.percentile(ratios, [5, 95])
    return {
        "mean": sum(sampled.values()) / sum(offloaded.values()),
        "p5": float(p5),
        "p95": float(p95),
        "per_layer": [sampled[layer] / offloaded[layer] if layer in sampled else None for layer in range(layers)],
    }
