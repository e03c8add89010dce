"""What a decode step gives: logits, what it cost, and what was sampled, put together from the forwards that made it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from magicpig_cli.attention.base import StepRecorder
from magicpig_cli.events import STAGES, StepStats, mean_budget


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one decode step: logits [B, V], what it cost, and per sequence what was sampled of what."""

    logits: torch.Tensor
    stats: StepStats
    sampled: list[int]
    offloaded: list[int]
    squares: list[dict[int, float]]  # per sequence, of each sampled layer: mean square of the estimated relative error
    budgets: list[float | None]  # per sequence, mean over sampled layers and heads, of a sampler that has one
    errors: torch.Tensor | None  # relative attention errors [sampled layers · B · H], if they were asked for


@dataclass(frozen=True, slots=True)
class Part:
    """One forward of a step: the numbers of its sequences in the batch, and what it recorded."""

    members: list[int]
    logits: torch.Tensor  # [their number, V]
    record: StepRecorder


def put_together(parts: Sequence[Part], wall_ns: int) -> Step:
    """The step that these forwards make: together they have every sequence once.

    The host's time is that of all of them. What overlaps is little, as they take turns with the kernels; where it is
    more than the step took, every stage is shortened alike.
    """
    count = sum(len(part.members) for part in parts)
    sampled, offloaded = (_in_batch(parts, name, count, 0) for name in ("sampled", "offloaded"))
    squares, budgets = (_in_batch(parts, name, count, None) for name in ("squares", "budgets"))
    of_sequence = [_of_sequence(squares, b) for b in range(count)]
    mean_budgets = [mean_budget(_of_sequence(budgets, b).values()) for b in range(count)]
    stats = StepStats(
        batch=count,
        wall_ms=wall_ns / 1e6,
        stages_ms=_stages_ms(parts, wall_ns),
        sampled={layer: sum(counts) for layer, counts in sampled.items()},
        offloaded={layer: sum(counts) for layer, counts in offloaded.items()},
        squares={layer: mean for layer, of_layer in squares.items() if (mean := _mean(of_layer)) is not None},
        budget=mean_budget(mean_budgets),
        device_ms=_sums_ms(part.record.device_ns for part in parts),
        waited_ms=sum(part.record.waited_ns for part in parts) / 1e6,
    )
    found, asked = (
        [sum(counts[b] for counts in table.values()) for b in range(count)] for table in (sampled, offloaded)
    )
    return Step(_logits(parts, count), stats, found, asked, of_sequence, mean_budgets, _errors(parts))


def _logits(parts: Sequence[Part], count: int) -> torch.Tensor:
    """[B, V] in the order of the batch."""
    if len(parts) == 1:
        return parts[0].logits
    rows: list[torch.Tensor | None] = [None] * count
    for part in parts:
        for b, row in zip(part.members, part.logits, strict=True):
            rows[b] = row
    return torch.stack([row for row in rows if row is not None])


def _errors(parts: Sequence[Part]) -> torch.Tensor | None:
    """Relative errors of all layers, on the host. They are measured in batches that are not halved."""
    errors = [error.flatten() for part in parts for error in part.record.errors or ()]
    return torch.cat(errors).cpu() if errors else None


def _in_batch(parts: Sequence[Part], name: str, count: int, missing: Any) -> dict[int, list[Any]]:
    """A table of the records, layer → per sequence, in the order of the batch."""
    whole: dict[int, list[Any]] = {}
    for part in parts:
        for layer, values in getattr(part.record, name).items():
            row = whole.setdefault(layer, [missing] * count)
            for b, value in zip(part.members, values, strict=True):
                row[b] = value
    return whole


def _stages_ms(parts: Sequence[Part], wall_ns: int) -> dict[str, float]:
    """Stage → milliseconds of the host; they add up to the step."""
    wall_ms, spent = wall_ns / 1e6, _sums_ms(part.record.ns for part in parts)
    total = sum(spent.values())
    shorter = min(1.0, wall_ms / total) if total else 1.0
    stages = {stage: spent.get(stage, 0.0) * shorter for stage in STAGES}
    stages["other"] = max(0.0, wall_ms - sum(stages.values()))
    return stages


def _sums_ms(times: Iterable[dict[str, int]]) -> dict[str, float]:
    """Nanoseconds by stage, added up."""
    total: dict[str, float] = {}
    for of_part in times:
        for stage, nanoseconds in of_part.items():
            total[stage] = total.get(stage, 0.0) + nanoseconds / 1e6
    return total


def _of_sequence(by_layer: dict[int, list[float | None]], b: int) -> dict[int, float]:
    """What was noted of a sequence, by sampled layer."""
    found = {layer: values[b] for layer, values in by_layer.items()}
    return {layer: value for layer, value in found.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
