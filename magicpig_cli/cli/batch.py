"""`magicpig batch`: a JSONL file of requests in, a JSONL file of answers out."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.dry_run import count
from magicpig_cli.cli.options import AsJson, NoLive, Quiet, command_options
from magicpig_cli.config import Settings
from magicpig_cli.errors import INTERRUPTED, MagicpigError, UsageError
from magicpig_cli.events import MEASURING
from magicpig_cli.ui import console
from magicpig_cli.units import format_seconds

if TYPE_CHECKING:
    from magicpig_cli.batch.check import Checked
    from magicpig_cli.batch.reader import JsonlSource
    from magicpig_cli.batch.request import RequestMaker
    from magicpig_cli.batch.runner import Progress
    from magicpig_cli.batch.writer import Output, OutputPaths
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.planner import Plan
    from magicpig_cli.ui.live import View
    from magicpig_cli.ui.live_state import Work

SOME_FAILED = 3
_SHOWN_ERRORS = 10


@dataclass(frozen=True)
class _Options:
    """What was typed, beside Settings."""

    source: str
    output: str | None
    batch_size: int | None  # None = auto
    dry_run: bool
    strict: bool
    raw: bool
    overwrite: bool
    ordered: bool
    allow_outside_files: bool
    share: bool
    as_json: bool
    quiet: bool
    live: bool


@command_options("model", "attention", "generation", "system")
def batch(
    settings: Settings,
    source: Annotated[str, typer.Argument(metavar="INPUT.jsonl", help="One request per line; - is stdin.")],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="OUT.jsonl", help="Default: INPUT.out.jsonl beside it; - is stdout."),
    ] = None,
    batch_size: Annotated[
        str, typer.Option(metavar="auto|N", help="Sequences decoded together at most, as memory allows.")
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all lines, show the plan, load no weights.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop before generating if a line is bad.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts as they are, without the chat template.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Answers in the order of the input; without it, as they are finished.")
    ] = False,
    allow_outside_files: Annotated[
        bool, typer.Option("--allow-outside-files", help='Let "file" leave the directory of the input.')
    ] = False,
    no_prefix_sharing: Annotated[
        bool, typer.Option("--no-prefix-sharing", help="Read the common beginning of lines anew for each.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_live: NoLive = False,
) -> None:
    """Answer a JSONL file of requests, several at a time."""
    options = _Options(
        source, output, _batch_size(batch_size), dry_run, strict, raw, overwrite, ordered, allow_outside_files,
        not no_prefix_sharing, as_json, quiet, not no_live,
    )  # fmt: skip
    from magicpig_cli.batch.reader import JsonlSource

    stdin = sys.stdin.buffer if sys.stdin is not None else None  # None in some daemons
    with _Signals() as signals, contextlib.closing(JsonlSource.open(source, stdin)) as opened:
        if dry_run:
            _dry_run(_prepare(settings, options, opened), options)
            return
        with _reserved(options, opened) as paths:
            code = _Run(settings, options, opened, paths, signals).run()
    if code:
        raise typer.Exit(code)


def _batch_size(text: str) -> int | None:
    if text.strip().lower() == "auto":
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"--batch-size {text} is not a number of sequences", hint="--batch-size auto, or like 4")
    return int(text)


class _Signals:
    """SIGINT and SIGTERM while a batch runs. While answers are written (`gently`) the first one only sets `asked`;
    otherwise, and with the second one, KeyboardInterrupt is raised."""

    def __init__(self) -> None:
        self.asked = False
        self._gently = False
        self._before: dict[signal.Signals, Any] = {}

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if not self._gently or self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextlib.contextmanager
    def gently(self) -> Iterator[None]:
        self._gently = True
        try:
            yield
        finally:
            self._gently = False

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


# Where results go


@contextlib.contextmanager
def _reserved(options: _Options, source: JsonlSource) -> Iterator[OutputPaths | None]:
    """The files of this run, locked for it; None = everything goes to a stream. Raises UsageError, MagicpigError."""
    from magicpig_cli.batch.lock import locked

    paths = _paths(options, source)
    if paths is None:
        yield None
        return
    if source.path is not None:
        paths.refuse_input(source.path)
    with locked(paths.lock):
        if not options.overwrite:
            paths.refuse_existing()
        yield paths


def _paths(options: _Options, source: JsonlSource) -> OutputPaths | None:
    """Files for a named output; None for stdout, which is also where the answers to a piped input go by default."""
    from magicpig_cli.batch.writer import OutputPaths

    if options.output == "-" or (options.output is None and source.path is None):
        return None
    if options.output is not None:
        answers = Path(options.output).expanduser()
    else:
        assert source.path is not None
        answers = source.path.with_name(source.path.stem + ".out.jsonl")
    if answers.is_dir():
        raise UsageError(f"{answers} is a directory", hint=f"-o {answers / 'answers.jsonl'}")
    if not answers.parent.is_dir():
        raise UsageError(f"there is no directory {answers.parent}", hint=f"mkdir -p {answers.parent}")
    if answers.exists() and not answers.is_file():
        raise UsageError(f"{answers} is no regular file", hint=f"-o - > {answers}")
    return OutputPaths.beside(answers)


# Checking


@dataclass(frozen=True)
class _Prepared:
    """The input after its check, and what is known of the model without its weights."""

    checked: Checked
    maker: RequestMaker
    plan: Plan
    batch_size: int
    check_s: float


def _prepare(settings: Settings, options: _Options, source: JsonlSource) -> _Prepared:
    """Read config and tokenizer, then all lines. Says what is wrong with which."""
    from magicpig_cli.batch.check import check
    from magicpig_cli.batch.prepare import without_weights

    began = time.monotonic()
    with console.Track("reading the tokenizer", quiet=options.quiet) as progress:
        maker, plan = without_weights(
            settings, source, options.raw, options.allow_outside_files, lambda: progress.note(MEASURING)
        )
    if options.raw and settings.system and not options.quiet:
        console.say("prompts go without the system text: --raw has no place for it")
    with console.Track("checking lines", unit="bytes", quiet=options.quiet) as progress:

        def show(lines: int, done_bytes: int) -> None:
            progress.update(done_bytes, source.size_bytes)

        checked = check(source, maker, show, share=options.share)
    if not options.quiet:
        _show_findings(checked, maker, settings.model.model)
    batch_size = checked.batch_size(plan, options.batch_size)
    if options.batch_size is not None and not options.quiet and (note := _too_many(checked, plan, options.batch_size)):
        console.say(note)
    return _Prepared(checked, maker, plan, batch_size, time.monotonic() - began)


def _show_findings(checked: Checked, maker: RequestMaker, model: str) -> None:
    """Notices, and the first bad lines."""
    for notice in maker.codec.new_notices():
        console.say(notice)
    if others := sorted(checked.models - {model}):
        console.say(f"lines name the model {', '.join(others)}; {model} answers all of them")
    if checked.ignored:
        console.say(f"ignored keys: {', '.join(sorted(checked.ignored))}")
    for problem in list(checked.errors.values())[:_SHOWN_ERRORS]:
        console.warn(f"line {problem.number}: {problem.message}")
    if len(checked.errors) > _SHOWN_ERRORS:
        console.warn(f"{len(checked.errors) - _SHOWN_ERRORS:,} more lines are bad")


def _too_many(checked: Checked, plan: Plan, wanted: int) -> str | None:
    """What to say where so many sequences can never be decoded together."""
    if not checked.good:
        return None
    if wanted > checked.good:
        return f"--batch-size {wanted:,} is more than the {count(checked.good, 'line')} to answer"
    shortest = int(checked.lengths()[:, 1].min())
    room = plan.budget_bytes // max(1, plan.sequence_bytes(shortest))
    if wanted <= room:
        return None
    return (
        f"--batch-size {wanted:,} is more than memory has room for: {room:,} of even the shortest lines "
        f"({shortest:,} tokens); the others wait"
    )


def _refuse_bad_lines(checked: Checked) -> None:
    """Raise MagicpigError for --strict."""
    if checked.errors:
        first = next(iter(checked.errors.values()))
        raise MagicpigError(
            f"{len(checked.errors):,} of {checked.total:,} lines are bad; line {first.number}: {first.message}",
            hint="correct them, or leave --strict out: the others are answered then",
        )


def _dry_run(prepared: _Prepared, options: _Options) -> None:
    """Print what a run would meet. Raises typer.Exit or MagicpigError if a line is bad."""
    from magicpig_cli.batch.dry_run import DryRun
    from magicpig_cli.cli.dry_run import print_page

    checked = prepared.checked
    dry = DryRun.of(checked, prepared.plan, prepared.batch_size)
    if options.as_json:
        print(json.dumps(dry.report(), ensure_ascii=False))
    else:
        print_page(dry, shared=options.share)
    if options.strict:
        _refuse_bad_lines(checked)
    if checked.errors:
        raise typer.Exit(SOME_FAILED)


# Running


@dataclass
class _Run:
    """One run that writes."""

    settings: Settings
    options: _Options
    source: JsonlSource
    paths: OutputPaths | None
    signals: _Signals
    began: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Check, load, answer; returns the exit code."""
        prepared = _prepare(self.settings, self.options, self.source)
        if self.options.strict:
            _refuse_bad_lines(prepared.checked)
        from magicpig_cli.batch.runner import Progress

        try:
            engine = self._load(prepared)
        except KeyboardInterrupt:
            return self._tell_interrupted(Progress(prepared.checked.total))
        with self._output() as output:
            progress = self._answer(engine, prepared, output)
        stopped = progress.done < progress.total
        summary = self._summary(progress, prepared.batch_size)
        if self.options.as_json:
            print(json.dumps(summary), flush=True)
        if stopped:
            return self._tell_interrupted(progress)
        if not self.options.quiet:
            console.say(self._summary_line(progress, summary))
        return SOME_FAILED if progress.failed else 0

    def _load(self, prepared: _Prepared) -> Engine | None:
        """The model; none if no line needs it."""
        from magicpig_cli.ui.loading import load_engine

        if not prepared.checked.good:
            return None
        return load_engine(self.settings, quiet=self.options.quiet, planned=prepared.plan)

    def _output(self) -> Output:
        from magicpig_cli.batch.writer import Output

        if self.paths is None:
            return Output.to_stream(sys.stdout.buffer)
        return Output.to_files(self.paths, overwrite=self.options.overwrite)

    def _answer(self, engine: Engine | None, prepared: _Prepared, output: Output) -> Progress:
        from magicpig_cli.batch.runner import BatchRunner

        runner = BatchRunner(
            self.source, prepared.checked, prepared.maker, output, ordered=self.options.ordered,
            stop=lambda: self.signals.asked,
        )  # fmt: skip
        self._manifest(prepared, engine, runner.progress, "running")
        try:
            with self.signals.gently(), self._view(engine, prepared.batch_size) as view:
                began = time.monotonic()
                for progress in runner.run(engine, prepared.batch_size):
                    view.show(progress.event, _work(progress, len(prepared.checked.errors), time.monotonic() - began))
        except KeyboardInterrupt:
            pass  # a second signal; what is not done is told like after the first one
        except Exception:
            if self.paths is not None:
                console.say(_how_far(runner.progress, self.paths))
            with contextlib.suppress(MagicpigError):  # what stopped the run is the news
                self._manifest(prepared, engine, runner.progress, "failed")
            raise
        state = "finished" if runner.progress.done == runner.progress.total else "interrupted"
        try:
            self._manifest(prepared, engine, runner.progress, state)
        except MagicpigError:
            if self.paths is not None:
                console.say(_how_far(runner.progress, self.paths))
            raise
        return runner.progress

    def _view(self, engine: Engine | None, slots: int) -> View:
        """What moves on stderr meanwhile. It would run through records that come out on the same terminal."""
        from magicpig_cli.ui.live import open_view

        to_stdout = self.paths is None
        quiet = self.options.quiet or (to_stdout and sys.stdout.isatty())
        live = self.options.live and not (to_stdout and console.may_reach_a_terminal(sys.stdout))
        return open_view(engine, wanted=live, quiet=quiet, what="answering", unit="lines", slots=slots)

    def _manifest(self, prepared: _Prepared, engine: Engine | None, progress: Progress, state: str) -> None:
        if self.paths is None:
            return
        from magicpig_cli.batch.summary import manifest
        from magicpig_cli.batch.writer import write_manifest

        options = {"raw": self.options.raw, "ordered": self.options.ordered, "prefix_sharing": self.options.share}
        summary = self._summary(progress, prepared.batch_size)
        content = manifest(self.settings, options, self.source, engine, summary, state, prepared.check_s)
        write_manifest(self.paths.manifest, content)

    def _summary(self, progress: Progress, batch_size: int) -> dict[str, Any]:
        from magicpig_cli.batch.summary import summary

        return summary(progress, batch_size, time.monotonic() - self.began)

    def _summary_line(self, progress: Progress, summary: dict[str, Any]) -> str:
        """`12 lines: 11 answered, 1 failed · 1,043 + 480 tokens · 35 s · 24.1 tok/s · answers in o.jsonl`."""
        parts = [
            f"{count(progress.total, 'line')}: {progress.ok:,} answered, {progress.failed:,} failed",
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

    def _tell_interrupted(self, progress: Progress) -> int:
        console.say("interrupted: " + _how_far(progress, self.paths))
        return INTERRUPTED


def _how_far(progress: Progress, paths: OutputPaths | None) -> str:
    where = f"; the answers are in {paths.answers}" if paths is not None and progress.ok else ""
    return f"{progress.done:,} of {progress.total:,} lines are done{where}"


def _work(progress: Progress, bad: int, elapsed_s: float) -> Work:
    """How far the run is, for people. `bad` lines took no time."""
    from magicpig_cli.ui.live_state import Work

    what, detail = "answering", f"{progress.decode_tok_s:.1f} tok/s" if progress.decode_tok_s else ""
    if progress.reading is not None:
        done, total = progress.reading
        what, detail = "reading a prompt", f"{done:,} of {total:,} tokens"
    return Work(what, progress.done, progress.total, "lines", detail, progress.failed, elapsed_s, bad)
