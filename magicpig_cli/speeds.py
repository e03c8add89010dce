"""Measured speeds of this machine, kept for next time: one JSON file per machine and way of using it.

A file is taken only if all that would change the figures is as it was (`facts`); its age does not matter. What cannot
be read is measured anew, what cannot be written is measured by the next process again; neither stops anything. What was
measured while others had the cores is measured again by the next processes, a few times, and the best is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import platformdirs

import magicpig_cli
from magicpig_cli.files import replace_file
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Hardware, Speeds, cache_bytes

try:
    import fcntl
except ImportError:  # not on Windows, which is told so but not blocked
    fcntl = None  # type: ignore[assignment]

WAIT_S = 5.0  # for another process that is measuring: longer than that takes
UNDISTURBED = (
    0.8  # share of the cores from which on figures are kept for good; 0.93 to 0.97 on two idle cores, 0.5 with one busy
)
MAX_TRIES = 3  # for machines that are never idle
_PRODUCTS = frozenset({"float32", "bfloat16", "int8", "int4"})
_LATER = frozenset({"int4"})  # of them, what older files do not have

_OF_GPU = ("host_to_device_bytes_s", "device_to_host_bytes_s", "device_product_bytes_s")

_known: dict[str, Speeds] = {}  # by file name: what this process has read or measured


def folder() -> Path:
    """Where the files are."""
    return platformdirs.user_cache_path("magicpig-cli") / "speeds"


def measure(machine: Hardware, threads: int, gpu: Gpu | None = None) -> Speeds:
    """Measure now, in about two seconds. Raises MemoryError, OSError or RuntimeError if memory is short."""
    from magicpig_cli import device_probe, speed_probe

    found = speed_probe.measure(threads, machine.memory_free, cache_bytes())
    return found if gpu is None else device_probe.added(found, gpu.index)


@dataclass(frozen=True, slots=True)
class Record:
    """What a file holds."""

    speeds: Speeds
    tries: int  # how often it has been measured until now

    def is_final(self, gpu: Gpu | None) -> bool:
        """Whether all of it was measured in peace, or often enough without."""
        if not _knows_products(self.speeds):
            return False
        whole = gpu is None or _knows_gpu(self.speeds)
        return (whole and self.speeds.cpu_share >= UNDISTURBED) or self.tries >= MAX_TRIES


def load_or_measure(
    machine: Hardware, threads: int, gpu: Gpu | None = None, *, announce: Callable[[], None] | None, anew: bool = False
) -> Speeds | None:
    """Speeds with `threads` threads and copies to `gpu`: kept ones, else measured ones, which are then kept.

    announce: called before it is measured, for the user waits. None: nobody is there to be told, so nothing is
    measured. anew: forget what is kept. None is returned where nothing is kept and nothing could be measured.
    """
    about = facts(machine, threads, gpu)
    path = folder() / f"{_digest(about)}.json"
    if path.name in _known and not anew:
        return _known[path.name]
    kept = None if anew else _read(path, about)
    if announce is not None and (kept is None or not kept.is_final(gpu)):
        with _turn(path.with_suffix(".lock")):
            kept = None if anew else _read(path, about)  # perhaps by the process that we have waited for
            if kept is None or not kept.is_final(gpu):
                announce()
                kept = _measured_again(machine, threads, gpu, kept)
                if kept is not None:
                    _write(path, about, kept)
    if kept is None:
        return None
    _known[path.name] = kept.speeds
    return kept.speeds


def _measured_again(machine: Hardware, threads: int, gpu: Gpu | None, kept: Record | None) -> Record | None:
    """Of what is kept and what is measured now the one with copies to the GPU, or that was less disturbed."""
    try:
        found = measure(machine, threads, gpu)
    except (MemoryError, OSError, RuntimeError):  # no room for it: then there is none for a model either
        return kept
    if kept is None:
        return Record(found, tries=1)
    return Record(max(found, kept.speeds, key=_quality), kept.tries + 1)


def _quality(speeds: Speeds) -> tuple[bool, bool, float]:
    return _knows_products(speeds), _knows_gpu(speeds), speeds.cpu_share


def _knows_products(speeds: Speeds) -> bool:
    """Whether products of every form were measured; those of `_LATER` are not in what older versions have kept."""
    return speeds.product_bytes_s.keys() == _PRODUCTS


def _knows_gpu(speeds: Speeds) -> bool:
    """Whether a GPU was measured; a full one has no room for that."""
    return speeds.host_to_device_bytes_s is not None and speeds.device_product_bytes_s is not None


def facts(machine: Hardware, threads: int, gpu: Gpu | None) -> dict[str, Any]:
    """All that would change what is measured."""
    return {
        "magicpig": magicpig_cli.__version__,
        "torch": _torch_version(),
        "isa": machine.isa,
        "cpu": machine.cpu_model,
        "cores_physical": machine.cores_physical,
        "cores_usable": machine.cores_usable,
        "numa_nodes": machine.numa_nodes,
        "memory_gib": round(machine.memory_total / 2**30),  # to the byte it depends on the version of the kernel
        "threads": threads,
        "gpu": None if gpu is None else [gpu.name, gpu.pcie_generation, gpu.pcie_lanes],
    }


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def _read(path: Path, about: dict[str, Any]) -> Record | None:
    """What the file holds; None if it is not there, not whole, or about something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["facts"] != about:
            return None
        record = Record(Speeds(**content["speeds"]), content["tries"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if _is_number(record.tries) and _is_sound(record.speeds) else None


def _is_sound(speeds: Speeds) -> bool:
    """Whether every figure is one: a number above 0, or None where there may be none."""
    values = {field.name: getattr(speeds, field.name) for field in fields(Speeds)}
    products = values.pop("product_bytes_s")
    if not isinstance(products, dict) or not _PRODUCTS - _LATER <= products.keys() <= _PRODUCTS:
        return False
    gpu = [values.pop(name) for name in _OF_GPU]
    visit_ns = values.pop("visit_ns")  # may be 0
    wanted = (*values.values(), *products.values(), *(speed for speed in gpu if speed is not None))
    return all(_is_number(value) and value > 0 for value in wanted) and _is_number(visit_ns) and visit_ns >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _write(path: Path, about: dict[str, Any], record: Record) -> None:
    """Put the file there in one piece, or not at all."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"facts": about, "tries": record.tries, "speeds": asdict(record.speeds)}, indent=1) + "\n"
        replace_file(path, text.encode())


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """One process at a time, since two that measure together halve each other's figures. Waits WAIT_S at most."""
    descriptor = None
    with contextlib.suppress(OSError):  # a folder that cannot be written: nobody else writes there either
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if descriptor is not None and fcntl is not None:
            _wait_for(descriptor)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # and with it the lock


def _wait_for(descriptor: int) -> None:
    give_up = time.monotonic() + WAIT_S
    while time.monotonic() < give_up:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return
