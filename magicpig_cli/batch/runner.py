"""Good lines through the engine, several at a time, and records out. Yields its state after every engine event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from magicpig_cli.batch.check import Checked, Entry
from magicpig_cli.batch.line import BadLine, LineError, parse_line
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.records import answer_record, error_record
from magicpig_cli.batch.request import INSUFFICIENT_MEMORY, RequestMaker
from magicpig_cli.batch.resume import NOTHING_KEPT, Kept
from magicpig_cli.batch.sharing import Prefixes, prompt_hash
from magicpig_cli.batch.writer import Output
from magicpig_cli.config import MAX_DELAY_S
from magicpig_cli.errors import MagicpigError, MemoryBudgetError
from magicpig_cli.events import Event, Failed, Finished, PrefillProgress, Requeued, StepStats

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine, Request
    from magicpig_cli.engine.prefix import SharedPrefix

INPUT_CHANGED, FAILED = "input_changed", "request_failed"


@dataclass
class Progress:
    """Where a run stands. Records that wait for their turn (`--ordered`) count when they are written."""

    total: int
    ok: int = 0
    failed: int = 0  # those that an earlier run has left among them
    skipped: int = 0  # answered by an earlier run
    prompt_tokens: int = 0  # of answered lines
    completion_tokens: int = 0
    decode_tokens: int = 0  # by decode steps; the first token of an answer comes from its prompt
    decode_s: float = 0.0
    reading: tuple[int, int] | None = None  # prompt tokens done and in all, while one is read
    event: Event | None = None  # what the engine said last

    @property
    def done(self) -> int:
        return self.ok + self.failed + self.skipped

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second of all sequences together, while decoding."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of one line."""

    record: dict[str, Any]
    finished: Finished | None


