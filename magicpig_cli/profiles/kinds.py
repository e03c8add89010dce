"""Kinds of values in a profile's file: how each is read from YAML and written there, and what a message says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from magicpig_cli.units import MAX_SIZE, parse_bytes, parse_tokens

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline; not every one survives YAML


@dataclass(frozen=True, slots=True)
class Kind:
    """What a key may hold. `read` raises UsageError or ValueError; `allowed` completes the message."""

    allowed: str
    read: Callable[[Any, str], Any]  # (value as YAML gives it, key for messages) → value of the dataclass
    write: Callable[[Any], Any] = lambda value: value


def whole(low: int, high: int) -> Kind:
    def read(value: Any, _: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError
        return value

    return Kind(f"{low:,} to {high:,}", read)


def size(low: int, high: int, parse: Callable[[str], int], units: tuple[tuple[int, str], ...], what: str) -> Kind:
    """A number, or text like `96k` and `24GiB`; written with the largest unit that divides it."""

    def read(value: Any, _: str) -> int:
        number = parse(value) if isinstance(value, str) else value
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise ValueError
        return number

    def write(value: int) -> Any:
        unit, letters = next(((unit, text) for unit, text in units if value and value % unit == 0), (1, ""))
        return f"{value // unit}{letters}" if letters else value

    return Kind(what, read, write)


def tokens(low: int, high: int = MAX_SIZE) -> Kind:
    upper = f" to {high:,}" if high < MAX_SIZE else " on"
    return size(low, high, parse_tokens, ((1024, "k"),), f"numbers of tokens from {low:,}{upper}, like 4k or 4096")


def memory() -> Kind:
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    return size(0, MAX_SIZE, parse_bytes, units, "amounts of memory like 24GiB or 512MiB")


def ratio() -> Kind:
    return number("numbers above 0 up to 1", lambda value: 0 < value <= 1)


def number(allowed: str, fits: Callable[[float], bool]) -> Kind:
    def read(value: Any, _: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise ValueError
        return float(value)

    return Kind(allowed, read)


def bits(most: int) -> Kind:
    def read(value: Any, _: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 32 <= value <= most or value % 32:
            raise ValueError
        return value

    return Kind(f"multiples of 32 up to {most}", read)


def choice(*values: str) -> Kind:
    def read(value: Any, _: str) -> str:
        if value not in values:
            raise ValueError
        return str(value)

    return Kind(" and ".join(values) if len(values) > 1 else f"only {values[0]}", read)


def text(what: str, needs: str = r"\S") -> Kind:
    def read(value: Any, _: str) -> str:
        if not isinstance(value, str) or not re.search(needs, value) or _CONTROL.search(value):
            raise ValueError
        return value

    return Kind(what, read)


def threads(most: int) -> Kind:
    """`physical` (None) or a number."""
    counted = whole(1, most)

    def read(value: Any, key: str) -> int | None:
        limit: int | None = None if value == "physical" else counted.read(value, key)
        return limit

    return Kind(f"physical, or {counted.allowed}", read, lambda value: "physical" if value is None else value)


def layers(most: int) -> Kind:
    def read(value: Any, _: str) -> tuple[int, ...]:
        one = whole(0, most - 1)
        if not isinstance(value, list):
            raise ValueError
        found = tuple(one.read(layer, "") for layer in value)
        if list(found) != sorted(set(found)):
            raise ValueError
        return found

    return Kind(f"ascending lists of layers like [0, 16], from 0 to {most - 1}", read, list)


def heads(most_layers: int, most: float) -> Kind:
    """Layer → a number for each query head. Nothing is written where there are none."""
    layer, share = whole(0, most_layers - 1), number("", lambda value: 0 < value <= most)

    def read(value: Any, _: str) -> dict[int, tuple[float, ...]]:
        if not isinstance(value, dict) or not all(isinstance(one, list) and one for one in value.values()):
            raise ValueError
        found = {layer.read(key, ""): tuple(share.read(one, "") for one in row) for key, row in value.items()}
        if len({len(row) for row in found.values()}) > 1:
            raise ValueError
        return found

    def write(shares: Mapping[int, tuple[float, ...]] | None) -> Any:
        return {one: list(numbers) for one, numbers in shares.items()} if shares else None

    return Kind(
        f"layers with as many numbers above 0 up to {most:g} as the model has query heads, like {{1: [0.5, 1.5]}}",
        read, write,
    )  # fmt: skip
