"""A decode step as a sum of terms, each with its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from magicpig_cli.events import STAGES
from magicpig_cli.planner.plan import Plan

# What a step does beside products and kernels, in the time of so many small operators of torch called from Python:
# once in a layer, and for each sequence. Fitted at 2k, 8k and 32k (docs/decisions/007).
LAYER_OPERATORS = (28, 2)  # norms, rotary embedding, activations, modules; and its cache
SAMPLED_OPERATORS = (18, 8)  # of a sampled layer beside that, a piece of maintenance of the index included


def operators(counts: tuple[int, int], sequences: int) -> int:
    """How many these are, of a layer or a call."""
    once, each = counts
    return once + sequences * each


@dataclass(frozen=True, slots=True)
class Term:
    """An addend of a step."""

    stage: str  # events.STAGES
    seconds: float
    formula: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step takes."""

    terms: tuple[Term, ...]  # none where the machine was not measured
    missing: tuple[str, ...] = ()  # what is left out
    assumed: tuple[str, ...] = ()  # what it rests on that was not measured

    @property
    def stages_ms(self) -> dict[str, float]:
        """Stage → milliseconds; empty where there are no terms."""
        stages = dict.fromkeys(STAGES, 0.0) if self.terms else {}
        for term in self.terms:
            stages[term.stage] += 1e3 * term.seconds
        return stages


def exact_keys(plan: Plan, tokens: int, sampled: int) -> int:
    """Keys per KV head that all layers but the sampled ones attend to exactly."""
    windows = [min(tokens, window) for window in plan.shape.layer_windows if window is not None]
    return max(0, (len(plan.shape.full_layers) - sampled) * tokens + sum(windows))
