"""The options that commands share, each defined once, and the decorator that gives them to a command.

    @command_options("model", "attention")
    def bench(settings: Settings, reps: Annotated[int, typer.Option()] = 5) -> None: ...

The command receives ready Settings. Values come from the option, else `MAGICPIG_<NAME>`, else config.yaml; what is
nowhere is left to the profile (`magicpig_cli.profiles`) and the defaults of `magicpig_cli.config`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from magicpig_cli.config import MAX_BITS, MAX_K, MAX_L, MAX_SEED, REPETITION_PENALTY_RANGE, SAMPLERS, Settings
from magicpig_cli.errors import UsageError
from magicpig_cli.ui import console
from magicpig_cli.units import parse_context

ENV_PREFIX = "MAGICPIG_"
_PANELS = {"system": "Generation", "weights": "Model"}  # of --help; the others are named like their group


def _choice(*values: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in values:
            raise UsageError(f"{text!r} is unknown", hint=f"use one of {', '.join(values)}")
        return text

    return check


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise UsageError(f"{text!r} is not a device", hint="use auto, cpu, cuda or cuda:0")
    return text


def _layers(text: str) -> tuple[int, ...] | None:
    """`0,16` → (0, 16); `auto` → None; `none` → no layer."""
    text = text.strip().lower()
    if text == "auto":
        return None
    if text in ("", "none"):
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(f"{text!r} is not a list of layer numbers", hint="write it like 0,16, auto or none")
    return tuple(sorted({int(part) for part in parts}))


def _share(value: float) -> float:
    """0 is what nobody can mean, and the limits of a parser include it."""
    if value <= 0:
        raise UsageError(f"{value:g} is not above 0", hint="write a share of the keys like 0.02")
    return value


def _bits(value: int) -> int:
    if value % 32:
        raise UsageError(f"{value} is not a multiple of 32", hint="use 64, 128 or 256")
    return value


def _profile(text: str) -> str:
    """Found now, so that a slip is answered before anything heavy is loaded."""
    from magicpig_cli import profiles

    profiles.find(text)
    return text


def _file_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise UsageError(f"cannot read {path}: {reason}") from problem


def _stop_texts(texts: list[str]) -> tuple[str, ...]:
    if "" in texts:
        raise UsageError("an empty text would end every answer at once", hint='--stop "###"')
    return tuple(texts)


def _unsplit(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """An environment variable is one value of a repeatable option; the parser would split it at its spaces."""
    source = context.get_parameter_source(parameter.name or "")
    if source is not None and source.name == "ENVIRONMENT":
        return [os.environ[str(parameter.envvar)]]
    return value


def _text_or_file(text: str) -> str:
    return _file_text(text[1:]) if text.startswith("@") else text


@dataclass(frozen=True, slots=True)
class SharedOption:
    """One option. `field` is where its value goes in Settings: `context`, or `model.device` one level down."""

    group: str
    field: str
    kind: Any  # str, int, float, bool (a flag that is off by default) or list[str] (repeatable)
    spellings: tuple[str, ...]
    help: str
    parse: Callable[[Any], Any] | None = None
    metavar: str | None = None
    min: float | None = None
    max: float | None = None

    @property
    def name(self) -> str:
        """Name of the parameter, of the key in config.yaml, and in upper case of the environment variable."""
        long = [spelling for spelling in self.spellings if spelling.startswith("--")]
        return (long[0] if long else self.spellings[0]).lstrip("-").replace("-", "_")

    def parameter(self) -> inspect.Parameter:
        """As a keyword of a command's signature; None or False means: not given."""
        option = typer.Option(
            *self.spellings, help=self.help, metavar=self.metavar, min=self.min, max=self.max, show_default=False,
            envvar=ENV_PREFIX + self.name.upper(), show_envvar=False,
            rich_help_panel=_PANELS.get(self.group, self.group.capitalize()),
            callback=_unsplit if self.kind == list[str] else None,
        )  # fmt: skip
        kind = bool if self.kind is bool else self.kind | None
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option],
            default=False if self.kind is bool else None,
        )  # fmt: skip

    def value(self, given: Any) -> Any:
        """What was given, as Settings want it. Raises UsageError that names the option."""
        try:
            if isinstance(given, float) and not math.isfinite(given):  # it passes every comparison with a limit
                raise UsageError(f"{given} is not a finite number")
            return given if self.parse is None else self.parse(given)
        except UsageError as problem:
            spelling = next((s for s in self.spellings if s.startswith("--")), self.spellings[0])
            raise UsageError(f"{spelling}: {problem.message}", hint=problem.hint) from problem


