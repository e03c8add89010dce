"""Whether repetitions of one measurement agree, and what to say if they do not. Causes are named only if known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CV_LIMIT = 0.05  # of the means of repetitions: 0.5–0.8% on a steady machine, 6–13% with others on it now and then
DRIFT_LIMIT = 0.05
_DRIFT_FROM = 4  # repetitions: two at each end

Means = np.ndarray  # [R] mean milliseconds per step of each repetition, in the order in which they ran


def repetition_means(repetitions: Sequence[Sequence[float]]) -> Means:
    """Milliseconds of steps by repetition → [R]."""
    return np.array([np.mean(steps) for steps in repetitions])


def variation(means: Means) -> float | None:
    """Coefficient of variation over repetitions (n − 1 in the denominator); None for fewer than two."""
    if len(means) < 2:
        return None
    return float(means.std(ddof=1) / means.mean())


def drift(means: Means) -> float | None:
    """Median of the later half over that of the earlier half, less 1; None for fewer than four repetitions.

    0 if the halves overlap: then it is scatter, which `variation` tells. With an odd number the middle one is left out.
    """
    if len(means) < _DRIFT_FROM:
        return None
    half = len(means) // 2
    early, late = means[:half], means[-half:]
    if early.max() >= late.min() and early.min() <= late.max():
        return 0.0
    return float(np.median(late) / np.median(early) - 1)


def complaints(means: Means, control: Means | None) -> list[str]:
    """What is wrong with these repetitions; `control` are those of exact attention, which took turns with them."""
    found = []
    spread, change = variation(means), drift(means)
    if spread is not None and spread > CV_LIMIT:
        found.append(
            f"repetitions differ by {spread:.1%} (coefficient of variation; {CV_LIMIT:.0%} is the limit): "
            f"{means.min():.1f} to {means.max():.1f} ms per step"
        )
    if change is not None and abs(change) > DRIFT_LIMIT:
        found.append(_told_drift(change, None if control is None else drift(control)))
    return found


def _told_drift(change: float, control: float | None) -> str:
    text = f"later repetitions are {abs(change):.0%} {'slower' if change > 0 else 'faster'} than earlier ones"
    if control is None:
        return text
    if abs(control) > DRIFT_LIMIT / 2 and (control > 0) == (change > 0):
        return f"{text}, and so are those of exact attention ({control:+.0%}): the machine changed, not the mode"
    return f"{text}; those of exact attention, which took turns with them, are not ({control:+.0%})"
