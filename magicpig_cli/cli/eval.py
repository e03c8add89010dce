"""`magicpig eval`: accuracy of sampled attention beside exact attention, on tasks and on text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.options import AsJson, Quiet, command_options
from magicpig_cli.cli.outputs import want_writable, write
from magicpig_cli.cli.typed import command_with
from magicpig_cli.config import MAX_SEED, SAMPLERS, Settings
from magicpig_cli.errors import UsageError
from magicpig_cli.files import is_stream
from magicpig_cli.units import parse_token_list

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.evals.modes import Mode
    from magicpig_cli.evals.run import Evaluation, Request
    from magicpig_cli.evals.units import Kept
    from magicpig_cli.planner import Plan

_FORMATS = (".json", ".csv", ".md")


@command_options("model", "attention", without=("context", "attention", "budget"))
def eval(
    invocation: typer.Context,
    settings: Settings,
    tasks: Annotated[
        str,
        typer.Option(metavar="NAME,NAME…", help="niah, multikey, vt, cwe, fwe, passkey, tenkeys; of text ppl and kl."),
    ] = "niah,multikey,vt,cwe,fwe,ppl,kl",
    context: Annotated[
        str, typer.Option("-c", "--context", "--ctx-size", metavar="N,N…", help="Tokens with the answer, like 4k,8k.")
    ] = "4k",
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Questions of each task, text and context.")] = 20,
    attention: Annotated[
        str | None,
        typer.Option(metavar="MODE,MODE…", help="Samplers, and topk and oracle, which read all keys (by default all)."),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="X,X…", help="Share of keys to sample, for all modes but lsh, like 0.02,0.04.")
    ] = "0.02",
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text to read; pydoc_data.topics (default) and stdlib are always there."),
    ] = None,
    positions: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per text that ppl and kl look at.")] = 128,
    hash_seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Average over so many hash seeds.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="N", help="Seed of the tasks.")] = 0,
    as_json: AsJson = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there too: .json, .csv or .md.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Error against sampled keys and index size: png, svg, pdf.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do again what an earlier run has kept.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure how much worse sampled attention answers than exact attention."""
    from magicpig_cli.evals.texts import DEFAULT, Text

    names, contexts, budgets = _tasks(tasks), _contexts(context), _budgets(budget)
    attending = _attention(attention)
    target = _target(output, plot, names, as_json=as_json, quiet=quiet)
    texts = tuple(Text.load(name) for name in dict.fromkeys(text or [DEFAULT]))

    from magicpig_cli.evals.modes import modes
    from magicpig_cli.evals.run import Request
    from magicpig_cli.ui.loading import load_engine

    settings = replace(
        settings, attention=replace(settings.attention, mode="exact"), context=max(contexts)
    )  # fmt: skip
    chosen = tuple(modes(attending, budgets))
    plans = _plans(settings, chosen)  # refuses what does not fit before anything is loaded
    request = Request(
        names, texts, contexts, chosen, plans, samples=samples, hash_seeds=hash_seeds, seed=seed, positions=positions
    )
    engine = load_engine(settings, quiet=quiet)
    with _kept(engine, output, fresh=fresh) as kept:
        _evaluate(engine, request, kept, target, invocation.obj)


def _evaluate(engine: Engine, request: Request, kept: Kept, target: _Target, arguments: list[str]) -> None:
    """Do what is missing, then deliver. However that ends, what is finished is kept, and how to go on is said."""
    from magicpig_cli import hardware
    from magicpig_cli.batch.interrupt import Signals
    from magicpig_cli.evals import report
    from magicpig_cli.evals.run import Evaluation
    from magicpig_cli.ui import console

    evaluation = Evaluation(engine, request, kept)
    evaluation.check()
    if not target.quiet:
        for line in _warnings(engine, request):
            console.warn(line)
        if evaluation.done:
            console.say(f"{evaluation.done} of {evaluation.total} measurements are in {kept.path} already")
    try:
        with Signals():
            _follow(evaluation, target.quiet)
    except BaseException:
        console.say(
            f"{evaluation.done} of {evaluation.total} measurements are in {kept.path}; this goes on from there:"
        )
        console.say(command_with(arguments, "eval", without=("--fresh",)))
        raise
    about = report.meta(engine, hardware.probe(), request)
    target.deliver(about, report.rows(evaluation.results(), request.tasks))


def _follow(evaluation: Evaluation, quiet: bool) -> None:
    from magicpig_cli.ui import console

    with console.Track("evaluating", quiet=quiet) as progress:
        for event in evaluation.run():
            progress.update(event.done, event.total, event.what)


def _warnings(engine: Engine, request: Request) -> Iterator[str]:
    from magicpig_cli.evals.suite import TEACHER_FORCED

    if set(request.tasks).isdisjoint(TEACHER_FORCED):
        return
    for text in request.texts:
        tokens = len(engine.codec.encode_raw(text.content[: 16 * max(request.contexts)]))
        if tokens < max(request.contexts):
            yield f"{text.name} has {tokens:,} tokens and begins again where a context is longer"


