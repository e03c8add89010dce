"""What the planner expects of a benchmark row, to stand beside what was measured."""

from __future__ import annotations

from dataclasses import replace

from magicpig_cli.planner import Plan, predict


def predicted(plan: Plan, mode: str, context: int, batch: int, generated: int) -> dict[str, float | None]:
    """`tpot_ms` of that mode (None where it cannot be told) and `peak_bytes` of the process so far.

    The sampled ratio is the plan's expectation of real text, not what was measured. All modes of a run share memory:
    exact rows are measured beside an index that the sampler needs.
    """
    timed = predict(replace(plan, mode=mode), context, batch, generated=generated)  # type: ignore[arg-type]
    held = predict(plan, context, batch, generated=generated)
    return {"tpot_ms": timed.ms_per_token, "peak_bytes": held.host_bytes}
