"""Which instruction set the kernels use: one table, one choice at import, one cap (`MAGICPIG_ISA`).

The native module of a tier is the same Cython source with other primitives. A tier can run if it was compiled and if
the CPU and the operating system both report it (the operating system decides which registers it saves). The plain
tier asks them, so no instruction is executed that may not exist.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.kernels import reference

VARIABLE = "MAGICPIG_ISA"
TIERS = ("portable", "neon", "avx2", "avx512")  # ascending: the last one that can run is chosen
TESTED = {  # how this project tests a tier
    "portable": "natively",
    "neon": "under emulation",  # scripts/test_neon.sh: arithmetic and memory accesses, not speed
    "avx2": "natively",
    "avx512": "natively",
}


def _module(tier: str) -> str:
    return f"magicpig_cli.kernels._native_{tier}"


def compiled() -> tuple[str, ...]:
    """Tiers that this installation contains, ascending."""
    return tuple(tier for tier in TIERS if importlib.util.find_spec(_module(tier)) is not None)


def runnable() -> tuple[str, ...]:
    """Compiled tiers that this CPU and operating system can run, ascending."""
    tiers = compiled()
    if "portable" not in tiers:
        return ()
    supported = importlib.import_module(_module("portable")).supported()
    return tuple(tier for tier in tiers if tier in supported)


def load(tier: str) -> Any:
    """The kernels of one tier: a native module, or `reference`."""
    return reference if tier == reference.TIER else importlib.import_module(_module(tier))


def choose(cap: str | None) -> str:
    """The highest tier that can run, not above `cap`. UsageError: unknown cap; MagicpigError: nothing compiled."""
    if cap == reference.TIER:
        return cap
    if cap and cap not in TIERS:
        raise UsageError(
            f"{VARIABLE}={cap} is not an instruction set",
            hint=f"set it to one of {', '.join((reference.TIER, *TIERS))}, or leave it unset",
        )
    allowed = TIERS[: TIERS.index(cap) + 1] if cap else TIERS
    usable = [tier for tier in runnable() if tier in allowed]
    if not usable:
        raise MagicpigError(
            "the native kernels are missing from this installation",
            hint=f"reinstall it where there is a C compiler (pip install .), or set {VARIABLE}=reference (very slow)",
        )
    return usable[-1]


_backend: Any = load(choose(os.environ.get(VARIABLE)))


def backend() -> Any:
    """The kernels in use: a native module, or `reference`."""
    return _backend


def current() -> str:
    """Name of the tier in use."""
    return str(_backend.TIER)