@dataclass(frozen=True, slots=True)
class _Target:
    """Where results go."""

    output: Path | None
    plot: Path | None
    as_json: bool
    quiet: bool

    def deliver(self, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Write the files, then print. Raises MagicpigError."""
        from magicpig_cli.evals import plot, report
        from magicpig_cli.ui import console
        from magicpig_cli.ui import eval as page

        document = report.as_json(meta, rows)
        try:
            if self.output is not None:
                forms = {".json": document, ".csv": report.as_csv(rows), ".md": report.as_markdown(rows)}
                write(self.output, forms[self.output.suffix.lower()].encode("utf-8", errors="replace"))
            if self.plot is not None:
                write(self.plot, plot.image(meta, rows, self.plot.suffix.lower()))
        finally:  # a full disk leaves at least what is printed
            if self.as_json:
                print(document, end="")
            else:
                page.print_tables(rows)
        if not self.quiet:
            for path in filter(None, (self.output, self.plot)):
                console.say(f"written: {path}")


def _target(output: Path | None, plot: Path | None, tasks: tuple[str, ...], *, as_json: bool, quiet: bool) -> _Target:
    """Everything about results that can be checked before there are any. Raises UsageError."""
    if output is not None:
        if output.suffix.lower() not in _FORMATS or is_stream(output):
            raise UsageError(f"--output {output} does not end in {', '.join(_FORMATS)}", hint="--output eval.json")
        want_writable("--output", output)
    if plot is not None:
        from magicpig_cli.evals.plot import refuse

        refuse(plot)
        if "kl" not in tasks:
            raise UsageError("--plot draws what the task kl measures", hint="--tasks kl")
        want_writable("--plot", plot)
    return _Target(output, plot, as_json, quiet)


def _split(option: str, text: str, example: str) -> list[str]:
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise UsageError(f"{option} names nothing", hint=f"{option} {example}")
    return parts


def _tasks(text: str) -> tuple[str, ...]:
    from magicpig_cli.evals.suite import NAMES

    names = _split("--tasks", text, "niah,kl")
    for name in names:
        if name not in NAMES:
            raise UsageError(f"--tasks {name} is unknown", hint=f"use some of {', '.join(NAMES)}")
    return tuple(names)


def _contexts(text: str) -> tuple[int, ...]:
    lengths = [length for part in _split("--context", text, "4k,8k") for length in parse_token_list(part)]
    if 0 in lengths:
        raise UsageError("a context of 0 tokens holds nothing", hint="--context 4k,8k")
    return tuple(sorted(set(lengths)))


def _budgets(text: str) -> list[float]:
    budgets = []
    for part in _split("--budget", text, "0.02,0.04"):
        try:
            budgets.append(float(part))
        except ValueError:
            raise UsageError(f"--budget {part} is not a number", hint="--budget 0.02,0.04") from None
        if not 0 < budgets[-1] <= 1:
            raise UsageError(f"--budget {part} is not a share between 0 and 1", hint="--budget 0.02,0.04")
    return budgets


def _attention(text: str | None) -> list[str]:
    """Modes beside exact attention: samplers and baselines."""
    known = [*SAMPLERS, "topk", "oracle"]
    if text is None:
        return known
    names = _split("--attention", text, "lsh,topk")
    for name in names:
        if name not in (*known, "exact"):
            raise UsageError(f"--attention {name} is unknown here", hint=f"use some of {', '.join(known)}")
    return names


def _plans(settings: Settings, modes: tuple[Mode, ...]) -> dict[Mode, Plan]:
    """What loading would plan for each sampler, from the config alone. Raises what loading raises before weights."""
    from magicpig_cli.model import loader
    from magicpig_cli.planning import plan_here

    loader.resolve_device(settings.model.device)
    config = loader.load_config(settings.model)
    loader.check_supported(config, settings.model.model)
    shape = loader.load_shape(config, settings.model)
    plan_here(shape, settings)

    def plan(mode: Mode) -> Plan:
        options = replace(settings.attention, mode=mode.name, budget=mode.budget)
        return plan_here(shape, replace(settings, attention=options))

    return {mode: plan(mode) for mode in modes if mode.name != "exact" and not mode.baseline}


@contextmanager
def _kept(engine: Engine, output: Path | None, *, fresh: bool) -> Iterator[Kept]:
    """What earlier runs have finished: beside the output, else in the cache directory, a file per model."""
    from magicpig_cli.evals.units import open_kept
    from magicpig_cli.model.source import cache_folder

    if output is not None:
        path = output.with_name(f"{output.stem}.units.jsonl")
    else:
        digest = hashlib.sha256(json.dumps(engine.identity, sort_keys=True, default=str).encode()).hexdigest()
        path = cache_folder() / "eval" / f"{digest[:24]}.jsonl"
    with open_kept(path, fresh=fresh) as kept:
        yield kept
