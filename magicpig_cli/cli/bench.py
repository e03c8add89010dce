"""`magicpig bench`: decode speed of sampled beside exact attention, in one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.options import NoLive, Quiet, command_options
from magicpig_cli.config import Settings
from magicpig_cli.errors import ContextError, MemoryBudgetError, UsageError
from magicpig_cli.units import format_bytes, parse_token_list

if TYPE_CHECKING:
    from magicpig_cli.bench.measure import BenchRequest
    from magicpig_cli.engine.engine import Engine

_FORMATS = ("table", "md", "csv", "json", "jsonl")
_FILLS = ("auto", "real", "tiled")
_MODES = ("exact", "lsh")
_DEFAULT_CONTEXT = 8192


@command_options("model", "attention", "weights", without=("attention",))
def bench(
    settings: Settings,
    contexts: Annotated[str | None, typer.Option(metavar="N,N…", help="Several contexts, like 8k,32k,96k.")] = None,
    batch_size: Annotated[str, typer.Option(metavar="N,N…", help="Sequences decoded together.")] = "1",
    attention: Annotated[str, typer.Option(metavar="MODE,MODE…", help="What to measure: lsh, exact.")] = "lsh,exact",
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Do not add exact attention.")] = False,
    gen_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per repetition; in the context.")] = 128,
    reps: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions; the modes take turns.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Untimed rounds before.")] = 1,
    fill: Annotated[str, typer.Option(metavar="|".join(_FILLS), help="How contexts are filled.")] = "auto",
    output_format: Annotated[str, typer.Option(metavar="|".join(_FORMATS), help="What is printed.")] = "table",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there instead of stdout.")] = None,
    quiet: Quiet = False,
    no_live: NoLive = False,
) -> None:
    """Measure decode speed with sampled and exact attention, in one run."""
    _want_one_of("--output-format", output_format, _FORMATS)
    _want_one_of("--fill", fill, _FILLS)
    lengths = _contexts(settings, contexts)
    if short := [n for n in lengths if n <= gen_tokens + 1]:
        raise UsageError(
            f"a context of {short[0]:,} tokens has no room for {gen_tokens} generated ones",
            hint="raise --context or lower --gen-tokens",
        )
    modes, batches = _modes(attention, no_baseline), _batches(batch_size)
    if output is not None:
        _want_writable(output)

    from magicpig_cli.bench.measure import BenchRequest
    from magicpig_cli.ui.loading import load_engine

    # Rows beyond the model's context say so; only a real fill could be mistaken for something the model can do.
    request = BenchRequest(lengths, batches, modes, gen_tokens, reps, warmup, fill)
    mode = "lsh" if "lsh" in modes else "exact"
    settings = replace(
        settings,
        attention=replace(settings.attention, mode=mode),
        context=max(lengths),
        allow_extrapolation=True,
    )
    engine = load_engine(settings, quiet=quiet)
    _check_room(engine, request)
    chosen = output_format if output_format != "table" or output is None else "md"
    text = _report(engine, request, chosen, quiet, live=not no_live)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    elif text:
        print(text, end="")


def _want_one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value} is unknown", hint=f"use one of {', '.join(allowed)}")


def _want_writable(output: Path) -> None:
    """Refuse now what would lose the results at the end."""
    try:
        with output.open("a", encoding="utf-8"):
            pass
    except OSError as problem:
        raise UsageError(
            f"cannot write {output}: {problem.strerror}", hint="--output FILE in a folder of yours"
        ) from None


def _contexts(settings: Settings, several: str | None) -> tuple[int, ...]:
    if several is not None and settings.context is not None:
        raise UsageError("--context and --contexts say the same thing twice", hint="--contexts 8k,32k,96k")
    if several is None:
        return (settings.context or _DEFAULT_CONTEXT,)
    lengths = parse_token_list(several)
    if not lengths:
        raise UsageError("--contexts names no context", hint="--contexts 8k,32k,96k")
    return tuple(lengths)


def _modes(text: str, no_baseline: bool) -> tuple[str, ...]:
    """Modes in the order in which they are measured: the baseline first."""
    asked = {part.strip() for part in text.split(",") if part.strip()}
    for mode in sorted(asked):
        _want_one_of("--attention", mode, _MODES)
    if not no_baseline:
        asked.add("exact")
    if not asked:
        raise UsageError("--attention names no mode", hint="--attention lsh,exact")
    return tuple(mode for mode in _MODES if mode in asked)


def _batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--batch-size {text} is not a list of positive numbers", hint="--batch-size 1,4")
    return tuple(sorted({int(part) for part in parts}))


def _check_room(engine: Engine, request: BenchRequest) -> None:
    """Refuse before filling what cannot be measured."""
    longest, most = max(request.contexts), max(request.batch_sizes)
    if request.fill == "real" and longest > engine.shape.context:
        raise ContextError(
            f"a real fill of {longest:,} tokens exceeds the model's context of {engine.shape.context:,}",
            hint="--fill tiled measures speed beyond it",
        )
    need = engine.plan.sequence_bytes(longest) * most
    if need > engine.plan.budget_bytes:
        raise MemoryBudgetError(
            f"{most} sequences of {longest:,} tokens need {format_bytes(need)} for keys, values and index, "
            f"and {format_bytes(engine.plan.budget_bytes)} are free",
            hint="a smaller --context or --batch-size",
        )


def _report(engine: Engine, request: BenchRequest, output_format: str, quiet: bool, live: bool) -> str:
    """Run, and return the document; a table is printed at the end instead and "" returned."""
    from magicpig_cli import hardware
    from magicpig_cli.bench import report

    about = report.meta(engine, hardware.probe())
    rows = _run(engine, request, quiet, live)
    if output_format != "table":
        writers = {"md": report.as_markdown, "csv": report.as_csv, "json": report.as_json, "jsonl": report.as_jsonl}
        return writers[output_format](about, rows)
    from magicpig_cli.ui import console

    # What is the same in every row is said once, so that the rest fits a terminal.
    cells = [report.cells(about, row) for row in rows]
    same = {i for i, name in enumerate(report.COLUMNS) if name in report.RUN_COLUMNS}
    console.print_table(
        [name for i, name in enumerate(report.COLUMNS) if i not in same],
        [[cell for i, cell in enumerate(line) if i not in same] for line in cells],
    )
    console.say(" · ".join(f"{report.COLUMNS[i]} {cells[0][i]}" for i in sorted(same)))
    return ""


def _run(engine: Engine, request: BenchRequest, quiet: bool, live: bool) -> list[dict[str, Any]]:
    """Measure, and show how far it is. The view is drawn between steps, which are timed inside the engine."""
    from magicpig_cli.bench.measure import run_bench
    from magicpig_cli.ui.bench_progress import BenchView
    from magicpig_cli.ui.live import open_view

    rows: list[dict[str, Any]] = []
    slots = max(request.batch_sizes)
    with open_view(engine, wanted=live, quiet=quiet, what="filling the context", slots=slots) as view:
        progress = BenchView(view)
        for update in run_bench(engine, request):
            if isinstance(update, dict):
                rows.append(update)
            else:
                progress.show(update)
    return rows
