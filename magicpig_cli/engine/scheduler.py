"""Several answers at once: prefill a request when a slot is free, decode all running ones together, emit events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.conversation import common_prefix
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.engine.sampling import SamplingParams, TokenSampler
from magicpig_cli.engine.text import TextStream
from magicpig_cli.errors import MagicpigError
from magicpig_cli.events import Event, Failed, Finished, FinishReason, PrefillProgress, Timing, TokenEvent

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine


@dataclass(frozen=True)
class Request:
    """One answer wanted. `sequence`: continue that cache, reusing the longest common prefix with `prompt_ids`.

    prefix: what it has in common with other requests; shorter than the prompt. Not together with `sequence`.
    """

    key: str
    prompt_ids: list[int]
    sampling: SamplingParams
    default_seed: int | None = None  # seed of token sampling where the request names none; None = drawn
    sequence: Sequence | None = None
    prefix: SharedPrefix | None = None


@dataclass
class _Answer:
    """One running request."""

    request: Request
    sequence: Sequence
    sampler: TokenSampler
    stream: TextStream
    limit: int  # tokens it may still be given in all
    reused: int
    started: float
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    sampled: int = 0
    offloaded: int = 0
    finish: FinishReason | None = None

    def finished(self, tail: str) -> Finished:
        assert self.finish is not None
        return Finished(
            key=self.request.key,
            reason=self.finish,
            token_ids=tuple(self.tokens),
            text=self.stream.text,
            tail=tail,
            prompt_tokens=len(self.request.prompt_ids),
            reused_tokens=self.reused,
            timing=Timing(self.prefill_s, self.ttft_s, tuple(self.tpot_ms)),
            sampled=self.sampled,
            offloaded=self.offloaded,
            seed=self.sampler.seed,
        )


def _failed(request: Request, error: MagicpigError) -> Failed:
    return Failed(request.key, type(error).__name__, error.message, error.hint)


class Scheduler:
    """Drives one `Engine.generate` call."""

    def __init__(self, engine: Engine, requests: Iterable[Request], batch_size: int) -> None:
        self._engine = engine
        self._requests = iter(requests)
        self._batch_size = batch_size
        self._running: list[_Answer] = []

    def run(self) -> Iterator[Event]:
        while True:
            yield from self._admit()
            yield from self._retire()
            if not self._running:
                return
            yield from self._step()
            yield from self._retire()

    def _admit(self) -> Iterator[Event]:
        """Prefill waiting requests until every slot is taken or none waits. A request that cannot run yields Failed."""
        while len(self._running) < self._batch_size:
            request = next(self._requests, None)
            if request is None:
                return
            try:
                answer = self._open(request)
                yield from self._prefill(answer)
            except MagicpigError as error:
                yield _failed(request, error)
            else:
                self._running.append(answer)
                yield from self._retire()

    def _open(self, request: Request) -> _Answer:
        engine = self._engine
        engine.check_fits(len(request.prompt_ids), None)
        sequence = request.sequence if request.sequence is not None else engine.new_sequence()
        # The last prompt token is always run again: its logits give the first token of the answer.
        reused = min(common_prefix(sequence.ids, request.prompt_ids), len(request.prompt_ids) - 1)
        sequence.truncate(reused)
        return _Answer(
            request=request,
            sequence=sequence,
            sampler=TokenSampler(request.sampling, request.prompt_ids, request.default_seed),
            stream=TextStream(engine.tokenizer, request.sampling.stop),
            limit=min(request.sampling.max_tokens, engine.context - len(request.prompt_ids)),
            reused=reused,
            started=time.perf_counter(),
        )

    def _prefill(self, answer: _Answer) -> Iterator[Event]:
        request = answer.request
        total = len(request.prompt_ids)
        last: torch.Tensor | None = None
        yield PrefillProgress(request.key, answer.reused, total, 0.0)
        for done, logits in self._engine.runner.prefill(answer.sequence, request.prompt_ids[answer.reused :]):
            last = logits
            answer.prefill_s = time.perf_counter() - answer.started
            yield PrefillProgress(request.key, answer.reused + done, total, answer.prefill_s)
            if self._engine.take_cancelled(request.key):
                answer.sequence.truncate(answer.reused)
                answer.finish = "interrupted"
                return
        assert last is not None, "a prompt has at least one token"
        first = self._take(answer, last)
        answer.ttft_s = time.perf_counter() - answer.started
        yield first

    def _take(self, answer: _Answer, logits: torch.Tensor) -> TokenEvent:
        """Sample the next token from logits [V], and see whether it ends the answer."""
        token = answer.sampler.pick(logits)
        answer.tokens.append(token)
        stop = token in self._engine.codec.stop_ids
        text = "" if stop else answer.stream.push(token)
        if stop or answer.stream.stopped:
            answer.finish = "stop"
        elif len(answer.tokens) >= answer.limit:
            answer.finish = "length"
        return TokenEvent(answer.request.key, token, text)

    def _step(self) -> Iterator[Event]:
        """One decode step of all running answers. One whose logits cannot be used fails alone."""
        answers = list(self._running)
        step = self._engine.runner.decode([a.sequence for a in answers], [a.tokens[-1] for a in answers])
        yield step.stats
        for row, answer in enumerate(answers):
            answer.tpot_ms.append(step.stats.wall_ms)
            answer.sampled += step.sampled[row]
            answer.offloaded += step.offloaded[row]
            try:
                yield self._take(answer, step.logits[row])
            except MagicpigError as error:
                self._running.remove(answer)
                yield _failed(answer.request, error)
                continue
            if answer.finish is None and self._engine.take_cancelled(answer.request.key):
                answer.finish = "interrupted"

    def _retire(self) -> Iterator[Event]:
        """Report finished answers and free their slots."""
        done = [answer for answer in self._running if answer.finish]
        self._running = [answer for answer in self._running if not answer.finish]
        for answer in done:
            yield answer.finished(answer.stream.finish())
