"""Timed decode steps of several modes over the same filled contexts, interleaved, as rows of figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from magicpig_cli.bench.fill import BenchProgress, Fill, duplicate, fill
from magicpig_cli.bench.predicted import predicted
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.runner import Step
from magicpig_cli.events import STAGES, StepStats

Row = dict[str, Any]  # one of the `rows` of CLI.md's bench JSON
WARMUP_TOKENS = 4
ERROR_STEPS = 8  # extra steps, not timed, that also compute the exact result


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to measure. Each context includes the generated tokens."""

    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = ("exact", "lsh")
    gen_tokens: int = 128
    reps: int = 5
    warmup: int = 1
    fill: str = "auto"


@dataclass
class _Samples:
    """Everything measured of one mode at one context and batch size."""

    steps: list[StepStats] = field(default_factory=list)
    errors: list[np.ndarray] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)


def run_bench(engine: Engine, request: BenchRequest) -> Iterator[BenchProgress | Row]:
    """Yields progress, and for each (context, batch size, mode) a dict: a row of CLI.md's bench JSON."""
    for context in request.contexts:
        first = engine.new_sequence()
        filled = yield from fill(engine, first, context - request.gen_tokens, request.fill)
        sequences = [first]
        for batch in sorted(request.batch_sizes):
            while len(sequences) < batch:
                sequences.append(duplicate(engine, first))
            samples = {mode: _Samples() for mode in request.modes}
            yield from _measure(engine, request, sequences[:batch], samples)
            for row in _rows(engine, context, batch, filled, samples):
                expected = predicted(engine.plan, row["mode"], context, batch, request.gen_tokens)
                yield {**row, "predicted": expected}
        del first, sequences  # before the next context is filled


def _measure(
    engine: Engine, request: BenchRequest, sequences: list[Sequence], samples: dict[str, _Samples]
) -> Iterator[BenchProgress]:
    """Warm up, then repetitions with the modes taking turns; every one starts from the same fill."""
    length = sequences[0].length
    for _ in range(request.warmup):
        for mode in request.modes:
            list(_generate(engine, sequences, mode, min(WARMUP_TOKENS, request.gen_tokens)))
            _rewind(sequences, length)
    for rep in range(request.reps):
        for number, (mode, sample) in enumerate(samples.items()):
            yield BenchProgress("measuring", rep * len(samples) + number, request.reps * len(samples))
            sample.steps += [step.stats for step in _generate(engine, sequences, mode, request.gen_tokens)]
            sample.memory = engine.memory()
            _rewind(sequences, length)
    for mode, sample in samples.items():
        if mode != "exact":
            steps = _generate(engine, sequences, mode, min(ERROR_STEPS, request.gen_tokens), measure_error=True)
            sample.errors = [step.errors.numpy() for step in steps if step.errors is not None]
            _rewind(sequences, length)


def _generate(
    engine: Engine, sequences: list[Sequence], mode: str, count: int, measure_error: bool = False
) -> Iterator[Step]:
    """`count` greedy decode steps after the fill. Index building counts as filling, not as decoding."""
    for sequence in sequences:
        engine.runner.build_index(sequence, mode)
    tokens = [sequence.ids[-1] for sequence in sequences]
    for _ in range(count):
        step = engine.runner.decode(sequences, tokens, mode, measure_error)
        tokens = step.logits.argmax(dim=-1).tolist()
        yield step


def _rewind(sequences: list[Sequence], length: int) -> None:
    for sequence in sequences:
        sequence.truncate(length)


def _rows(engine: Engine, context: int, batch: int, filled: Fill, samples: dict[str, _Samples]) -> Iterator[Row]:
    exact = samples.get("exact")
    baseline = float(np.median([step.wall_ms for step in exact.steps])) if exact else None
    for mode, sample in samples.items():
        yield _row(engine, context, batch, filled, mode, sample, baseline)


def _row(
    engine: Engine, context: int, batch: int, filled: Fill, mode: str, sample: _Samples, baseline: float | None
) -> Row:
    sampling = mode != "exact"
    wall_ms = np.array([step.wall_ms for step in sample.steps])
    p50, p90, p99 = np.percentile(wall_ms, [50, 90, 99])
    errors = np.concatenate([e.ravel() for e in sample.errors]) if sample.errors else None
    memory = sample.memory
    return {
        "mode": mode,
        "context": context,
        "batch": batch,
        "fill": filled.kind,
        "fill_fresh_positions": filled.fresh_positions,
        "beyond_model_context": context > engine.shape.context,
        "K": engine.plan.K if sampling else None,
        "L": engine.plan.L if sampling else None,
        "sampled_ratio": _sampled_ratio(sample.steps) if sampling else None,
        "tpot_ms": {
            "mean": float(wall_ms.mean()), "std": float(wall_ms.std()),
            "p50": float(p50), "p90": float(p90), "p99": float(p99),
        },
        "decode_tok_s": float(batch * 1000 / wall_ms.mean()),
        "prefill_tok_s": filled.prefill_tok_s,
        "ttft_s": filled.prefill_s if filled.kind == "real" else None,
        "stages_ms": {
            stage: float(np.mean([step.stages_ms[stage] for step in sample.steps])) for stage in STAGES
        },
        "memory": memory if sampling else {**memory, "index_bytes": 0},
        "attn_error": None if errors is None
        else {"p50": float(np.percentile(errors, 50)), "p90": float(np.percentile(errors, 90))},
        "speedup_vs_exact": None if baseline is None else baseline / float(p50),
        "samples_ms": [float(ms) for ms in wall_ms],
    }  # fmt: skip


def _sampled_ratio(steps: list[StepStats]) -> Row:
    """Sampled ratio over all steps and layers, its spread over steps, and by layer (None: not a sampled layer)."""
    ratios = [step.sampled_ratio for step in steps if step.sampled_ratio is not None]
    if not ratios:
        return {"mean": None, "p5": None, "p95": None, "per_layer": []}
    sampled: dict[int, int] = {}
    offloaded: dict[int, int] = {}
    for step in steps:
        for layer, count in step.sampled.items():
            sampled[layer] = sampled.get(layer, 0) + count
            offloaded[layer] = offloaded.get(layer, 0) + step.offloaded[layer]
    per_layer = [sampled[i] / offloaded[i] if i in sampled else None for i in range(max(sampled) + 1)]
    p5, p95 = np.percentile(ratios, [5, 95])
    return {
        "mean": sum(sampled.values()) / sum(offloaded.values()),
        "p5": float(p5),
        "p95": float(p95),
        "per_layer": per_layer,
    }