SHARED_OPTIONS = (
    SharedOption("model", "model.model", str, ("-m", "--model"), metavar="MODEL",
        help="Hub id, local directory, .gguf file, or demo (the default)."),
    SharedOption("model", "model.revision", str, ("--revision",), metavar="NAME",
        help="Branch, tag or commit of a Hub model."),
    SharedOption("model", "model.device", str, ("--device",), parse=_device, metavar="auto|cpu|cuda[:N]",
        help="Where weights and linear layers run."),
    SharedOption("model", "model.dtype", str, ("--dtype",), metavar="auto|bfloat16|float32",
        parse=_choice("auto", "bfloat16", "float32"),
        help="Number type of the weights; auto is bfloat16, but on a CPU only if the model's own is. "
        "There --quantize auto goes before it with a .gguf file of 4 bits."),
    SharedOption("model", "model.quantize", str, ("--quantize",), metavar="auto|none|int8|int4",
        parse=_choice("auto", "none", "int8", "int4"),
        help="Store linear layers in 8 or 4 bits: less memory, a little less accurate; faster but for int8 on a GPU. "
        "auto: in 4 bits what a .gguf file has in 4 bits, on a CPU and without --dtype; else none."),
    SharedOption("model", "model.no_cuda_graphs", bool, ("--no-cuda-graphs",),
        help="Without CUDA graphs, on a GPU: every operator of a step is launched by itself; slower, less GPU memory."),
    SharedOption("model", "context", str, ("-c", "--context", "--ctx-size"), parse=parse_context, metavar="TOKENS|auto",
        help="Longest sequence, like 96k; auto is the model's own context, or what fits in memory."),
    SharedOption("model", "allow_extrapolation", bool, ("--allow-extrapolation",),
        help="Allow a context beyond the one that the model was made for."),
    SharedOption("model", "model.chat_template", str, ("--chat-template",), parse=_file_text, metavar="FILE",
        help="Jinja chat template instead of the model's own."),
    SharedOption("model", "threads", int, ("-t", "--threads"), min=1, max=1024, metavar="N",
        help="CPU threads; by default the physical cores that this process may use."),
    SharedOption("model", "profile", str, ("--profile",), parse=_profile, metavar="NAME|FILE",
        help="Hardware profile; by default the one that matches this machine best (see magicpig doctor)."),
    SharedOption("model", "model.offline", bool, ("--offline",), help="Use only what is on this machine."),
    SharedOption("model", "model.trust_remote_code", bool, ("--trust-remote-code",),
        help="Run Python code that comes with a Hub model."),
    SharedOption("attention", "attention.mode", str, ("--attention",), metavar="auto|lsh|rabitq|exact",
        parse=_choice("auto", *SAMPLERS, "exact"),
        help="Decode attention: sampled by hash tables (lsh) or by signatures (rabitq), exact, or auto: sampled for "
        "long sequences only."),
    SharedOption("attention", "attention.K", int, ("-K",), min=1, max=MAX_K, metavar="BITS",
        help="lsh: bits per hash table: more sample fewer keys (default: the profile's for the context)."),
    SharedOption("attention", "attention.L", int, ("-L",), min=2, max=MAX_L, metavar="TABLES",
        help="lsh: hash tables: more sample more keys and cost memory (default: the profile's for the context)."),
    SharedOption("attention", "attention.budget", float, ("--budget",), min=0, max=1, parse=_share, metavar="SHARE",
        help="rabitq: share of the keys that is sampled (default: the profile's, else 0.02)."),
    SharedOption("attention", "attention.tail", float, ("--tail",), min=0, max=1, metavar="SHARE",
        help="Share of the sampled keys that is drawn uniformly (default 0)."),
    SharedOption("attention", "attention.bits", int, ("--bits",), min=32, max=MAX_BITS, parse=_bits, metavar="BITS",
        help="rabitq: bits per key in the index, a multiple of 32 (default 128)."),
    SharedOption("attention", "attention.target_error", float, ("--target-error",), min=0, parse=_share, metavar="E",
        help="rabitq: move each head's budget until its estimated error is below, like 0.05."),
    SharedOption("attention", "attention.signatures", str, ("--signatures",), metavar="auto|host|device",
        parse=_choice("auto", "host", "device"),
        help="rabitq, beside a GPU: who compares signatures with queries; device keeps a copy of them in GPU memory. "
        "auto is host."),
    SharedOption("attention", "attention.sink", int, ("--sink",), min=0, metavar="N",
        help="First tokens that are always attended exactly (default 4)."),
    SharedOption("attention", "attention.local", int, ("--local",), min=1, metavar="N",
        help="Most recent tokens that are always attended exactly (default 64)."),
    SharedOption("attention", "attention.dense_layers", str, ("--dense-layers",), parse=_layers,
        metavar="0,16|auto|none", help="Layers that are never sampled; auto: the profile's, in shipped ones layer 0."),
    SharedOption("attention", "attention.kv_dtype", str, ("--kv-dtype",), metavar="auto|float32|bfloat16|int8",
        parse=_choice("auto", "float32", "bfloat16", "int8"),
        help="Number type of keys and values in host memory; auto is bfloat16, int8 takes half of that."),
    SharedOption("attention", "attention.hash_seed", int, ("--hash-seed",), min=0, max=MAX_SEED, metavar="N",
        help="Seed of hash tables, rotations and what is drawn uniformly (default 0)."),
    SharedOption("generation", "generation.max_tokens", int, ("-n", "--max-tokens", "--max-new-tokens"), min=1,
        metavar="N", help="Longest answer (default: the model's own, else 512)."),
    SharedOption("generation", "generation.temperature", float, ("--temperature", "--temp"), min=0, metavar="X",
        help="0 always takes the likeliest token (default: the model's own, else 0.7)."),
    SharedOption("generation", "generation.top_p", float, ("--top-p",), min=0, max=1, metavar="P",
        help="Draw from the likeliest tokens that together have this probability."),
    SharedOption("generation", "generation.top_k", int, ("--top-k",), min=-1, metavar="N",
        help="Draw from this many likeliest tokens; 0 is all."),
    SharedOption("generation", "generation.min_p", float, ("--min-p",), min=0, max=1, metavar="P",
        help="Drop tokens less likely than this share of the likeliest."),
    SharedOption("generation", "generation.repetition_penalty", float, ("--repetition-penalty",), metavar="X",
        min=REPETITION_PENALTY_RANGE[0], max=REPETITION_PENALTY_RANGE[1],
        help="Above 1: tokens that were there before become less likely."),
    SharedOption("generation", "generation.stop", list[str], ("--stop",), metavar="TEXT", parse=_stop_texts,
        help="Text that ends the answer; may be repeated."),
    SharedOption("generation", "generation.seed", int, ("--seed",), min=0, max=MAX_SEED, metavar="N",
        help="Seed of drawing tokens (default: drawn and reported; in a batch 0, mixed with each line's id)."),
    SharedOption("system", "system", str, ("-s", "--system", "--system-prompt"), parse=_text_or_file,
        metavar="TEXT|@FILE", help="System prompt, or @ and the file that holds it."),
    SharedOption("weights", "model.load_format", str, ("--load-format",), metavar="auto|dummy",
        parse=_choice("auto", "dummy"), help="dummy: random weights from the config alone, to measure speed."),
)  # fmt: skip

