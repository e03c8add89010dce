"""The plan for this machine: what hardware, profile and measured speeds are here, handed to the pure planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from magicpig_cli import hardware, profiles, speeds
from magicpig_cli.config import Settings
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Hardware, Speeds
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan, plan


def plan_here(shape: ModelShape, settings: Settings, announce: Callable[[], None] | None = None) -> Plan:
    """The plan of a run of this model on this machine. Raises what `planner.plan` raises.

    announce: called before this machine is measured, which takes two seconds and happens once; None: it is not, and
    times are predicted only if it has been before.
    """
    machine = hardware.probe()
    draft = plan(machine, shape, settings, profiles.BUILT_IN)  # what cannot work is refused before anything is measured
    found = speeds_here(machine, draft.threads, settings.model.device, announce)
    return draft if found is None else plan(replace(machine, speeds=found), shape, settings, profiles.BUILT_IN)


def speeds_here(
    machine: Hardware, threads: int, device: str, announce: Callable[[], None] | None, *, anew: bool = False
) -> Speeds | None:
    """Speeds with `threads` threads, and of copies to the GPU that `--device` means; see `speeds.load_or_measure`."""
    return speeds.load_or_measure(machine, threads, _gpu(machine, device), announce=announce, anew=anew)


def _gpu(machine: Hardware, device: str) -> Gpu | None:
    """The GPU that `auto`, `cuda` or `cuda:N` means here; None on a CPU."""
    kind, _, number = device.partition(":")
    return None if kind == "cpu" else next((gpu for gpu in machine.gpus if gpu.index == int(number or 0)), None)
