"""Which keys a profile's file has, what each may hold, how values are written there. The manual: docs/profiles.md.

Reading and writing are one table: what `to_document` writes, `from_document` reads as the same Profile.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from magicpig_cli.config import MAX_BITS, MAX_K, MAX_L, SAMPLERS
from magicpig_cli.errors import UsageError
from magicpig_cli.profiles import kinds
from magicpig_cli.profiles.profile import BUILT_IN, Match, Profile, TableSize

MAX_LAYERS = 1000
MAX_CHUNK = 1 << 16  # prompt tokens per forward; beyond it activations alone are gigabytes
MAX_WINDOW = 1 << 20  # tokens of sink or local: more is exact attention by another name
MAX_SHARE = 100.0  # of a head, of the budget
MAX_PARALLEL = 1024  # threads, and sequences decoded together
_SHOWN = 60  # characters of a wrong value in a message


@dataclass(frozen=True, slots=True)
class _Key:
    field: str  # of Profile, Match or TableSize
    kind: kinds.Kind


_TABLE_KEYS = {
    "K": _Key("K", kinds.whole(1, MAX_K)),
    "L": _Key("L", kinds.whole(2, MAX_L)),
    "up_to": _Key("up_to", kinds.tokens(1)),
    "sampled_ratio": _Key("sampled_ratio", kinds.ratio()),
}


def _tables() -> kinds.Kind:
    def read(value: Any, key: str) -> tuple[TableSize, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError
        return _ascending(tuple(_read_table(entry, f"{key}[{i}]") for i, entry in enumerate(value)), key)

    def write(tables: tuple[TableSize, ...]) -> list[dict[str, Any]]:
        return [_write_section(table, _TABLE_KEYS) for table in tables]

    return kinds.Kind("lists like [{K: 9, L: 120, up_to: 32k}, {K: 10, L: 150}]", read, write)


def _read_table(entry: Any, key: str) -> TableSize:
    values = _read_section(entry, _TABLE_KEYS, key)
    for needed in ("K", "L"):
        if needed not in values:
            raise UsageError(f"{key}.{needed} is missing", hint="write it like {K: 10, L: 150, up_to: 96k}")
    return TableSize(**values)


def _ascending(tables: tuple[TableSize, ...], key: str) -> tuple[TableSize, ...]:
    for i, (table, following) in enumerate(pairwise(tables)):
        if table.up_to is None:
            raise UsageError(f"{key}[{i}].up_to is missing", hint="only the last entry may be without")
        if following.up_to is not None and following.up_to <= table.up_to:
            raise UsageError(
                f"{key}[{i + 1}].up_to is {following.up_to:,}, but the entry before it serves up to {table.up_to:,}",
                hint="order them from short to long sequences",
            )
    return tables


_WORDS = "text with letters or digits; quote numbers"
_MATCH_KEYS = {
    "device": _Key("device", kinds.choice("cpu", "gpu")),
    "gpu_name": _Key("gpu_name", kinds.text(_WORDS, r"[^\W_]")),
    "gpu_memory_min": _Key("gpu_memory_min", kinds.memory()),
    "gpu_memory_max": _Key("gpu_memory_max", kinds.memory()),
    "cpu_model": _Key("cpu_model", kinds.text(_WORDS, r"[^\W_]")),
    "model": _Key("model", kinds.text("names of models, as text")),
}
_SECTIONS = {
    "attention": {
        "sampler": _Key("sampler", kinds.choice(*SAMPLERS, "auto")),
        "tables": _Key("tables", _tables()),
        "budget": _Key("budget", kinds.ratio()),
        "bits": _Key("bits", kinds.bits(MAX_BITS)),
        "tail": _Key("tail", kinds.number("numbers from 0 to 1", lambda value: 0 <= value <= 1)),
        "target_error": _Key("target_error", kinds.number("numbers above 0", lambda value: 0 < value < float("inf"))),
        "head_shares": _Key("head_shares", kinds.heads(MAX_LAYERS, MAX_SHARE)),
        "dense_layers": _Key("dense_layers", kinds.layers(MAX_LAYERS)),
        "sink": _Key("sink", kinds.tokens(0, MAX_WINDOW)),
        "local": _Key("local", kinds.tokens(1, MAX_WINDOW)),
        "auto_lsh_from": _Key("auto_lsh_from", kinds.tokens(0)),
    },
    "run": {
        "chunk": _Key("chunk", kinds.tokens(1, MAX_CHUNK)),
        "threads": _Key("threads", kinds.threads(MAX_PARALLEL)),
        "max_batch": _Key("max_batch", kinds.whole(1, MAX_PARALLEL)),
    },
    "memory": {
        "host_reserve": _Key("host_reserve", kinds.memory()),
        "device_reserve": _Key("device_reserve", kinds.memory()),
    },
}
_TOP_KEYS = ("base", "match", *_SECTIONS, "sources")

FIGURES = tuple(f"{section}.{name}" for section, keys in _SECTIONS.items() for name in keys)


def from_document(document: Any, base: Callable[[str], Profile]) -> Profile:
    """The profile that a YAML document describes; `base` gives the profile that it names as its base.

    What the document leaves open is the base's, else BUILT_IN's. Raises UsageError that names key and allowed values,
    not yet the file.
    """
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise UsageError(f"it holds {_shown(document)}, not keys", hint=f"its keys are {', '.join(_TOP_KEYS)}")
    _check_keys(document, _TOP_KEYS, "")
    start = BUILT_IN
    if document.get("base") is not None:
        start = base(_read(_Key("base", kinds.text("names of shipped profiles")), document["base"], "base"))
    values: dict[str, Any] = {}
    given: set[str] = set()
    for section, keys in _SECTIONS.items():
        found = _read_section(document.get(section), keys, section)
        given |= {f"{section}.{name}" for name, key in keys.items() if key.field in found}
        values |= found
    if "match" in document:
        values["match"] = _read_match(document["match"])
    profile = replace(start, **values)
    inherited = {key: text for key, text in start.sources.items() if key.partition("[")[0] not in given}
    return replace(profile, sources=inherited | _read_sources(document.get("sources"), len(profile.tables)))


def to_document(profile: Profile) -> dict[str, Any]:
    """The profile as a YAML document, every figure written out; name and path are the file's."""
    document: dict[str, Any] = {"match": _write_section(profile.match, _MATCH_KEYS)}
    for section, keys in _SECTIONS.items():
        document[section] = _write_section(profile, keys)
    return document | {"sources": dict(profile.sources)}


