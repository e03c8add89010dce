"""Continuous batching: answers join when a slot and memory are free, decode together, and leave when they end.

    request ──> opened (memory promised) ──> reading (chunks of its prompt) ──> running (decode steps) ──> finished
       └── put back: memory ran out ──┘                                            │

Between two decode steps prompts are read for a bounded time, so that running answers keep moving. Into which chunks a
prompt is cut depends on the prompt alone: neither neighbours nor times change an answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from magicpig_cli.engine.answer import Answer, Request
from magicpig_cli.engine.conversation import common_prefix
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.engine.sampling import TokenSampler
from magicpig_cli.engine.text import TextStream
from magicpig_cli.errors import MagicpigError, MemoryBudgetError
from magicpig_cli.events import (
    Event,
    Failed,
    PrefillProgress,
    Requeued,
    TokenEvent,
    WaitingForMemory,
)
from magicpig_cli.kernels.memory import give_back_freed
from magicpig_cli.planner.memory import sequence_parts, too_large, written_out

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine

MEMORY_WAIT_S = 60.0  # for which a request waits for memory that other programs have taken
_WAIT_STEP_S = 0.5


def _failed(request: Request, error: MagicpigError) -> Failed:
    return Failed(request.key, type(error).__name__, error.message, error.hint)


def _out_of_memory(error: BaseException) -> bool:
    """torch's allocator for CPUs says so in words only."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


