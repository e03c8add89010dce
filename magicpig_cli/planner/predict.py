"""What a run of a plan will take: peak memory by part, milliseconds per step by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from magicpig_cli.config import DEFAULT_MAX_TOKENS
from magicpig_cli.planner.memory import Part, device, expected_host, total
from magicpig_cli.planner.plan import Plan
from magicpig_cli.planner.steps import StepTime
from magicpig_cli.planner.times import step_time


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of `batch` sequences of `tokens` decoded together."""

    tokens: int
    batch: int
    host: tuple[Part, ...]  # that a process holds at its peak
    device: tuple[Part, ...]  # that the GPU holds; nothing on a CPU
    time: StepTime

    @property
    def stages_ms(self) -> Mapping[str, float]:
        """Stage (events.STAGES) → milliseconds of a step; empty = this machine was not measured."""
        return self.time.stages_ms

    @property
    def missing(self) -> tuple[str, ...]:
        """What the stages leave out."""
        return self.time.missing

    @property
    def assumed(self) -> tuple[str, ...]:
        """What they rest on that was not measured."""
        return self.time.assumed

    @property
    def host_bytes(self) -> int:
        return total(self.host)

    @property
    def device_bytes(self) -> int:
        return total(self.device)

    @property
    def ms_per_token(self) -> float | None:
        """Of one step, which gives each sequence a token; None where something is left out."""
        return sum(self.stages_ms.values()) if self.stages_ms and not self.missing else None


def predict(
    plan: Plan, tokens: int, batch: int = 1, *, generated: int = DEFAULT_MAX_TOKENS, sampled_ratio: float | None = None
) -> Prediction:
    """What `batch` sequences of `tokens`, the last `generated` of them answers, will take on the plan's machine.

    sampled_ratio: of the offloaded keys, where it is known; None = what the plan expects.
    """
    ratio = plan.sampled_ratio if sampled_ratio is None else sampled_ratio
    time = step_time(plan, tokens, batch, ratio)
    return Prediction(tokens, batch, expected_host(plan, tokens, batch, generated), device(plan, batch), time)
