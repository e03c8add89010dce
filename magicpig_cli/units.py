"""Sizes as people type and read them. One parser for the whole tool: k = 1024, m = 1024²."""

from __future__ import annotations

import re

from magicpig_cli.errors import UsageError

_TOKENS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([km]?)\s*", re.IGNORECASE)
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MAX_DIGITS = 30
MAX_SIZE = 1 << 50  # of tokens or bytes: what is larger is a slip of the hand


def _parse(text: str, pattern: re.Pattern[str], what: str, example: str) -> int:
    match = pattern.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not {what}", hint=f"write it like {example}")
    whole, _, fraction = match[1].partition(".")
    if len(whole) + len(fraction) > _MAX_DIGITS:
        raise UsageError(
            f"a number of {len(whole) + len(fraction)} digits is not {what}", hint=f"write it like {example}"
        )
    factor: int = 1024 ** _POWERS[match[2].lower()]
    scale: int = 10 ** len(fraction)
    number, rest = divmod(int(whole + fraction) * factor, scale)
    if rest:
        raise UsageError(f"{text!r} is not a whole number", hint=f"write it like {example}")
    if number > MAX_SIZE:
        raise UsageError(f"{text!r} is more than {MAX_SIZE:,}", hint=f"write it like {example}")
    return number


def parse_tokens(text: str) -> int:
    """`96k` → 98304; plain integers as they are. Raises UsageError."""
    return _parse(text, _TOKENS, "a number of tokens", "96k or 98304")


def parse_context(text: str) -> int | None:
    """A number of tokens, or None for `auto`. Zero is refused."""
    if text.strip().lower() == "auto":
        return None
    tokens = parse_tokens(text)
    if tokens == 0:
        raise UsageError("a context of 0 tokens holds nothing", hint="write it like 96k, 98304 or auto")
    return tokens


def parse_token_list(text: str) -> list[int]:
    """`8k,32k` → [8192, 32768]."""
    return [parse_tokens(part) for part in text.split(",") if part.strip()]


def parse_bytes(text: str) -> int:
    """`32GiB`, `32G` and `32gb` → 32·1024³ bytes. Raises UsageError."""
    return _parse(text, _BYTES, "an amount of memory", "32GiB")


def format_tokens(tokens: int) -> str:
    """6144 → `6k`; what is no multiple of 1024 as it is. `parse_tokens` reads both."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)


def format_bytes(count: float) -> str:
    """1536 → `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_count(count: float) -> str:
    """134515008 → `134.5M`."""
    for unit in ("", "K", "M", "B"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"


def format_seconds(seconds: float) -> str:
    """0.0123 → `12 ms`, 75 → `1m15s`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
