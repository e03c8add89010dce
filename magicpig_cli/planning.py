"""The plan for this machine: what hardware, profile and measured speeds are here, handed to the pure planner."""

from __future__ import annotations

from dataclasses import replace

from magicpig_cli import hardware, profiles
from magicpig_cli.config import Settings
from magicpig_cli.hardware import Hardware
from magicpig_cli.model.name import model_name
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan, plan
from magicpig_cli.profiles import Profile


def plan_here(shape: ModelShape, settings: Settings) -> Plan:
    """The plan of a run of this model on this machine.

    Raises what `planner.plan` raises, and UsageError for a profile that was asked for and is not there or broken.
    """
    machine = hardware.probe()
    profile, why = profile_for(machine, settings, model_name(settings.model.model))
    chosen = plan(machine, shape, settings, profile)
    return replace(chosen, reasons=(*chosen.reasons, f"profile {profile.name}: {why}"))


def profile_for(machine: Hardware, settings: Settings, model: str | None = None) -> tuple[Profile, str]:
    """The profile that was asked for, else the one that matches, and why. `model` is the model's name, if known."""
    if settings.profile is not None:
        return profiles.find(settings.profile), "as asked"
    kind, _, number = settings.model.device.partition(":")
    on_gpu = kind == "cuda" or (kind == "auto" and bool(machine.gpus))
    return profiles.choose(machine, on_gpu, int(number or 0), model)
