"""What decides the answers of a run, what was typed and what was chosen: kept in the manifest, compared by a later run.

Threads, device, who scans signatures and batch size decide nothing (the determinism contract). What the planner chooses
depends on the memory that is free just then, so a run that goes on takes the choices of the one before (`adopted`):
they are compared only where they cannot be had again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from magicpig_cli.config import Settings
from magicpig_cli.errors import UsageError
from magicpig_cli.planner import Plan

_DECIDE_NOTHING = frozenset({"device", "offline", "trust_remote_code", "threads", "ordered", "signatures"})
_OPTION_NAMES = {"mode": "attention", "K": "K", "L": "L"}  # where an option is not called like its field
_ADOPTED = ("K", "L", "budget", "tail", "bits", "target_error", "sink", "local", "dense_layers")
_OF_PROFILES = frozenset({"head_shares", "auto_lsh_from"})  # which no option sets
_SHOWN = 40  # characters of a value in a message


def typed(settings: Settings, **others: Any) -> dict[str, Any]:
    """All settings and other options, as JSON has them."""
    values: dict[str, Any] = json.loads(json.dumps({**asdict(settings), **others}))
    return values


def chosen(plan: Plan) -> dict[str, Any]:
    """What the planner has filled in, as JSON has it."""
    values: dict[str, Any] = {"weights": plan.weight_types, "kv_dtype": plan.row_dtype, "attention": plan.mode}
    if plan.sampler is not None:
        # A tail that is not drawn is left out: outputs of versions that had none can still be resumed.
        values |= {name: value for name, value in plan.sampler_options.items() if value}
        values |= {name: getattr(plan, name) for name in ("sink", "local", "auto_lsh_from")}
        values["dense_layers"] = list(plan.dense_layers)
    if plan.deciding_shares:
        shares = json.dumps(sorted(plan.deciding_shares.items()))
        values["head_shares"] = hashlib.blake2b(shares.encode(), digest_size=8).hexdigest()
    return values


def identity(settings: Settings, choices: Mapping[str, Any], raw: bool) -> str:
    """A digest of what decides the answers of all lines alike. Texts and token sampling are each line's own."""
    model = settings.model
    facts = [model.model, model.revision, model.load_format, model.chat_template, model.quantize,
             settings.attention.hash_seed, raw, choices]  # fmt: skip
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def adopted(settings: Settings, now: Mapping[str, Any], manifest: Mapping[str, Any]) -> Settings:
    """Settings with the tables and layers that the run before has chosen, where nobody has typed others since.

    now: the same settings as they would be kept.
    """
    before = manifest["parameters"]
    if any(_given(before.get(part)) != _given(now[part]) for part in ("model", "attention", "profile")):
        return settings
    attention = settings.attention
    found = {name: manifest["chosen"].get(name) for name in _ADOPTED if getattr(attention, name) is None}
    if found.get("dense_layers") is not None:
        found["dense_layers"] = tuple(found["dense_layers"])
    return replace(settings, attention=replace(attention, **found))


def _given(part: Any) -> Any:
    """Without what nobody has said: an earlier version may not have known some of it."""
    return {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else part


def refuse_others(manifest: Mapping[str, Any], section: str, now: Mapping[str, Any]) -> None:
    """Raise UsageError that names what differs from the manifest's `parameters` or `chosen`, with both values."""
    before = dict(_leaves(manifest[section]))
    here = dict(_leaves(now))
    names = [name for name in {**before, **here} if name.rpartition(".")[2] not in _DECIDE_NOTHING]
    differing = [
        f"{_option(name)} was {_shown(before.get(name))} and is {_shown(here.get(name))}"
        for name in names
        if before.get(name) != here.get(name)
    ]
    if differing:
        raise UsageError(
            f"the output was made with other parameters: {'; '.join(differing)}",
            hint="give the same ones, or --force: what they change is answered again",
        )


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(`generation.seed`, value) of everything in nested objects."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _option(name: str) -> str:
    last = name.rpartition(".")[2]
    if last in _OF_PROFILES:
        return f"{last} of the profile"
    last = _OPTION_NAMES.get(last, last).replace("_", "-")
    return f"-{last}" if len(last) == 1 else f"--{last}"


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
