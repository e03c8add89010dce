"""config.yaml: options that a user wants every time. Below the command line and the environment, above the defaults.

    model: ~/models/qwen      # any shared option, for every command that has it
    context: 32k
    batch:                    # any option of one command
      batch-size: 4

`magicpig doctor` names the file's place (platformdirs' config directory).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from magicpig_cli.config import APP_NAME
from magicpig_cli.errors import UsageError


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option of a command. `shared`: a key at the top of the file is meant for it too."""

    repeatable: bool
    shared: bool
    flag: bool = False  # true or false; any other option takes text, numbers or lists


# command (or `group subcommand`) → parameter's name → parameter
CommandParameters = Mapping[str, Mapping[str, Parameter]]


def config_path() -> Path:
    """Where config.yaml would be."""
    return platformdirs.user_config_path(APP_NAME) / "config.yaml"


def read_defaults(path: Path, shared: frozenset[str], commands: CommandParameters) -> dict[str, dict[str, Any]]:
    """Per command, the values that its parameters take when neither option nor environment gives one.

    Raises UsageError that names the file and the key, or the line that is no YAML.
    """
    content = _load(path)
    sections = {key: value for key, value in content.items() if key in commands}
    everywhere = {_name(key): value for key, value in content.items() if key not in commands}
    _check_keys(path, everywhere, shared | commands.keys(), "")
    defaults: dict[str, dict[str, Any]] = {}
    for command, parameters in commands.items():
        section = sections.get(command) or {}
        if not isinstance(section, dict):
            raise UsageError(
                f"{path}: {command} must hold options, not {section!r}", hint=f"{command}: {{option: value}}"
            )
        own = {_name(key): value for key, value in section.items()}
        _check_keys(path, own, frozenset(parameters), f"{command}: ")
        common = {name for name, parameter in parameters.items() if parameter.shared}
        chosen = {key: value for key, value in everywhere.items() if key in common} | own
        defaults[command] = {
            key: _as_typed(path, key, value, parameters[key]) for key, value in chosen.items() if value is not None
        }
    return defaults


def _load(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageError(f"cannot read {path}: {problem}") from problem

    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise UsageError(f"{path} is not YAML: {problem}") from problem
    if not isinstance(content, dict):
        if content is None:
            return {}
        raise UsageError(f"{path} holds {content!r}, not options", hint="write it like   context: 32k")
    return {str(key): value for key, value in content.items()}


def _name(key: object) -> str:
    return str(key).lstrip("-").replace("-", "_")


def _check_keys(path: Path, given: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise UsageError(
                f"{path}: {where}unknown key {key!r}",
                hint=f"did you mean {close[0]}?" if close else "see the options in magicpig COMMAND --help",
            )


def _as_typed(path: Path, key: str, value: Any, parameter: Parameter) -> Any:
    """As if typed on the command line, so that one parser reads both. Flags stay what they are."""
    if isinstance(value, dict) or isinstance(value, bool) != parameter.flag:
        wanted = "true or false" if parameter.flag else "a value"
        raise UsageError(f"{path}: {key} is {value!r}, not {wanted}", hint="quote text that looks like something else")
    if parameter.repeatable:
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)
