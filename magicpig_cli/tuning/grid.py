"""Which (K, L) are looked at: `K=8..12,L=50..300` as people type it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from magicpig_cli.config import MAX_K, MAX_L
from magicpig_cli.errors import UsageError

DEFAULT_GRID = "K=7..13,L=40..400:20"
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+)(?::(\d+))?)?")
_LIMITS = {"K": (1, MAX_K), "L": (2, MAX_L)}
_EXAMPLE = "write it like K=8..12,L=50..300 (every 10th L), L=50..300:25, or K=10"
_STEP = {"K": 1, "L": 10}  # of a range that names none
MAX_SIZES = 4096  # that a grid may have: all of them are in the JSON


@dataclass(frozen=True, slots=True)
class Grid:
    """Every K with every L, both ascending."""

    K: tuple[int, ...]
    L: tuple[int, ...]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(K, L) for K in self.K for L in self.L]


def parse_grid(text: str) -> Grid:
    """What is not named (K or L) is as in DEFAULT_GRID. Raises UsageError that names the part."""
    given = _parts(text)
    values = {name: given.get(name) or _parts(DEFAULT_GRID)[name] for name in _LIMITS}
    grid = Grid(values["K"], values["L"])
    if len(grid.sizes) > MAX_SIZES:
        raise UsageError(
            f"{text} are {len(grid.sizes):,} pairs of K and L, more than {MAX_SIZES:,}", hint="L=50..300:25 takes steps"
        )
    return grid


def _parts(text: str) -> dict[str, tuple[int, ...]]:
    values: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, spelled = (piece.strip() for piece in part.partition("="))
        name = name.upper()
        if name not in _LIMITS or not equals:
            raise UsageError(f"{part!r} names neither K nor L", hint=_EXAMPLE)
        if name in values:
            raise UsageError(f"{name} is given twice", hint=_EXAMPLE)
        values[name] = _range(name, spelled)
    if not values:
        raise UsageError("the grid is empty", hint=_EXAMPLE)
    return values


def _range(name: str, spelled: str) -> tuple[int, ...]:
    match = _RANGE.fullmatch(spelled)
    if match is None or len(spelled) > 20:
        raise UsageError(f"{name}={spelled} is neither a number nor a range", hint=_EXAMPLE)
    first = int(match[1])
    last = int(match[2] or first)
    step = int(match[3] or _STEP[name])
    low, high = _LIMITS[name]
    if not low <= first <= high or not low <= last <= high:
        raise UsageError(f"{name}={spelled} is not between {low} and {high:,}", hint=_EXAMPLE)
    if last < first:
        raise UsageError(f"{name}={spelled} goes down", hint=f"{name}={last}..{first}")
    if step < 1:
        raise UsageError(f"{name}={spelled} has steps of {step}", hint=_EXAMPLE)
    return tuple(range(first, last + 1, step))