def _write_section(owner: Any, keys: dict[str, _Key]) -> dict[str, Any]:
    """What is set. None stands for itself only where the file has a word for it."""
    return {
        name: written
        for name, key in keys.items()
        if (written := key.kind.write(getattr(owner, key.field))) is not None
    }


def _read_section(content: Any, keys: dict[str, _Key], where: str) -> dict[str, Any]:
    """Field → value of what a mapping gives; a key without a value counts as left out."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{where} is {_shown(content)}, not keys with values", hint=f"its keys are {', '.join(keys)}")
    _check_keys(content, keys, where)
    return {
        keys[name].field: _read(keys[name], value, f"{where}.{name}")
        for name, value in content.items()
        if value is not None
    }


def _read(key: _Key, value: Any, where: str) -> Any:
    try:
        return key.kind.read(value, where)
    except ValueError:
        pass
    except UsageError as problem:
        if problem.message.startswith(where):  # an entry of a list has already said it
            raise
    raise UsageError(f"{where} is {_shown(value)}, allowed are {key.kind.allowed}")


def _read_match(content: Any) -> Match:
    match = Match(**_read_section(content, _MATCH_KEYS, "match"))
    gpu_keys = [field.name for field in fields(Match) if field.name.startswith("gpu_") and getattr(match, field.name)]
    if match.device == "cpu" and gpu_keys:
        raise UsageError(
            f"match.device is cpu, but match.{gpu_keys[0]} asks for a GPU",
            hint=f"leave out one of device and {gpu_keys[0]}",
        )
    low, high = match.gpu_memory_min, match.gpu_memory_max
    if low is not None and high is not None and low >= high:
        raise UsageError(
            f"match.gpu_memory_min is {low:,} bytes, not less than match.gpu_memory_max of {high:,}",
            hint="a GPU matches from min on and below max",
        )
    return match


def _read_sources(content: Any, tables: int) -> dict[str, str]:
    if content is None:
        return {}
    known = (*FIGURES, *(f"attention.tables[{i}]" for i in range(tables)))
    if not isinstance(content, dict):
        raise UsageError(f"sources is {_shown(content)}, not keys with texts", hint=f"its keys are {', '.join(known)}")
    _check_keys(content, known, "sources")
    key = _Key("", kinds.text("texts like 'paper, table 3' or 'measured: …'"))
    return {name: _read(key, value, f"sources.{name}") for name, value in content.items()}


def _check_keys(given: dict[Any, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for name in given:
        if name not in known:
            place = f"{where}.{name}" if where else f"{name}"
            raise UsageError(f"{place} is unknown", hint=did_you_mean(str(name), known))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean sink?`, or all that is known where nothing comes close."""
    known = tuple(known)
    guess = closest(word, known)
    return f"did you mean {guess}?" if guess else f"there are {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that comes close, in whatever case it was typed, or that begins like it."""
    lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lower, n=1)
    close += [name for name in lower if word and name.startswith(word.lower())]
    return lower[close[0]] if close else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
