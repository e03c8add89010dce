"""Which instruction set the kernels use: one table, one choice at import, one cap (`MAGICPIG_ISA`).

The native module of a tier is the same Cython source with other primitives. A tier can run if it was compiled and if
the CPU and the operating system both report it (the operating system decides which registers it saves).
"""

from __future__ import annotations

import importlib
import os
import types
from typing import Any

from magicpig_cli.errors import UsageError
from magicpig_cli.kernels import reference

VARIABLE = "MAGICPIG_ISA"
TIERS = ("portable", "neon", "avx2", "avx512")  # ascending: the last one that can run is chosen


def _import(tier: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(f"magicpig_cli.kernels._native_{tier}")
    except ModuleNotFoundError:
        return None


def compiled() -> tuple[str, ...]:
    """Tiers that this installation contains, ascending."""
    return tuple(tier for tier in TIERS if _import(tier) is not None)


def runnable() -> tuple[str, ...]:
    """Compiled tiers that this CPU and operating system can run, ascending."""
    return compiled()


def choose(cap: str | None) -> Any:
    """The module of the highest tier that can run and is not above `cap`; UsageError for an unknown cap."""
    if cap and cap not in (*TIERS, reference.TIER):
        raise UsageError(
            f"{VARIABLE}={cap} is not an instruction set",
            hint=f"set it to one of {', '.join((reference.TIER, *TIERS))}, or leave it unset",
        )
    allowed = TIERS[: TIERS.index(cap) + 1] if cap in TIERS else TIERS
    usable = [tier for tier in runnable() if tier in allowed]
    if cap == reference.TIER or not usable:
        return reference
    return _import(usable[-1])


_backend: Any = choose(os.environ.get(VARIABLE))


def backend() -> Any:
    """The kernels in use: a native module, or `reference`."""
    return _backend


def current() -> str:
    """Name of the tier in use."""
    return str(_backend.TIER)