class BatchRunner:
    """One run over a checked input. `stop` is asked between events; once it says yes the run ends there."""

    def __init__(
        self, source: JsonlSource, checked: Checked, maker: RequestMaker, output: Output, *, ordered: bool,
        stop: Callable[[], bool], kept: Kept = NOTHING_KEPT,
    ) -> None:  # fmt: skip
        self.progress = Progress(checked.total, failed=kept.failed, skipped=kept.answered)
        self._source = source
        self._checked = checked
        self._maker = maker
        self._output = output
        self._ordered = ordered
        self._stop = stop
        self._kept = kept
        self._running: dict[str, tuple[Entry, str]] = {}  # key of a running request → its line, and that one's id
        self._waiting: dict[int, _Outcome] = {}  # by place, where order is kept
        self._next = 0  # place whose record is written next, where order is kept

    @property
    def untimed(self) -> int:
        """Lines that are done at once: kept ones and bad ones."""
        bad = sum(place not in self._kept for place in self._checked.errors)
        return self._kept.answered + self._kept.failed + bad

    def run(self, engine: Engine | None, batch_size: int, max_delay_s: float = MAX_DELAY_S) -> Iterator[Progress]:
        """Answer everything that is not kept. Without an engine (no good line) only the failures are written.

        max_delay_s: for how long running answers may wait while prompts are read.

        Raises MagicpigError, BrokenPipeError: the output cannot be written. What is finished has been written then.
        """
        try:
            for place, problem in self._checked.errors.items():
                if place not in self._kept:
                    self._settle(place, _Outcome(error_record(problem), None))
            yield self.progress
            if engine is not None:
                yield from self._answer(engine, batch_size, max_delay_s)
        finally:
            # Only a run that ends early leaves any: finished answers are not thrown away because an earlier one is not.
            for place in sorted(self._waiting):
                self._write(self._waiting.pop(place))

    def _answer(self, engine: Engine, batch_size: int, max_delay_s: float) -> Iterator[Progress]:
        for event in engine.generate(self._requests(engine), batch_size, max_delay_s):
            self._take(engine, event)
            yield self.progress
            if self._stop():
                return

    def _requests(self, engine: Engine) -> Iterator[Request]:
        """The good lines that are not kept, each read again when the engine has room for it.

        Those that share a prefix follow each other.
        """
        prefixes = Prefixes(self._checked.sharing, self._runs)
        for number in filter(self._runs, self._checked.sharing.order):
            if self._stop():
                return
            entry, prefix = self._checked.entry(number), prefixes.of(number)
            try:
                request = self._request(engine, entry, prefix)
            except MagicpigError as problem:
                self._fail(entry, problem.code if isinstance(problem, BadLine) else FAILED, problem.message)
                request = None
            if prefix is not None and (request is None or request.prefix is None):
                prefix.release()
            if request is not None:
                yield request

    def _runs(self, number: int) -> bool:
        """Whether a good line is to run."""
        return self._checked.entry(number).place not in self._kept

    def _request(self, engine: Engine, entry: Entry, prefix: SharedPrefix | None) -> Request:
        raw = self._source.line_at(entry.number, entry.offset)
        line = parse_line(raw)
        if isinstance(line, LineError):
            raise BadLine(INPUT_CHANGED, "the line has changed since the check, and is bad now")
        prompt = self._maker.read(line)
        if self._maker.key(line, prompt, entry.twin) != entry.key:
            raise BadLine(INPUT_CHANGED, "the line or its document has changed since the check")
        if prompt_hash(prompt.ids) != entry.prompt_hash:  # a template tells the date, and midnight has passed
            prefix = None
        options = self._maker.options(line, prompt, entry.twin)
        request = engine.request(str(entry.place), prompt.ids, options, prefix=prefix)
        self._running[request.key] = entry, line.custom_id
        return request

    def _take(self, engine: Engine, event: Event) -> None:
        progress = self.progress
        progress.event = event
        if isinstance(event, PrefillProgress):
            progress.reading = (event.done, event.total) if event.done < event.total else None
        elif isinstance(event, Requeued):
            progress.reading = None
        elif isinstance(event, StepStats):
            progress.decode_tokens += event.batch
            progress.decode_s += event.wall_ms / 1000
        elif isinstance(event, Finished):
            entry, custom_id = self._running.pop(event.key)
            self._settle(entry.place, _Outcome(answer_record(custom_id, entry.key, engine.model_name, event), event))
        elif isinstance(event, Failed):
            progress.reading = None
            entry, custom_id = self._running.pop(event.key)
            code = INSUFFICIENT_MEMORY if event.code == MemoryBudgetError.__name__ else FAILED
            problem = LineError(entry.number, custom_id, code, event.message)
            self._settle(entry.place, _Outcome(error_record(problem, entry.key), None))

    def _fail(self, entry: Entry, code: str, message: str) -> None:
        """A line that was good when it was checked and is not any more. Its id is the one that it had then.

        Where the engine refused it (FAILED) it is what it was, and failed.
        """
        problem = LineError(entry.number, self._checked_ids[entry.number], code, message)
        record = error_record(problem, entry.key if code == FAILED else None)
        self._settle(entry.place, _Outcome(record, None))

    @cached_property
    def _checked_ids(self) -> dict[int, str]:
        """Line number → id. Made only for an input that has changed since its check."""
        return {number: custom_id for custom_id, number in self._checked.numbers.items()}

    def _settle(self, place: int, outcome: _Outcome) -> None:
        """Write an outcome, now or when all lines before it have theirs."""
        if not self._ordered:
            self._write(outcome)
            return
        self._waiting[place] = outcome
        while self._next in self._waiting or self._next in self._kept:
            if self._next in self._waiting:
                self._write(self._waiting.pop(self._next))
            self._next += 1

    def _write(self, outcome: _Outcome) -> None:
        """Write and count it, or neither."""
        with self._output.held():
            if outcome.finished is None:
                self._output.error(outcome.record)
                self.progress.failed += 1
                return
            self._output.answer(outcome.record)
            self.progress.ok += 1
            self.progress.prompt_tokens += outcome.finished.prompt_tokens
            self.progress.completion_tokens += len(outcome.finished.token_ids)
