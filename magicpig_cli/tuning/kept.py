"""Captures kept for the next run: a folder of safetensors files in the cache directory, one per layer.

A folder appears under its name when all of it is written, so an interrupt leaves nothing that could be mistaken for
one. The newest are kept, up to a number of bytes. Only their owner can read them: they hold what the text says.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from magicpig_cli.attention.base import LogitRule
from magicpig_cli.engine.engine import Engine
from magicpig_cli.model.source import cache_folder
from magicpig_cli.tuning.capture import Capture, depths

KEPT_BYTES = 8 << 30  # of all captures together
_RUN_CAPTURES = 2  # of one run, both its texts: each gets its share, or they would drive out one another
_DISK_SHARE = 4  # a capture takes at most one part in so many of the free disk
_UNFINISHED = "unfinished-"
_ABANDONED_S = 24 * 3600.0  # an unfinished one that is older is of a process that was killed
_ABOUT = "about.json"
_SAMPLED_VALUES = 64  # of each tensor's beginning and end, for the fingerprint of the weights


def folder() -> Path:
    """Where captures are."""
    return cache_folder() / "captures"


def capture_key(engine: Engine, ids: list[int], steps: int) -> str:
    """A digest of all that a capture depends on: weights, text, depths, types of weights and rows."""
    plan = engine.plan
    about = {
        "weights": _weights_fingerprint(engine),
        "model": engine.model_name,
        "ids": hashlib.sha256(repr(ids).encode()).hexdigest(),
        "depths": depths(plan, len(ids), steps),
        "steps": steps,
        "window": (plan.sink, plan.local, plan.flush),
        "types": (plan.weight_types, plan.row_dtype),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]


def _weights_fingerprint(engine: Engine) -> str:
    """Names, shapes and some values of all tensors: other weights in the same directory are other weights."""
    digest = hashlib.sha256()
    model = engine.runner.model
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        flat = tensor.detach().flatten()
        ends = (flat[:_SAMPLED_VALUES], flat[-_SAMPLED_VALUES:])
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        for values in ends:
            digest.update(values.double().cpu().numpy().tobytes())
    return digest.hexdigest()


def load(engine: Engine, key: str) -> Iterator[tuple[int, int] | Capture]:
    """The capture kept under this key, after (layers done, of how many); nothing if there is none that is whole."""
    place = folder() / key
    try:
        about = json.loads((place / _ABOUT).read_text(encoding="utf-8"))
        sequence, queries = engine.new_sequence(), {}
        for number, layer in enumerate(sequence.layers):
            with safe_open(place / _file(number), framework="pt") as file:
                queries[number] = file.get_tensor("q")
                layer.extend(file.get_tensor("rows"))
            yield number + 1, len(sequence.layers)
        sequence.commit(about["ids"])
        rules = {int(number): LogitRule(*rule) for number, rule in about["rules"].items()}
        os.utime(place)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError):
        return  # not there, damaged, or of another version: it is made again
    yield Capture(
        sequence, tuple(about["lengths"]), tuple(about["offloaded"]), about["sink"], queries, rules
    )  # fmt: skip


def save(key: str, capture: Capture) -> int | None:
    """Keep a capture; its bytes on disk, or None if it was too large to keep or the disk did not take it."""
    size = sum(_layer_bytes(capture, number) for number in capture.queries)
    place = folder() / key
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if size > min(KEPT_BYTES // _RUN_CAPTURES, shutil.disk_usage(place.parent).free // _DISK_SHARE):
            return None
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=_UNFINISHED, ignore_cleanup_errors=True) as made:
            whole = Path(made) / key
            whole.mkdir(mode=0o700)
            _write(whole, capture)
            if place.exists():  # of another version, or damaged
                shutil.rmtree(place)
            os.replace(whole, place)
        _prune(place)
    except OSError:
        return None
    return size


def _layer_bytes(capture: Capture, number: int) -> int:
    cache, q = capture.sequence.layers[number], capture.queries[number]
    window = cache.window.rows
    row_bytes = window[:, :1].numel() * window.element_size()
    return row_bytes * capture.tokens + q.numel() * q.element_size()


def _write(whole: Path, capture: Capture) -> None:
    for number in capture.queries:
        layer = capture.layer(number)
        save_file({"q": layer.q.contiguous(), "rows": layer.rows.contiguous()}, whole / _file(number))
    about = {
        "lengths": capture.lengths,
        "offloaded": capture.offloaded,
        "sink": capture.sink,
        "ids": capture.sequence.ids,
        "rules": {number: (rule.scale, rule.softcap) for number, rule in capture.rules.items()},
    }
    (whole / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _file(number: int) -> str:
    return f"layer-{number:03d}.safetensors"


def _prune(newest: Path) -> None:
    """Drop the oldest captures beyond KEPT_BYTES, and what killed processes left, not what others are writing now."""
    for place in newest.parent.glob(f"{_UNFINISHED}*"):
        if time.time() - place.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(place, ignore_errors=True)
    places = [place for place in newest.parent.iterdir() if (place / _ABOUT).is_file()]
    places.sort(key=lambda place: place.stat().st_mtime, reverse=True)
    kept = 0
    for place in places:
        kept += sum(file.stat().st_size for file in place.iterdir())
        if kept > KEPT_BYTES and place != newest:
            shutil.rmtree(place, ignore_errors=True)
