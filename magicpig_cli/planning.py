"""The plan for this machine: what hardware, profile and measured speeds are here, handed to the pure planner."""

from __future__ import annotations

from magicpig_cli import hardware, profiles
from magicpig_cli.config import Settings
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan, plan


def plan_here(shape: ModelShape, settings: Settings) -> Plan:
    """The plan of a run of this model on this machine. Raises what `planner.plan` raises."""
    return plan(hardware.probe(), shape, settings, profiles.BUILT_IN)
