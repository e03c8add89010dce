"""`magicpig batch`: a JSONL file of requests in, a JSONL file of answers out."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicpig_cli.cli.dry_run import count
from magicpig_cli.cli.options import AsJson, NoLive, Quiet, command_options
from magicpig_cli.config import MAX_DELAY_S, Settings
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.events import MEASURING
from magicpig_cli.ui import console

if TYPE_CHECKING:
    from magicpig_cli.batch.check import Checked
    from magicpig_cli.batch.interrupt import Signals
    from magicpig_cli.batch.reader import JsonlSource
    from magicpig_cli.batch.request import RequestMaker
    from magicpig_cli.batch.writer import OutputPaths
    from magicpig_cli.planner import Plan

SOME_FAILED = 3
_SHOWN_ERRORS = 10


@dataclass(frozen=True)
class Options:
    """What was typed, beside Settings."""

    source: str
    output: str | None
    batch_size: int | None  # None = auto
    dry_run: bool
    strict: bool
    raw: bool
    overwrite: bool
    resume: bool
    retry_errors: bool
    force: bool
    ordered: bool
    allow_outside_files: bool
    share: bool
    max_delay_s: float
    as_json: bool
    quiet: bool
    live: bool


@command_options("model", "attention", "generation", "system")
def batch(
    invocation: typer.Context,
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an existing output: what is answered there is kept.")
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="With --resume: lines that have failed run again.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --resume: go on with another model or other parameters.")
    ] = False,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Answers in the order of the input; without it, as they are finished.")
    ] = False,
    allow_outside_files: Annotated[
        bool, typer.Option("--allow-outside-files", help='Let "file" leave the directory of the input.')
    ] = False,
    no_prefix_sharing: Annotated[
        bool, typer.Option("--no-prefix-sharing", help="Read the common beginning of lines anew for each.")
    ] = False,
    max_delay: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.0, help="For how long running answers may wait while prompts are read."),
    ] = MAX_DELAY_S,
    as_json: AsJson = False,
    quiet: Quiet = False,
    no_live: NoLive = False,
) -> None:
    """Answer a JSONL file of requests, several at a time."""
    options = Options(
        source, output, _batch_size(batch_size), dry_run, strict, raw, overwrite, resume, retry_errors, force, ordered,
        allow_outside_files, not no_prefix_sharing, max_delay, as_json, quiet, not no_live,
    )  # fmt: skip
    _refuse_contradictions(options)
    from magicpig_cli.batch.interrupt import Signals

    with console.lasting_stderr(), Signals() as signals:
        code = _run(settings, options, signals, invocation.obj)
    if code:
        raise typer.Exit(code)


def _run(settings: Settings, options: Options, signals: Signals, arguments: Sequence[str]) -> int:
    """Returns the exit code. `arguments`: what was typed, to be typed again should the run end early."""
    from magicpig_cli.batch.reader import JsonlSource

    stdin = sys.stdin.buffer if sys.stdin is not None else None  # None in some daemons
    with contextlib.closing(JsonlSource.open(options.source, stdin)) as source:
        if options.dry_run:
            return _dry_run(prepare(settings, options, source), options)
        with _reserved(options, source) as paths:
            from magicpig_cli.cli.batch_run import BatchRun

            return BatchRun(settings, options, source, paths, signals, arguments).run()


def _batch_size(text: str) -> int | None:
    if text.strip().lower() == "auto":
        return None
    if not text.strip().isdecimal() or int(text) < 1:
        raise UsageError(f"--batch-size {text} is not a number of sequences", hint="--batch-size auto, or like 4")
    return int(text)


def _refuse_contradictions(options: Options) -> None:
    """Raise UsageError for options that have no meaning together."""
    if options.resume and options.overwrite:
        raise UsageError("--resume keeps the output and --overwrite replaces it", hint="give one of them")
    for flag, given in (("--retry-errors", options.retry_errors), ("--force", options.force)):
        if given and not options.resume:
            raise UsageError(f"{flag} says how to go on with an output", hint=f"--resume {flag}")


# Where results go


@contextlib.contextmanager
def _reserved(options: Options, source: JsonlSource) -> Iterator[OutputPaths | None]:
    """The files of this run, locked for it; None = everything goes to a stream. Raises UsageError, MagicpigError."""
    from magicpig_cli.lock import locked

    paths = _paths(options, source)
    if paths is None:
        if options.resume:
            raise UsageError("--resume needs a file: what went to stdout cannot be read again", hint="-o OUT.jsonl")
        yield None
        return
    if source.path is not None:
        paths.refuse_input(source.path)
    doing, hint = "is writing the same output", "wait for it, or give another -o"
    with locked(paths.lock, doing, hint, "-o names another place"):
        if not options.overwrite and not options.resume:
            paths.refuse_existing()
        paths.remove_unfinished()
        yield paths


def _paths(options: Options, source: JsonlSource) -> OutputPaths | None:
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
class Prepared:
    """The input after its check, and what is known of the model without its weights."""

    checked: Checked
    maker: RequestMaker
    plan: Plan
    batch_size: int
    check_s: float


def prepare(settings: Settings, options: Options, source: JsonlSource) -> Prepared:
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
    return Prepared(checked, maker, plan, batch_size, time.monotonic() - began)


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


def refuse_bad_lines(checked: Checked) -> None:
    """Raise MagicpigError for --strict."""
    if checked.errors:
        first = next(iter(checked.errors.values()))
        raise MagicpigError(
            f"{len(checked.errors):,} of {checked.total:,} lines are bad; line {first.number}: {first.message}",
            hint="correct them, or leave --strict out: the others are answered then",
        )


def _dry_run(prepared: Prepared, options: Options) -> int:
    """Print what a run would meet; returns its exit code. Raises MagicpigError for --strict if a line is bad."""
    from magicpig_cli.batch.dry_run import DryRun
    from magicpig_cli.cli.dry_run import print_page

    checked = prepared.checked
    dry = DryRun.of(checked, prepared.plan, prepared.batch_size)
    if options.as_json:
        print(json.dumps(dry.report(), ensure_ascii=False))
    else:
        print_page(dry, shared=options.share)
    if options.strict:
        refuse_bad_lines(checked)
    return SOME_FAILED if checked.errors else 0
