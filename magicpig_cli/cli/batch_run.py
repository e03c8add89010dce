"""One run of `magicpig batch` that writes: what is kept of the one before, the model, the answers, how it ended."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from magicpig_cli.batch import parameters
from magicpig_cli.batch.interrupt import Signals
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.resume import NOTHING_KEPT, Kept, find, restore_order
from magicpig_cli.batch.runner import BatchRunner, Progress
from magicpig_cli.batch.summary import State, manifest, read_manifest, summary
from magicpig_cli.batch.writer import Mode, Output, OutputPaths, write_manifest
from magicpig_cli.cli.batch import SOME_FAILED, Options, Prepared, prepare, refuse_bad_lines
from magicpig_cli.cli.dry_run import count
from magicpig_cli.cli.typed import command_with
from magicpig_cli.config import Settings
from magicpig_cli.errors import INTERRUPTED, MagicpigError
from magicpig_cli.events import Event, Requeued, WaitingForMemory
from magicpig_cli.ui import console
from magicpig_cli.ui.live import View, open_view
from magicpig_cli.ui.live_state import Work
from magicpig_cli.ui.loading import load_engine
from magicpig_cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine


@dataclass
class BatchRun:
    """One run. `paths`: locked files, None = everything goes to stdout; `arguments`: what was typed."""

    settings: Settings
    options: Options
    source: JsonlSource
    paths: OutputPaths | None
    signals: Signals
    arguments: Sequence[str]
    began: float = field(default_factory=time.monotonic)
    _prepared: Prepared | None = None
    _progress: Progress | None = None  # once it is known what is to be done
    _engine: Engine | None = None
    _waits: bool = False  # for memory
    _writing: bool = False  # from here on the files are those of this run
    _finished: bool = False  # and the manifest says so

    def run(self) -> int:
        """Check, load, answer; returns the exit code. A run that ends early says how to go on."""
        try:
            prepared = self._prepared = self._prepare()
            kept = self._find_kept(prepared)
            self._progress = Progress(prepared.checked.total, failed=kept.failed, skipped=kept.answered)
            self._engine = self._load(prepared, kept)
            self._write(prepared, kept)
            return self._end()
        except KeyboardInterrupt:
            return self._end_interrupted()
        except Exception:
            self._tell_failed()
            raise

    # Before anything is written

    @cached_property
    def _typed(self) -> dict[str, Any]:
        """With what `--quantize auto` means here: the file may be another one when a later run goes on."""
        from magicpig_cli.model import loader

        settings = replace(self.settings, model=loader.settled(self.settings.model))
        return parameters.typed(
            settings, raw=self.options.raw, ordered=self.options.ordered, prefix_sharing=self.options.share
        )

    def _prepare(self) -> Prepared:
        """Check all lines, with the choices of the run before if this one goes on. Raises MagicpigError."""
        before, settings = self._manifest_before(), self.settings
        if before is not None:
            if not self.options.force:
                parameters.refuse_others(before, "parameters", self._typed)
            settings = parameters.adopted(settings, self._typed, before)
        prepared = prepare(settings, self.options, self.source)
        if before is not None and not self.options.force:
            parameters.refuse_others(before, "chosen", parameters.chosen(prepared.plan))
        if self.options.strict:
            refuse_bad_lines(prepared.checked)
        return prepared

    def _manifest_before(self) -> dict[str, Any] | None:
        """Of the run to go on with; None where there is nothing to go on with. Raises UsageError."""
        if self.paths is None or not self.options.resume or not self.paths.hold_results():
            return None
        return read_manifest(self.paths.manifest)

    def _find_kept(self, prepared: Prepared) -> Kept:
        if self.paths is None or not self.options.resume:
            return NOTHING_KEPT
        kept = find(self.paths, prepared.checked, retry_errors=self.options.retry_errors)
        if not self.options.quiet:
            for notice in _findings(kept, prepared.checked.total):
                console.say(notice)
        return kept

    def _load(self, prepared: Prepared, kept: Kept) -> Engine | None:
        """The model; none if no line needs it."""
        if all(entry.place in kept for entry in prepared.checked.entries()):
            return None
        return load_engine(self.settings, quiet=self.options.quiet, planned=prepared.plan)

    # Writing

    def _write(self, prepared: Prepared, kept: Kept) -> None:
        """Answer what is not kept, unless a signal comes first. Raises MagicpigError, BrokenPipeError."""
        self._writing = True
        self._write_manifest("running")
        if self.paths is not None:
            kept.tidy(self.paths)
        with self._output() as output:
            runner = BatchRunner(
                self.source, prepared.checked, prepared.maker, output, ordered=self.options.ordered,
                stop=lambda: self.signals.asked, kept=kept,
            )  # fmt: skip
            self._progress = runner.progress
            with self.signals.gently(), self._view(prepared.batch_size) as view:
                began, untimed = time.monotonic(), runner.untimed
                for progress in runner.run(self._engine, prepared.batch_size, self.options.max_delay_s):
                    self._tell(progress.event)
                    view.show(progress.event, _work(progress, untimed, time.monotonic() - began))
        if self._engine is not None and not self.options.quiet:
            for notice in self._engine.new_notices():
                console.say(notice)
        if self.paths is not None and self.options.ordered and self.options.resume and self._is_finished:
            restore_order(self.paths, prepared.checked)

    def _tell(self, event: Event | None) -> None:
        """What people should know of how memory is doing; of a wait once until something runs again."""
        if isinstance(event, Requeued):
            console.warn(f"memory ran out: going on with {count(event.batch_size, 'sequence')} together")
        if isinstance(event, WaitingForMemory):
            if not self._waits:
                need, free = format_bytes(event.need_bytes), format_bytes(event.free_bytes)
                console.warn(f"waiting for memory: the next line needs {need}, and other programs leave {free}")
            self._waits = True
        elif event is not None:
            self._waits = False

    def _output(self) -> Output:
        if self.paths is None:
            return Output.to_stream(sys.stdout.buffer)
        mode: Mode = "append" if self.options.resume else "overwrite" if self.options.overwrite else "new"
        return Output.to_files(self.paths, mode, self.signals.held)

    def _view(self, slots: int) -> View:
        """What moves on stderr meanwhile. It would run through records that come out on the same terminal."""
        to_stdout = self.paths is None
        quiet = self.options.quiet or (to_stdout and sys.stdout.isatty())
        live = self.options.live and not (to_stdout and console.may_reach_a_terminal(sys.stdout))
        return open_view(self._engine, wanted=live, quiet=quiet, what="answering", unit="lines", slots=slots)

    def _write_manifest(self, state: State) -> None:
        if self.paths is None:
            return
        assert self._prepared is not None
        choices = parameters.chosen(self._prepared.plan)
        content = manifest(
            self._typed, choices, self.source, self._engine, self._summary(), state, self._prepared.check_s
        )
        write_manifest(self.paths, content)

    # The end

    @property
    def _is_finished(self) -> bool:
        return self._progress is not None and self._progress.done == self._progress.total

    def _end(self) -> int:
        """Nothing has gone wrong; a signal may have come."""
        if not self._is_finished:
            return self._end_interrupted()
        assert self._progress is not None
        self._write_manifest("finished")
        self._finished = True
        summary = self._summary()
        if self.options.as_json:
            print(json.dumps(summary), flush=True)
        if not self.options.quiet:
            console.say(self._summary_line(self._progress, summary))
        return SOME_FAILED if self._progress.failed else 0

    def _end_interrupted(self) -> int:
        """Whether files or streams can still be written does not change how this ends."""
        if self._writing:
            with contextlib.suppress(MagicpigError):
                self._write_manifest("interrupted")
            if self.options.as_json:
                console.print_last(json.dumps(self._summary()))
        console.say("interrupted" if self._progress is None else f"interrupted: {self._how_far(self._progress)}")
        self._tell_how_to_go_on()
        return INTERRUPTED

    def _tell_failed(self) -> None:
        """What is there, before the error itself is told."""
        if not self._writing or self._finished or self.paths is None or self._progress is None:
            return
        with contextlib.suppress(MagicpigError):  # what stopped the run is the news
            self._write_manifest("failed")
        console.say(self._how_far(self._progress))
        self._tell_how_to_go_on()

    def _tell_how_to_go_on(self) -> None:
        if self.paths is None:
            return
        stdin = " (with the same input on stdin)" if self.source.path is None else ""
        if self.options.overwrite and not self._writing:  # what is there is still to be replaced
            again = command_with(self.arguments, "--overwrite", without=())
        else:
            again = command_with(self.arguments, "--resume", without=("--overwrite",))
        console.say(f"to go on{stdin}: {again}")

    def _summary(self) -> dict[str, Any]:
        assert self._prepared is not None
        assert self._progress is not None
        return summary(self._progress, self._prepared.batch_size, time.monotonic() - self.began)

    def _summary_line(self, progress: Progress, summary: dict[str, Any]) -> str:
        """`12 lines: 11 answered, 1 failed · 1,043 + 480 tokens · 35 s · 24.1 tok/s · answers in o.jsonl`."""
        before = f", {progress.skipped:,} answered before" if progress.skipped else ""
        parts = [
            f"{count(progress.total, 'line')}: {progress.ok:,} answered, {progress.failed:,} failed{before}",
            f"{progress.prompt_tokens:,} + {progress.completion_tokens:,} tokens",
            format_seconds(summary["wall_s"]),
        ]
        if progress.decode_tok_s:
            parts.append(f"{progress.decode_tok_s:.1f} tok/s")
        if self.paths is not None:
            parts.append(f"answers in {self.paths.answers}")
            if progress.failed:
                parts.append(f"failures in {self.paths.errors}")
        return " · ".join(parts)

    def _how_far(self, progress: Progress) -> str:
        answered = progress.ok or progress.skipped
        where = f"; the answers are in {self.paths.answers}" if self.paths is not None and answered else ""
        return f"{progress.done:,} of {progress.total:,} lines are done{where}"


def _findings(kept: Kept, total: int) -> list[str]:
    """What an earlier run has left, for people."""
    failed = f", {kept.failed:,} have failed" if kept.failed else ""
    found = [f"going on: {kept.answered:,} of {count(total, 'line')} are answered{failed}"]
    if kept.stale:
        found.append(
            f"{count(kept.stale, 'line')} of the output hold no longer: what they answer is gone or has changed"
        )
    if kept.torn_bytes:
        found.append(f"the last line was not finished: {kept.torn_bytes:,} bytes are cut")
    return found


def _work(progress: Progress, untimed: int, elapsed_s: float) -> Work:
    """How far the run is, for people. `untimed` lines took no time."""
    what, detail = "answering", f"{progress.decode_tok_s:.1f} tok/s" if progress.decode_tok_s else ""
    if progress.reading is not None:
        done, total = progress.reading
        what, detail = "reading a prompt", f"{done:,} of {total:,} tokens"
    return Work(what, progress.done, progress.total, "lines", detail, progress.failed, elapsed_s, untimed)
