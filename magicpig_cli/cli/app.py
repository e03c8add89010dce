"""The command line: which commands there are, and how a run ends (exit codes of CLI.md).

A command's module imports nothing heavy at its top; torch and transformers come in inside the function, so `--help`
answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from typing import Annotated, Any

import typer

import magicpig_cli
from magicpig_cli.cli.config_file import Parameter, config_path, read_defaults
from magicpig_cli.cli.options import SHARED_NAMES
from magicpig_cli.errors import INTERRUPTED, UNREAD, MagicpigError, UsageError
from magicpig_cli.ui import console

# Modules of this package, with `_` for `-`; `models` is a group.
COMMANDS = ("chat", "batch", "bench", "tune-kl", "eval", "doctor", "models")
_ASKS_FOR_HELP = frozenset({"-h", "--help", "--version"})

# Typer carries a click of its own since 0.26 and uses the package before; either way this is its error class.
_ParseError: type[Any] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"magicpig {magicpig_cli.__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Chat with and batch-process very long documents, on a CPU or a consumer GPU."""
    if debug:
        console.set_debug(True)
    if context.invoked_subcommand is None:
        print(context.get_help())


def build_app() -> typer.Typer:
    """The app with all commands."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
    )
    app.callback(invoke_without_command=True)(_root)
    for name in COMMANDS:
        module = name.replace("-", "_")
        command = getattr(importlib.import_module(f"magicpig_cli.cli.{module}"), module)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def _parameters(command: Any, prefix: str = "") -> dict[str, dict[str, Parameter]]:
    """What config.yaml may set, per command or `group subcommand`. Shared options are those with a variable."""
    found: dict[str, dict[str, Parameter]] = {}
    for name, sub in getattr(command, "commands", {}).items():
        path = f"{prefix}{name}"
        found[path] = {
            option.name: Parameter(
                repeatable=option.nargs != 1 or option.multiple,
                shared=option.envvar is not None,
                flag=bool(getattr(option, "is_flag", False)),
            )
            for option in _options_of(sub)
        }
        found |= _parameters(sub, f"{path} ")
    return found


def _options_of(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def _default_map(command: Any, arguments: list[str]) -> dict[str, Any]:
    """config.yaml as click wants it: nested by command. A broken file must not stand in the way of `--help`."""
    if not _ASKS_FOR_HELP.isdisjoint(arguments):
        return {}
    nested: dict[str, Any] = {}
    for path, values in read_defaults(config_path(), SHARED_NAMES, _parameters(command)).items():
        place = nested
        for name in path.split():
            place = place.setdefault(name, {})
        place.update(values)
    return nested


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. A command finds the arguments as its context's `obj`."""
    console.set_verbose(False)
    console.set_debug(False)
    if sys.stderr is None:  # closed by whoever started this: notices go nowhere
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return _report(MagicpigError("stdout is closed, so answers have nowhere to go", hint="> FILE, or -o FILE"))
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
        return code
    except (KeyboardInterrupt, typer.Abort):
        with console.lasting_stderr():
            console.say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return UNREAD
    except Exception as problem:
        with console.lasting_stderr():
            return _report(problem)


def _invoke(arguments: list[str]) -> int:
    """Do what the command line says; returns its exit code. Raises whatever ends it early."""
    command = typer.main.get_command(build_app())
    try:
        defaults = _default_map(command, arguments)
        with command.make_context("magicpig", list(arguments), default_map=defaults, obj=arguments) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return ending.exit_code
    except SystemExit as ending:
        if isinstance(ending.__context__, BrokenPipeError):  # so Rich, which prints the help, tells of it
            raise BrokenPipeError from None
        raise
    return 0


def _report(problem: Exception) -> int:
    """Tell what went wrong: the cause and a hint, or the traceback with --debug."""
    if isinstance(problem, _ParseError):
        context = getattr(problem, "ctx", None)
        where = context.command_path if context else "magicpig"
        console.error(UsageError(problem.format_message(), hint=f"{where} --help"))
        return UsageError.exit_code
    if console.debugging():
        traceback.print_exception(problem)
    if isinstance(problem, MagicpigError):
        console.error(problem)
        return problem.exit_code
    hint = None if console.debugging() else "run it again with --debug for the traceback"
    console.error(MagicpigError(f"{type(problem).__name__}: {problem}", hint=hint))
    return MagicpigError.exit_code


def main() -> None:
    """Entry point: ends the process with the exit code."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that is not UTF-8
    code = run(sys.argv[1:])
    console.leave_streams()
    sys.exit(code)
