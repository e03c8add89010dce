"""What the keys and values of a run depend on, what its index depends on beside, and what differs from a saved one."""

from __future__ import annotations

from typing import Any

from magicpig_cli.model import fingerprint
from magicpig_cli.model.loader import Loaded
from magicpig_cli.planner import Plan

_NAMED = 3  # keys of a config that are named at most
_SAMPLER_NAMES = {
    "sampler": "sampler", "K": "K", "L": "L", "bits": "bits", "hash_seed": "hash seed", "sink": "sink",
}  # fmt: skip


def identity_of(loaded: Loaded, plan: Plan) -> dict[str, Any]:
    """What keys and values depend on beside token ids. To be asked once the rotary frequencies are settled."""
    return {
        "model": loaded.name,
        "revision": loaded.revision,
        "weights": loaded.weights,
        "config": fingerprint.of_config(loaded.config),
        "rotary": fingerprint.of_rotary(loaded.model),
        "context": plan.context,  # only to say for which one the rotary frequencies are
        "dtype": plan.weight_types,
        "kv_dtype": plan.row_dtype,
    }


def sampler_of(plan: Plan, hash_seed: int) -> dict[str, Any] | None:
    """What an index depends on beside keys and values; None where nothing is sampled."""
    if plan.sampler is None:
        return None
    own = {"lsh": {"K": plan.K, "L": plan.L}, "rabitq": {"bits": plan.bits}}[plan.sampler]
    return {"sampler": plan.sampler, **own, "hash_seed": hash_seed, "sink": plan.sink}


def model_differences(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """What makes keys and values of `there` useless here, each with both values; none if they can be used."""
    found = []
    if here["weights"] != there.get("weights"):
        found.append(_both("model", _model(here), _model(there)))
    elif here["revision"] != there.get("revision"):
        found.append(_both(f"revision of {here['model']}", here["revision"], there.get("revision")))
    mine, theirs = here["config"], there.get("config", {})
    keys = [key for key in mine if key in theirs and mine[key] != theirs[key]]
    found += [_both(key, mine[key], theirs[key]) for key in keys[:_NAMED]]
    if here["rotary"] != there.get("rotary") and not found:
        tokens = [f"those of {run.get('context', 0):,} tokens" for run in (here, there)]
        found.append(_both("rotary frequencies", *tokens))
    for key, option in (("dtype", "number type of weights"), ("kv_dtype", "number type of K/V")):
        if here[key] != there.get(key):
            found.append(_both(option, here[key], there.get(key)))
    return found


def sampler_differences(here: dict[str, Any], there: dict[str, Any] | None) -> list[str]:
    """Why an index made there cannot be used here, each with both values; there None: it has none."""
    if there is None:
        return ["the file has no index"]
    if here["sampler"] != there.get("sampler"):  # the others' numbers are not each other's
        return [_both("sampler", here["sampler"], there.get("sampler"))]
    return [
        _both(name, here[key], there.get(key))
        for key, name in _SAMPLER_NAMES.items()
        if key in here and here[key] != there.get(key)
    ]


def _model(run: dict[str, Any]) -> str:
    return f"{run.get('model')} (weights {str(run.get('weights'))[:8]})"


def _both(what: str, here: Any, there: Any) -> str:
    return f"{what} {here} here, {there} in the file"
