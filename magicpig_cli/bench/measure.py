"""Timed decode steps of several modes over the same filled contexts, interleaved, as rows of figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from magicpig_cli.bench.fill import Fill, build_index, duplicate, fill
from magicpig_cli.bench.launch import launch_ms
from magicpig_cli.bench.rows import Case, Row, rows
from magicpig_cli.bench.samples import Samples
from magicpig_cli.cache.sequence import Sequence, index_bytes
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.step import Step
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.events import StepStats, Working

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


@dataclass(frozen=True, slots=True)
class BenchStep:
    """One measured step: of which context and batch size, which mode, and which of how many repetitions (from 1)."""

    context: int
    batch: int
    mode: str
    rep: int
    reps: int
    stats: StepStats


def run_bench(engine: Engine, request: BenchRequest) -> Iterator[Working | BenchStep | Row]:
    """Yields progress, measured steps, and a row for each (context, batch size, mode), as in CLI.md's bench JSON.

    Raises MemoryBudgetError where memory runs out; rows that were yielded before stand.
    """
    for context in request.contexts:
        with _memory_told(context, 1):
            first = engine.new_sequence()
            filled = yield from fill(engine, first, context - request.gen_tokens, request.fill)
        sequences = {mode: [first] if mode in ("exact", engine.plan.mode) else [] for mode in request.modes}
        duplicates = [first]
        for batch in sorted(request.batch_sizes):
            with _memory_told(context, batch):
                while len(duplicates) < batch:
                    duplicates.append(duplicate(engine, first))
                for mode, own in sequences.items():
                    _provide(engine, mode, own, duplicates, filled)
                samples = {mode: Samples() for mode in request.modes}
                yield from _measure(engine, request, context, sequences, samples)
            yield from rows(engine, Case(context, batch, filled, launch_ms(engine.runner, batch)), samples)
        del first, sequences, duplicates  # before the next context is filled


def _provide(engine: Engine, mode: str, own: list[Sequence], duplicates: list[Sequence], filled: Fill) -> None:
    """As many sequences for a mode as there are: themselves, or forks, as a sequence has one index at a time."""
    for sequence in duplicates[len(own) :]:
        if mode in ("exact", engine.plan.mode):
            own.append(sequence)
        else:
            own.append(engine.fork(sequence))
            build_index(engine, own[-1], mode, filled)


@contextmanager
def _memory_told(context: int, batch: int) -> Iterator[None]:
    """Say where memory ran out. On a CPU torch raises a plain RuntimeError for it."""
    try:
        yield
    except (MemoryError, RuntimeError) as problem:
        known = isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(problem)
        if not known:
            raise
        raise MemoryBudgetError(
            f"memory ran out at a context of {context:,} tokens and batch size {batch}: "
            f"{str(problem) or type(problem).__name__}",
            hint="a smaller --context or --batch-size",
        ) from problem


def _measure(
    engine: Engine, request: BenchRequest, context: int, sequences: dict[str, list[Sequence]],
    samples: dict[str, Samples],
) -> Iterator[Working | BenchStep]:  # fmt: skip
    """Warm up, then repetitions with the modes taking turns; every one starts from the same fill."""
    length, batch = next(iter(sequences.values()))[0].length, len(next(iter(sequences.values())))
    for _ in range(request.warmup):
        for mode, own in sequences.items():
            list(_generate(engine, own, mode, min(WARMUP_TOKENS, request.gen_tokens)))
            _rewind(own, length)
    for rep in range(request.reps):
        for number, (mode, sample) in enumerate(samples.items()):
            yield Working("measuring", rep * len(samples) + number, request.reps * len(samples))
            with sample.repetition() as timed:
                for step in _generate(engine, sequences[mode], mode, request.gen_tokens):
                    timed.append(step.stats)
                    yield BenchStep(context, batch, mode, rep + 1, request.reps, step.stats)
            sample.memory = _memory(engine, sequences[mode])
            _rewind(sequences[mode], length)
    for mode, sample in samples.items():
        if mode != "exact":
            steps = _generate(engine, sequences[mode], mode, min(ERROR_STEPS, request.gen_tokens), measure_error=True)
            per_layer = batch * engine.shape.heads
            sample.errors = [step.errors.view(-1, per_layer).numpy() for step in steps if step.errors is not None]
            _rewind(sequences[mode], length)


def _memory(engine: Engine, own: list[Sequence]) -> dict[str, int]:
    """What a run would hold that has these sequences alone: forks for other modes and their indexes are left out."""
    everything = engine.memory()
    mine = {"kv_bytes": sum(sequence.kv_bytes for sequence in own), "index_bytes": index_bytes(own)}
    others = sum(everything[name] - size for name, size in mine.items())
    return {**everything, **mine, "rss_bytes": everything["rss_bytes"] - others}


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
