"""Prompts of an exact length: as much filler as the context has room for."""

from __future__ import annotations

from collections.abc import Callable

SLACK = 4  # tokens that may stay unused: looking further would take as long again
_PROBE = 256  # units of the first guess


def largest_that_fits(size: Callable[[int], int], limit: int, least: int) -> int | None:
    """The largest n from `least` on with size(n) ≤ limit, or one within SLACK tokens of the limit; None: not even that.

    size: tokens with n units of filler; it grows with n, roughly in proportion.
    """
    low, low_size = least, size(least)
    if low_size > limit:
        return None
    high: int | None = None
    probe = least + _PROBE
    while limit - low_size > SLACK and (high is None or high - low > 1):
        found = size(probe)
        rate = max((found - low_size) / (probe - low), 1e-3)  # tokens per unit
        if found <= limit:
            low, low_size = probe, found
        else:
            high = probe
        guess = min(low + max(1, int((limit - low_size) / rate)), 4 * probe)
        if high is not None and guess >= high:  # an estimate that is off must not creep
            guess = (low + high) // 2
        probe = max(guess, low + 1)
    return low
