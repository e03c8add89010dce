"""`magicpig bench`: decode speed of sampled beside exact attention, in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.bench_target import FORMATS, Target, chosen_target
from magicpig_cli.cli.options import NoLive, Quiet, command_options
from magicpig_cli.cli.outputs import want_one_of
from magicpig_cli.config import SAMPLERS, Settings
from magicpig_cli.errors import ContextError, MemoryBudgetError, UsageError
from magicpig_cli.units import format_bytes, parse_token_list

if TYPE_CHECKING:
    from magicpig_cli.bench.measure import BenchRequest
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.planner import Plan

_FILLS = ("auto", "real", "tiled")
_MODES = ("exact", *SAMPLERS)
_DEFAULT_CONTEXT = 8192


@command_options("model", "attention", "weights", without=("attention",))
def bench(
    settings: Settings,
    contexts: Annotated[str | None, typer.Option(metavar="N,N…", help="Several contexts, like 8k,32k,96k.")] = None,
    batch_size: Annotated[str, typer.Option(metavar="N,N…", help="Sequences decoded together.")] = "1",
    attention: Annotated[
        str, typer.Option(metavar="MODE,MODE…", help="What to measure: lsh, rabitq, exact.")
    ] = "lsh,exact",
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Do not add exact attention.")] = False,
    gen_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per repetition; in the context.")] = 128,
    reps: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions; the modes take turns.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Untimed rounds before.")] = 1,
    fill: Annotated[str, typer.Option(metavar="|".join(_FILLS), help="How contexts are filled.")] = "auto",
    output_format: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(FORMATS),
            help="What is printed; by default as --output ends, else a table. On a GPU json also has launch_ms: what "
            "launching a step takes, operator by operator and as graphs.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there instead of stdout.")] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="OLD.json", help="Show what changed since a run with --output OLD.json.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png|-", help="Time against context: png, svg, pdf, or the terminal.")
    ] = None,
    quiet: Quiet = False,
    no_live: NoLive = False,
) -> None:
    """Measure decode speed with sampled and exact attention, in one run."""
    want_one_of("--fill", fill, _FILLS)
    lengths = _contexts(settings, contexts)
    if short := [n for n in lengths if n <= gen_tokens + 1]:
        raise UsageError(
            f"a context of {short[0]:,} tokens has no room for {gen_tokens} generated ones",
            hint="raise --context or lower --gen-tokens",
        )
    modes, batches = _modes(attention, no_baseline), _batches(batch_size)
    target = chosen_target(output_format, output, compare, plot, quiet)

    from magicpig_cli.bench.measure import BenchRequest
    from magicpig_cli.ui.loading import load_engine

    # Rows beyond the model's context say so; only a real fill could be mistaken for something the model can do.
    request = BenchRequest(lengths, batches, modes, gen_tokens, reps, warmup, fill)
    mode = next((mode for mode in modes if mode in SAMPLERS), "exact")
    settings = replace(
        settings,
        attention=replace(settings.attention, mode=mode),
        context=max(lengths),
        allow_extrapolation=True,
    )
    _check_room(_plan(settings), request)
    _measure(load_engine(settings, quiet=quiet), request, target, live=not no_live)


def _measure(engine: Engine, request: BenchRequest, target: Target, *, live: bool) -> None:
    """Measure row by row. However that ends, the rows that are finished are delivered."""
    from magicpig_cli import hardware
    from magicpig_cli.bench import report
    from magicpig_cli.ui import console

    wanted = len(request.contexts) * len(request.batch_sizes) * len(request.modes)
    about = {**report.meta(engine, hardware.probe()), "complete": False}
    rows: list[dict[str, Any]] = []

    def finished(row: dict[str, Any]) -> None:
        rows.append(row)
        target.keep(about, rows)  # at once: a process that the system kills for its memory says nothing any more

    try:
        _run(engine, request, target.quiet, live, finished)
        about["complete"] = True
    finally:
        if rows:
            target.deliver(about, rows)
            if len(rows) < wanted:
                console.say(f"{len(rows)} of {wanted} rows were finished")


def _contexts(settings: Settings, several: str | None) -> tuple[int, ...]:
    """Each context once, shortest first, so that memory runs out last where it does."""
    if several is not None and settings.context is not None:
        raise UsageError("--context and --contexts say the same thing twice", hint="--contexts 8k,32k,96k")
    if several is None:
        return (settings.context or _DEFAULT_CONTEXT,)
    lengths = parse_token_list(several)
    if not lengths:
        raise UsageError("--contexts names no context", hint="--contexts 8k,32k,96k")
    return tuple(sorted(set(lengths)))


def _modes(text: str, no_baseline: bool) -> tuple[str, ...]:
    """Modes in the order in which they are measured: the baseline first."""
    asked = {part.strip() for part in text.split(",") if part.strip()}
    for mode in sorted(asked):
        want_one_of("--attention", mode, _MODES)
    if not asked:
        raise UsageError("--attention names no mode", hint="--attention lsh,exact")
    if not no_baseline:
        asked.add("exact")
    return tuple(mode for mode in _MODES if mode in asked)


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--batch-size {text} is not a list of positive numbers", hint="--batch-size 1,4")
    return tuple(sorted({int(part) for part in parts}))


def _plan(settings: Settings) -> Plan:
    """What loading would plan, from the config alone. Raises what loading raises before it reads weights."""
    from magicpig_cli.model import loader
    from magicpig_cli.planning import plan_here

    loader.resolve_device(settings.model.device)
    config = loader.load_config(settings.model)
    loader.check_supported(config, settings.model.model)
    return plan_here(loader.load_shape(config, settings.model), settings)


def _check_room(plan: Plan, request: BenchRequest) -> None:
    """Refuse before loading and filling what cannot be measured. Raises ContextError or MemoryBudgetError."""
    longest, most = max(request.contexts), max(request.batch_sizes)
    if request.fill == "real" and longest > plan.shape.context:
        raise ContextError(
            f"a real fill of {longest:,} tokens exceeds the model's context of {plan.shape.context:,}",
            hint="--fill tiled measures speed beyond it",
        )
    one = plan.sequence_bytes(longest)
    for mode in request.modes:
        if mode not in ("exact", plan.mode):  # a fork with an index of its own
            other = replace(plan, mode=mode)  # type: ignore[arg-type]
            one += other.index_bytes(longest) + other.growth_bytes(longest) + other.window_bytes()
    if one * most > plan.budget_bytes:
        fitting = plan.budget_bytes // one
        raise MemoryBudgetError(
            f"{most} sequences of {longest:,} tokens need {format_bytes(one * most)} for keys, values and index, "
            f"and {format_bytes(plan.budget_bytes)} are free",
            hint=f"--batch-size {fitting} fits at this context" if fitting else "a smaller --context",
        )


def _run(
    engine: Engine, request: BenchRequest, quiet: bool, live: bool, finished: Callable[[dict[str, Any]], None]
) -> None:
    """Measure, and show how far it is; `finished` is called with every row.

    The view is drawn between steps, which are timed inside the engine.
    """
    from magicpig_cli.bench.measure import run_bench
    from magicpig_cli.ui.bench_progress import BenchView
    from magicpig_cli.ui.live import open_view

    slots = max(request.batch_sizes)
    with open_view(engine, wanted=live, quiet=quiet, what="filling the context", slots=slots) as view:
        progress = BenchView(view)
        for update in run_bench(engine, request):
            if isinstance(update, dict):
                finished(update)
            else:
                progress.show(update)
