"""The plan for this machine: what hardware, profile and measured speeds are here, handed to the pure planner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from magicpig_cli import cards, hardware, profiles, speeds
from magicpig_cli.config import Settings
from magicpig_cli.hardware import Hardware, Speeds
from magicpig_cli.model.name import model_name
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan, plan
from magicpig_cli.profiles import Profile


def _as_it_is(machine: Hardware) -> Hardware:
    return machine


def plan_here(
    shape: ModelShape, settings: Settings, announce: Callable[[], None] | None = None,
    assume: Callable[[Hardware], Hardware] = _as_it_is,
) -> Plan:  # fmt: skip
    """The plan of a run of this model on this machine, or on what `assume` makes of it (`cards.assumed`).

    announce: called before this machine is measured, which takes two seconds and is kept for next time; None: it is
    not, and times are predicted only if it has been before.
    Raises what `planner.plan` raises, and UsageError for a profile that was asked for and is not there or broken.
    """
    real = cards.described(hardware.probe())
    machine = assume(real)
    name = model_name(settings.model.model)
    profile, why = profile_for(machine, settings, name)
    # What cannot work is refused before anything is measured.
    chosen = plan(machine, shape, settings, profile, why, name)
    found = speeds_here(real, chosen.threads, settings.model.device, announce)
    if found is None:
        return chosen
    if machine.gpus != real.gpus:  # the card that is here says nothing about another one
        found = replace(found, host_to_device_bytes_s=None, device_to_host_bytes_s=None, device_product_bytes_s=None)
    return plan(replace(machine, speeds=found), shape, settings, profile, why, name)


def speeds_here(
    machine: Hardware, threads: int, device: str, announce: Callable[[], None] | None, *, anew: bool = False
) -> Speeds | None:
    """Speeds with `threads` threads, and of copies to the GPU that `--device` means; see `speeds.load_or_measure`."""
    return speeds.load_or_measure(machine, threads, machine.gpu_of(device), announce=announce, anew=anew)


def profile_for(machine: Hardware, settings: Settings, model: str | None = None) -> tuple[Profile, str]:
    """The profile that was asked for, else the one that matches, and why. `model` is the model's name, if known."""
    if settings.profile is not None:
        return profiles.find(settings.profile), "as asked"
    device = settings.model.device
    gpu = machine.gpu_of(device)
    on_gpu = gpu is not None or device.startswith("cuda")
    return profiles.choose(machine, on_gpu, -1 if gpu is None else gpu.index, model)
