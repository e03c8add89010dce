"""Profiles on disk: the shipped ones, a user's own, any file; and writing one so that no half of it is ever seen."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from magicpig_cli.config import APP_NAME
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.files import replace_file
from magicpig_cli.profiles.profile import BUILT_IN, Profile
from magicpig_cli.profiles.schema import closest, did_you_mean, from_document, to_document

SUFFIX = ".yaml"
MAX_FILE_BYTES = 1 << 18  # a profile is some kilobytes; what is larger is something else
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_HEADER = "# Hardware profile of magicpig. What the keys mean: docs/profiles.md in its source.\n"


def shipped_folder() -> Path:
    """Inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "data" / "profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def user_folder() -> Path:
    """Where a user's own profiles lie; it need not exist."""
    import platformdirs

    return platformdirs.user_data_path(APP_NAME) / "profiles"


@functools.cache
def shipped() -> tuple[Profile, ...]:
    """All profiles that come with the program, by name."""
    return tuple(load(path) for path in sorted(shipped_folder().glob("*" + SUFFIX)))


def user_profiles() -> tuple[Profile, ...]:
    """The user's profiles that can be read, by name."""
    return _read_user_folder()[0]


def broken_user_profiles() -> tuple[UsageError, ...]:
    """What is wrong with those that cannot be read, one error per file."""
    return _read_user_folder()[1]


def _user_files() -> dict[str, Path]:
    return {path.stem: path for path in user_folder().glob("*" + SUFFIX)}


def _read_user_folder() -> tuple[tuple[Profile, ...], tuple[UsageError, ...]]:
    good: list[Profile] = []
    bad: list[UsageError] = []
    for _, path in sorted(_user_files().items()):
        try:
            good.append(load(path))
        except UsageError as problem:
            bad.append(problem)
    return tuple(good), tuple(bad)


def find(name_or_file: str) -> Profile:
    """The profile of this name (the user's own first, then shipped, then `built-in`), or in this file.

    Raises UsageError: there is none (lists what there is), or it is broken.
    """
    path = Path(os.path.expanduser(name_or_file))
    if path.suffix in (SUFFIX, ".yml") or path.name != name_or_file:
        return load(path)
    if name_or_file == BUILT_IN.name:
        return BUILT_IN
    own = _user_files()
    if name_or_file in own:
        return load(own[name_or_file])
    coming = {profile.name: profile for profile in shipped()}
    if name_or_file in coming:
        return coming[name_or_file]
    names = sorted({*own, *coming, BUILT_IN.name})
    raise UsageError(
        f"there is no profile {name_or_file!r}; there are {', '.join(names)}", hint=_instead(name_or_file, names)
    )


def _instead(name: str, names: list[str]) -> str:
    """What else may have been meant."""
    if os.path.isfile(name):
        return f"for the file here write ./{name}"
    guess = closest(name, names)
    return f"did you mean {guess}?" if guess else f"or a file like ./mine{SUFFIX}; your own lie in {user_folder()}"


def load(path: Path) -> Profile:
    """The profile in a file; its name is the file's. Raises UsageError that names file, key and allowed values."""
    try:
        if path.stem == BUILT_IN.name:
            raise UsageError(f"{BUILT_IN.name} is the name of the profile without a file", hint="rename it")
        profile = from_document(_read_yaml(path), _shipped_base)
    except UsageError as problem:
        raise UsageError(f"{path}: {problem.message}", hint=problem.hint) from problem
    return replace(profile, name=path.stem, path=path)


def _shipped_base(name: str) -> Profile:
    bases = {profile.name: profile for profile in shipped()}
    if name not in bases:
        raise UsageError(f"base is {name!r}, which is no shipped profile", hint=did_you_mean(name, bases))
    return bases[name]


def _read_yaml(path: Path) -> Any:
    """The document in a file. Raises UsageError."""
    try:
        if path.exists() and not path.is_file():
            raise UsageError("it is no file", hint="give a YAML file, or a profile's name")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as problem:
        raise UsageError(f"cannot be read: {problem.strerror}") from problem
    except ValueError as problem:  # a NUL in the name
        raise UsageError(f"cannot be read: {problem}") from problem
    return _parse(content)


def _parse(content: bytes) -> Any:
    """The document in the content of a file. Raises UsageError."""
    import yaml

    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"it has more than {MAX_FILE_BYTES:,} bytes and is no profile")
    try:
        return yaml.load(content.decode("utf-8-sig"), Loader=_loader())
    except UnicodeDecodeError as problem:
        raise UsageError("it is not UTF-8 text") from problem
    except yaml.MarkedYAMLError as problem:
        line = f" at line {problem.problem_mark.line + 1}" if problem.problem_mark else ""
        raise UsageError(f"it is not YAML{line}: {problem.problem or problem.context}") from problem
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise UsageError(f"it is not YAML: {problem}") from problem


@functools.cache
def _loader() -> type[Any]:
    """A safe YAML loader that refuses a key given twice, of which PyYAML silently takes the last."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for i, key in enumerate(keys):
                if any(key.value == earlier.value for earlier in keys[:i]):
                    raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            return super().construct_mapping(node, deep)

    return Loader


def save(profile: Profile, name: str) -> Path:
    """Write a profile into the user's folder as `name` and return its path; one of the same name is replaced.

    The file appears whole or not at all, whenever this is interrupted. Raises UsageError (a name that is none, a
    profile that could not be read back) or MagicpigError (the folder cannot be written).
    """
    check_name(name)
    path = user_folder() / f"{name}{SUFFIX}"
    content = (_HEADER + _as_yaml(to_document(profile))).encode()
    _check_reads_as(content, profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as problem:
        raise MagicpigError(f"cannot write {path}: {problem.strerror}") from problem
    return path


def check_name(name: str) -> None:
    """Raise UsageError where a profile cannot be saved under this name: a path, a file name, `built-in`."""
    if name == BUILT_IN.name:
        raise UsageError(f"{name!r} is the name of the profile without a file", hint="choose another name")
    if name.endswith((SUFFIX, ".yml")):
        raise UsageError(f"{name!r} is a file name, not a profile's name", hint=f"write {Path(name).stem}")
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a profile's name: at most 100 of letters, digits and . _ + -, a letter or digit first",
            hint=f"its file goes into {user_folder()}",
        )


def _as_yaml(document: dict[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return text


def _check_reads_as(content: bytes, profile: Profile) -> None:
    """What is going to be written must read back as the same recommendations."""
    read = from_document(_parse(content), _shipped_base)
    if replace(read, name=profile.name, path=profile.path) != profile:
        raise UsageError(f"the profile cannot be written: it reads back as {read}, not as {profile}")
