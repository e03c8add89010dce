"""`magicpig tune-kl`: choose (K, L) and dense layers, or a budget, for this model here by measured error and time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from magicpig_cli.cli.options import AsJson, Quiet, command_options
from magicpig_cli.config import Settings
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from collections.abc import Generator

    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.events import Working
    from magicpig_cli.hardware import Hardware
    from magicpig_cli.profiles import Profile
    from magicpig_cli.tuning.grid import Grid
    from magicpig_cli.tuning.search import Goal
    from magicpig_cli.tuning.text import Texts
    from magicpig_cli.tuning.trial import Notice
    from magicpig_cli.tuning.tune import Tuned

_DEFAULT_ERROR = 0.05
_DEFAULT_CONTEXT = "32k"  # or the model's own, where that is shorter
_DEFAULT_TEXT = "pydoc_data.topics"


@command_options("model", "attention", without=("attention", "K", "L", "budget", "target_error"))
def tune_kl(
    settings: Settings,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration text; by default Python's help topics.")
    ] = None,
    target_error: Annotated[
        float | None,
        typer.Option(metavar="X", help="Relative error of attention outputs to reach, fastest (default 0.05)."),
    ] = None,
    target_ratio: Annotated[
        float | None, typer.Option(metavar="X", help="Share of keys to sample at most, most accurate; like 0.02.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The index of one sequence takes at most so much, like 32GiB.")
    ] = None,
    grid: Annotated[
        str | None, typer.Option(metavar="K=A..B,L=A..B", help="What to try; L=50..300:25 takes steps of 25.")
    ] = None,
    save_profile: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write the result as a profile of yours.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Choose how to sample, with which tables or budget, for a model on this machine."""
    error, ratio = _target(target_error, target_ratio)
    limit = _memory(memory)
    content = _read(text)
    from magicpig_cli.tuning.grid import DEFAULT_GRID, parse_grid

    sizes = parse_grid(DEFAULT_GRID if grid is None else grid)
    if save_profile is not None:
        from magicpig_cli.profiles.files import check_name

        check_name(save_profile)

    from magicpig_cli import hardware
    from magicpig_cli.tuning.search import Goal
    from magicpig_cli.tuning.text import split_text
    from magicpig_cli.ui import console
    from magicpig_cli.ui.loading import load_engine

    settings = _settled(settings)
    engine = load_engine(settings, quiet=quiet)
    machine = hardware.probe()
    context = engine.context
    texts = split_text(engine.codec, content, _DEFAULT_TEXT if text is None else str(text), context)
    if texts.repeated and not quiet:
        console.warn(f"{texts.source} is shorter than two texts of {context:,} tokens: each half is read twice")
    base = _profile_in_use(machine, settings, engine)
    tuned = _run(engine, machine, texts, Goal(error, ratio, limit), sizes, quiet)
    saved = None
    if save_profile is not None:
        saved = _save(engine, tuned, base, machine, save_profile)
    _tell(engine, tuned, save_profile if saved else None, saved, as_json=as_json, quiet=quiet)


def _target(error: float | None, ratio: float | None) -> tuple[float | None, float | None]:
    """One of the two; the default error where neither is given."""
    if error is not None and ratio is not None:
        raise UsageError("--target-error and --target-ratio exclude each other", hint="give one of them")
    for option, value in (("--target-error", error), ("--target-ratio", ratio)):
        if value is not None and not (math.isfinite(value) and 0 < value < 1):
            raise UsageError(f"{option} {value} is not between 0 and 1", hint=f"{option} 0.05")
    return (_DEFAULT_ERROR if ratio is None and error is None else error), ratio


def _memory(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        limit = parse_bytes(text)
    except UsageError as problem:
        raise UsageError(f"--memory: {problem.message}", hint=problem.hint) from None
    if limit == 0:
        raise UsageError("--memory 0 leaves no room for tables", hint="--memory 32GiB")
    return limit


def _read(path: Path | None) -> str:
    from magicpig_cli.corpus import natural_text, read_text

    return natural_text() if path is None else read_text(path)


def _settled(settings: Settings) -> Settings:
    """Exact attention, which predictions are made from, and a context that can be read in reasonable time."""
    context = settings.context
    if context is None:
        from magicpig_cli.model import loader
        from magicpig_cli.model.shape import shape_from_config

        config = loader.load_config(settings.model)
        loader.check_supported(config, settings.model.model)
        context = min(parse_tokens(_DEFAULT_CONTEXT), shape_from_config(config).context)
    return replace(settings, context=context, attention=replace(settings.attention, mode="exact"))


def _profile_in_use(machine: Hardware, settings: Settings, engine: Engine) -> Profile:
    from magicpig_cli.planning import profile_for

    return profile_for(machine, settings, engine.model_name)[0]


def _run(engine: Engine, machine: Hardware, texts: Texts, goal: Goal, grid: Grid, quiet: bool) -> Tuned:
    from magicpig_cli.planning import speeds_here
    from magicpig_cli.tuning.tune import tune
    from magicpig_cli.ui import console

    speeds = speeds_here(
        machine,
        engine.threads,
        engine.settings.model.device,
        lambda: None if quiet else console.say("measuring this machine, once: 2 s"),
    )
    if speeds is None:
        raise MagicpigError("this machine could not be measured: too little memory", hint="magicpig doctor")
    return _follow(tune(engine, texts, engine.context, goal, grid, speeds), quiet)


def _follow(work: Generator[Working | Notice, None, Tuned], quiet: bool) -> Tuned:
    """Show progress until the result is there."""
    from magicpig_cli.events import Working
    from magicpig_cli.ui import console

    with console.Track("tuning", quiet=quiet) as progress:
        while True:
            try:
                event = next(work)
            except StopIteration as end:
                tuned: Tuned = end.value
                return tuned
            if isinstance(event, Working):
                progress.update(event.done, event.total, event.what)
            else:
                progress.note(event.text)


def _save(engine: Engine, tuned: Tuned, base: Profile, machine: Hardware, name: str) -> Path:
    from magicpig_cli import profiles
    from magicpig_cli.tuning.report import as_profile

    return profiles.save(as_profile(engine, tuned, base, machine, name), name)


def _tell(engine: Engine, tuned: Tuned, profile: str | None, path: Path | None, *, as_json: bool, quiet: bool) -> None:
    from magicpig_cli.tuning import report
    from magicpig_cli.ui import console

    if as_json:
        print(json.dumps(report.as_json(engine, tuned, profile)))
    else:
        console.print_table(report.COLUMNS, report.table_rows(tuned), right=report.RIGHT)
        print()
        for line in report.verdict(engine, tuned, profile):
            print(console.printable(line))
    if quiet:
        return
    for line in report.layer_lines(tuned):
        console.detail(line)
    if path is not None:
        console.say(f"profile {profile}: {path}")