# Names that config.yaml may hold for all commands at once: the options above, and NoLive.
SHARED_NAMES = frozenset({option.name for option in SHARED_OPTIONS} | {"no_live"})
GROUPS = tuple(dict.fromkeys(option.group for option in SHARED_OPTIONS))

Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, notices or statistics.")]
NoLive = Annotated[
    bool,
    typer.Option("--no-live", envvar=ENV_PREFIX + "NO_LIVE", show_envvar=False, help="No live panel, only progress."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _on_verbose(on: bool) -> bool:
    if on:
        console.set_verbose(True)
    return on


def _on_debug(on: bool) -> bool:
    if on:
        console.set_debug(True)
    return on


_EVERYWHERE = (
    inspect.Parameter(
        "verbose", inspect.Parameter.KEYWORD_ONLY, default=False,
        annotation=Annotated[bool, typer.Option("-v", "--verbose", callback=_on_verbose, is_eager=True,
            envvar=ENV_PREFIX + "VERBOSE", show_envvar=False, help="Say what was chosen and why.")],
    ),
    inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False,
        annotation=Annotated[bool, typer.Option("--debug", callback=_on_debug, is_eager=True,
            envvar=ENV_PREFIX + "DEBUG", show_envvar=False, help="Show tracebacks.")],
    ),
)  # fmt: skip


def command_options(
    *groups: str, without: tuple[str, ...] = (), only: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of these groups (see GROUPS), -v and --debug to a command; `without` names options to leave out,
    `only` those to take.

    The command's parameter `settings`, if it has one, receives their values as Settings.
    """
    unknown = set(groups) - set(GROUPS)
    assert not unknown, f"no option group {unknown}"
    shared = [
        option
        for option in SHARED_OPTIONS
        if option.group in groups and option.name not in without and (not only or option.name in only)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for parameter in _EVERYWHERE:
                values.pop(parameter.name)
            given = {option: values.pop(option.name) for option in shared}
            if "settings" in own:
                values["settings"] = build_settings(given)
                if "profile" in {option.name for option in shared} and values["settings"].profile is None:
                    _warn_of_broken_profiles()
            command(**values)

        parameters = [parameter for name, parameter in own.items() if name != "settings"]
        parameters += [option.parameter() for option in shared]
        parameters = sorted([*parameters, *_EVERYWHERE], key=lambda parameter: parameter.kind)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _warn_of_broken_profiles() -> None:
    """A user's profile that cannot be read is passed over, but not in silence."""
    from magicpig_cli import profiles

    for problem in profiles.broken_user_profiles():
        console.warn(f"profile passed over: {problem.message}" + (f" ({problem.hint})" if problem.hint else ""))


def build_settings(given: dict[SharedOption, Any]) -> Settings:
    """Settings with the given values in place; None, False and [] mean that nothing was given. Raises UsageError."""
    changes: dict[str, dict[str, Any]] = {}
    for option, raw in given.items():
        if raw is None or raw is False or raw == []:
            continue
        part, _, name = option.field.rpartition(".")
        changes.setdefault(part, {})[name] = option.value(raw)
    settings = replace(Settings(), **changes.pop("", {}))
    parts = {field.name for field in fields(Settings)}
    for part, values in changes.items():
        assert part in parts, f"Settings has no part {part}"
        settings = replace(settings, **{part: replace(getattr(settings, part), **values)})
    return settings
