"""The work itself: every text is read once, exactly; each mode and hash seed then answers from a fork of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.corpus import repeat_ids
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.identity import sampler_of
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.errors import ContextError
from magicpig_cli.evals.answers import answer
from magicpig_cli.evals.continuation import Continuation
from magicpig_cli.evals.modes import EXACT, Mode, runner
from magicpig_cli.evals.suite import TASKS, TEACHER_FORCED
from magicpig_cli.evals.tasks import Sample, make_sample
from magicpig_cli.evals.texts import SYNTHETIC, Text
from magicpig_cli.evals.units import Kept, Record, Unit
from magicpig_cli.events import Working
from magicpig_cli.planner import Plan

CONTINUATION = "continuation"  # one pass over the text gives what `ppl` and `kl` report
_EDITION = 1  # of prompts and records: what an older one has kept is not used again
_LEAST_READ = 1  # tokens before the first teacher-forced one

Progress = Iterator[Working]


@dataclass(frozen=True, slots=True)
class Request:
    """What to evaluate. A context includes the answer."""

    tasks: tuple[str, ...]
    texts: tuple[Text, ...]
    contexts: tuple[int, ...]
    modes: tuple[Mode, ...]  # exact attention first
    plans: Mapping[Mode, Plan]  # of the samplers
    samples: int = 20  # questions of each task
    hash_seeds: int = 1
    seed: int = 0  # of tasks
    positions: int = 128  # teacher-forced tokens of each text


@dataclass(frozen=True, slots=True)
class Job:
    """One text to read, and the units that do something with it."""

    task: str
    text: Text | None
    context: int
    sample: int
    units: tuple[Unit, ...]

    @property
    def label(self) -> str:
        """For people."""
        where = f" in {self.text.name}" if self.text is not None else ""
        return f"{self.task}{where}, {self.context:,} tokens" + (f", text {self.sample + 1}" if self.sample else "")


def jobs(request: Request, first_hash_seed: int) -> list[Job]:
    """All work of a request, in the order in which it is done and reported."""
    found = []
    for context in request.contexts:
        for task in request.tasks:
            if task in TEACHER_FORCED:
                if task == next(name for name in request.tasks if name in TEACHER_FORCED):
                    found += [_job(request, CONTINUATION, text, context, 0, first_hash_seed) for text in request.texts]
                continue
            numbers = range(-(-request.samples // TASKS[task].questions))
            for text in request.texts if TASKS[task].uses_text else (None,):
                found += [_job(request, task, text, context, number, first_hash_seed) for number in numbers]
    return found


def _job(request: Request, task: str, text: Text | None, context: int, sample: int, first_hash_seed: int) -> Job:
    name = SYNTHETIC if text is None else text.name
    units = tuple(
        Unit(task, name, context, sample, mode, seed)
        for mode in request.modes
        for seed in mode.seeds(first_hash_seed, request.hash_seeds)
    )
    return Job(task, text, context, sample, units)


def _told(unit: Unit) -> str:
    return f"{unit.mode.label}, hash seed {unit.hash_seed}" if unit.mode.seeds(0, 2)[1:] else unit.mode.label


class Evaluation:
    """Runs a request; what `kept` has of it already is not done again."""

    def __init__(self, engine: Engine, request: Request, kept: Kept) -> None:
        self._engine, self._request, self._kept = engine, request, kept
        self.jobs = jobs(request, engine.settings.attention.hash_seed)
        self._keys = {unit: unit.key(self._about(job, unit)) for job in self.jobs for unit in job.units}
        self.total = len(self._keys)

    @property
    def done(self) -> int:
        """Units that are finished."""
        return sum(self._kept.get(key) is not None for key in self._keys.values())

    def results(self) -> list[tuple[Unit, Record]]:
        """Finished units with their records, in order."""
        found = ((unit, self._kept.get(key)) for unit, key in self._keys.items())
        return [(unit, record) for unit, record in found if record is not None]

    def check(self) -> None:
        """Raise ContextError, before anything is read, for a context that is too short for a task."""
        for job in self.jobs:
            if job.task == CONTINUATION:
                least = self._request.positions + 1 + _LEAST_READ
                if job.context < least:
                    raise ContextError(
                        f"{self._request.positions} positions need a context of {least:,} tokens or more, and "
                        f"{job.context:,} were asked for",
                        hint=f"-c {least}, or fewer --positions",
                    )
            elif job.sample == 0:
                self._sample(job)

    def run(self) -> Progress:
        """Do what is missing. Ended at any moment, what was finished is kept."""
        for job in self.jobs:
            missing = [unit for unit in job.units if self._kept.get(self._keys[unit]) is None]
            if missing:
                yield from self._continue(job, missing) if job.task == CONTINUATION else self._answer(job, missing)

    def _about(self, job: Job, unit: Unit) -> dict[str, Any]:
        """What decides a unit's outcome beside the unit itself."""
        engine, plan = self._engine, self._request.plans.get(unit.mode)
        shares = {} if plan is None else dict(plan.deciding_shares)
        return {
            "edition": _EDITION,
            "model": {key: value for key, value in engine.identity.items() if key != "context"},
            "device": engine.device,
            "window": (engine.plan.sink, engine.plan.local, engine.plan.flush),
            "dense_layers": None if unit.mode.name == EXACT else engine.plan.dense_layers,
            # As planned: what nobody typed is the profile's, and may be another one's next time.
            "sampler": None if plan is None else (sampler_of(plan, unit.hash_seed), plan.sampler_options),
            **({"head_shares": shares} if shares else {}),
            "text": None if job.text is None else job.text.digest,
            "seed": None if job.task == CONTINUATION else self._request.seed,
            "positions": self._request.positions if job.task == CONTINUATION else None,
        }

    def _sample(self, job: Job) -> Sample:
        text = job.text or self._request.texts[0]
        return make_sample(
            self._engine.codec, TASKS[job.task], text, job.context, self._request.seed, job.sample
        )  # fmt: skip

    def _answer(self, job: Job, missing: list[Unit]) -> Progress:
        sample = self._sample(job)
        shared = yield from self._read(job, sample.shared)
        for unit in missing:
            yield self._working(f"{job.label}: {_told(unit)}")
            self._keep(unit, answer(self._engine.codec, self._runner(unit), unit.mode.name, shared, sample))
        shared.release()

    def _continue(self, job: Job, missing: list[Unit]) -> Progress:
        assert job.text is not None
        count = self._request.positions + 1
        ids = repeat_ids(self._engine.codec.encode_raw(job.text.content), job.context)
        read = yield from self._read(job, ids[:-count])
        continuation = Continuation(self._engine.runner, read, ids[-count:])
        yield from (self._working(f"{job.label}: exact") for _ in continuation.exact())
        for unit in missing:
            steps = continuation.run(self._runner(unit), unit.mode.name)
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    self._keep(unit, end.value)
                    break
                yield self._working(f"{job.label}: {_told(unit)}")
        read.release()

    def _read(self, job: Job, ids: list[int]) -> Generator[Working, None, Sequence]:
        """A sequence that has read these tokens exactly; it has no index."""
        sequence = self._engine.new_sequence()
        for done, _ in self._engine.runner.prefill(sequence, ids, EXACT):
            yield self._working(f"{job.label}: read {done:,}")
        return sequence

    def _runner(self, unit: Unit) -> ModelRunner:
        return runner(self._engine, unit.mode, self._request.plans, unit.hash_seed)

    def _keep(self, unit: Unit, record: Record) -> None:
        self._kept.add(self._keys[unit], unit, record)

    def _working(self, what: str) -> Working:
        return Working(what, self.done, self.total)