class Scheduler:
    """Drives one `Engine.generate` call."""

    def __init__(self, engine: Engine, requests: Iterable[Request], batch_size: int, max_delay_s: float) -> None:
        self._engine = engine
        self._requests = iter(requests)
        self._put_back: deque[Request] = deque()
        self._batch_size = batch_size
        self._slots = batch_size  # fewer after memory ran out
        self._smooth = 0  # answers that have ended since then
        self._max_delay_s = max_delay_s
        self._reading: Answer | None = None
        self._running: list[Answer] = []  # the oldest first
        self._waiting_since: float | None = None
        self._prefixes: set[SharedPrefix] = set()  # that have been read

    def run(self) -> Iterator[Event]:
        try:
            while True:
                yield from self._fill()
                if self._running:
                    yield from self._step()
                elif self._reading is None and not self._put_back:
                    return
        finally:
            for answer in self._opened():
                answer.close()
            for prefix in self._prefixes:
                prefix.forget()

    def _opened(self) -> list[Answer]:
        return self._running + ([self._reading] if self._reading else [])

    # --- joining ---

    def _fill(self) -> Iterator[Event]:
        """Read prompts while slots are free, for as long as running answers may wait; at least one chunk."""
        since = time.perf_counter()
        while True:
            if self._reading is None:
                yield from self._admit()
            if self._reading is None:
                return
            nobody_waits, begin = not self._running, time.perf_counter()
            yield from self._read_chunk(self._reading)
            now = time.perf_counter()
            if nobody_waits:
                since = now
            if self._running and (now - since) + (now - begin) > self._max_delay_s:
                return

    def _admit(self) -> Iterator[Event]:
        """Open the next request if a slot and memory are free. One that cannot run yields Failed."""
        while len(self._running) < self._slots:
            request = self._put_back.popleft() if self._put_back else next(self._requests, None)
            if request is None:
                return
            try:
                self._engine.check_fits(len(request.prompt_ids), None)
                answer = self._open(request)
                short = self._short_of_memory(answer)
            except MagicpigError as error:
                yield from self._fail(request, error)
                continue
            if short is None:
                self._waiting_since = None
                self._reading = answer
                yield PrefillProgress(answer.key, answer.read_before, len(request.prompt_ids), 0.0)
                return
            self._put_back.appendleft(request)
            if self._running:
                return
            yield short
            time.sleep(_WAIT_STEP_S)

    def _open(self, request: Request) -> Answer:
        engine, prompt = self._engine, request.prompt_ids
        limit = min(request.sampling.max_tokens, engine.context - len(prompt))
        reused = 0
        if request.sequence is not None:
            # The last prompt token is always run again: its logits give the first token of the answer.
            reused = min(common_prefix(request.sequence.ids, prompt), len(prompt) - 1)
            request.sequence.truncate(reused)
        elif request.prefix is not None:
            reused = request.prefix.tokens
        answer = Answer(
            request, limit, reused, TokenSampler(request.sampling, prompt, request.default_seed),
            TextStream(engine.tokenizer, request.sampling.stop), time.perf_counter(), request.sequence,
        )  # fmt: skip
        answer.reading = self._read(answer)
        return answer

    def _short_of_memory(self, answer: Answer) -> WaitingForMemory | None:
        """What there is too little of for this answer to begin. Raises MemoryBudgetError if waiting is of no use."""
        need, left = self._engine.admission.need_and_left(answer, self._opened(), self._prefixes)
        if need <= left:
            return None
        now = time.monotonic()
        if not self._running:
            self._waiting_since = self._waiting_since or now
            if need > self._engine.plan.budget_bytes or now - self._waiting_since > MEMORY_WAIT_S:
                self._waiting_since = None
                raise MemoryBudgetError(
                    too_large(self._engine.plan, answer.longest, max(0, left)),
                    hint="close other programs, or allow shorter answers (--max-tokens)",
                )
        return WaitingForMemory(answer.key, need, max(0, left))

    # --- reading prompts ---

    def _read(self, answer: Answer) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Chunk by chunk: (prompt tokens done, logits [V] once they are the prompt's last)."""
        prompt, prefix = answer.request.prompt_ids, answer.request.prefix
        if prefix is not None:
            for part in reversed(list(prefix.chain())):
                if part.sequence is None:
                    for done in self._read_prefix(part, prompt):
                        yield done, None
            assert prefix.sequence is not None
            answer.sequence = self._engine.fork(prefix.sequence)
        elif answer.sequence is None:
            answer.sequence = self._engine.new_sequence()
        for done, logits in self._engine.runner.prefill(answer.sequence, prompt[answer.reused :]):
            yield answer.reused + done, logits

    def _read_prefix(self, prefix: SharedPrefix, prompt: list[int]) -> Iterator[int]:
        """Make the sequence of a prefix whose parent has one. Yields how many tokens are done."""
        parent = prefix.parent
        begin = parent.tokens if parent else 0
        sequence = self._engine.new_sequence()
        if parent is not None:
            assert parent.sequence is not None
            sequence = self._engine.fork(parent.sequence)
        try:
            for done, _ in self._engine.runner.prefill(sequence, prompt[begin : prefix.tokens]):
                yield begin + done
        except BaseException:
            sequence.release()
            raise
        prefix.sequence = sequence
        self._prefixes.add(prefix)

    def _read_chunk(self, answer: Answer) -> Iterator[Event]:
        """One chunk of a prompt; after the last one the answer runs."""
        assert answer.reading is not None
        total = len(answer.request.prompt_ids)
        try:
            done, logits = next(answer.reading)
        except MagicpigError as error:
            yield from self._drop(answer, error)
            return
        except (MemoryError, RuntimeError) as error:
            yield from self._run_out(error)
            return
        answer.read_s = time.perf_counter() - answer.started
        yield PrefillProgress(answer.key, done, total, answer.read_s)
        if self._engine.take_cancelled(answer.key):
            answer.finish = "interrupted"  # the caller's sequence keeps what was read: asked again, that is reused
        elif done == total:
            assert logits is not None, "the last chunk has logits"
            yield from self._try_take(answer, logits)
            answer.ttft_s = time.perf_counter() - answer.started
            if self._reading is answer:
                self._reading = None
                self._running.append(answer)
        yield from self._retire()

    # --- decoding ---

    def _step(self) -> Iterator[Event]:
        """One decode step of all running answers."""
        answers = list(self._running)
        try:
            step = self._engine.runner.decode([a.rows for a in answers], [a.tokens[-1] for a in answers])
        except (MemoryError, RuntimeError) as error:
            yield from self._run_out(error)
            return
        yield step.stats
        for row, answer in enumerate(answers):
            answer.note(step, row)
            yield from self._try_take(answer, step.logits[row])
            if answer.finish is None and self._engine.take_cancelled(answer.key):
                answer.finish = "interrupted"
        yield from self._retire()

    def _try_take(self, answer: Answer, logits: torch.Tensor) -> Iterator[Event]:
        """Take the next token. An answer whose logits cannot be used fails alone."""
        try:
            yield self._take(answer, logits)
        except MagicpigError as error:
            yield from self._drop(answer, error)

    def _take(self, answer: Answer, logits: torch.Tensor) -> TokenEvent:
        """Sample the next token from logits [V], and see whether it ends the answer."""
        token = answer.sampler.pick(logits)
        answer.tokens.append(token)
        stop = token in self._engine.codec.stop_ids
        text = "" if stop else answer.stream.push(token)
        if stop or answer.stream.stopped:
            answer.finish = "stop"
        elif len(answer.tokens) >= answer.limit:
            answer.finish = "length"
        return TokenEvent(answer.key, token, text)

    # --- leaving ---

    def _retire(self) -> Iterator[Event]:
        """Report finished answers and free their slots."""
        for answer in [answer for answer in self._opened() if answer.finish]:
            self._close(answer)
            self._smooth += 1
            if self._smooth >= self._slots < self._batch_size:
                self._slots, self._smooth = self._slots + 1, 0
            self._leave(answer.request)
            yield answer.finished()

    def _drop(self, answer: Answer, error: MagicpigError) -> Iterator[Event]:
        """An opened answer that cannot go on."""
        self._close(answer)
        yield from self._fail(answer.request, error)

    def _fail(self, request: Request, error: MagicpigError) -> Iterator[Event]:
        self._leave(request)
        yield _failed(request, error)

    def _close(self, answer: Answer) -> None:
        """Take it out and free what it holds."""
        if answer is self._reading:
            self._reading = None
        else:
            self._running.remove(answer)
        answer.close()

    def _leave(self, request: Request) -> None:
        """A request has ended, well or not; nobody may need its prefix any more."""
        if request.prefix is not None:
            request.prefix.release()
            self._prefixes = {prefix for prefix in self._prefixes if prefix.sequence is not None}

    def _run_out(self, error: MemoryError | RuntimeError) -> Iterator[Event]:
        """Memory ran out: take the youngest answer back and go on with fewer slots. One that is alone fails.

        Other errors are raised again. The sequences are as they were before the forward.
        """
        if not _out_of_memory(error):
            raise error
        youngest, *others = reversed(self._opened())
        if not others or youngest.request.sequence is not None:
            parts = written_out(sequence_parts(self._engine.plan, youngest.longest))
            failure = MemoryBudgetError(
                f"memory ran out with {youngest.longest:,} tokens planned: {parts}",
                hint="close other programs, a shorter -c or lower --max-tokens, or --kv-dtype int8",
            )
            yield from self._drop(youngest, failure)
            return
        self._close(youngest)
        give_back_freed()
        self._put_back.appendleft(youngest.request)
        self._slots, self._smooth = len(others), 0
        yield Requeued(youngest.key, self._slots)
