"""What the planner expects of a benchmark row, to stand beside what was measured."""

from __future__ import annotations

from dataclasses import replace

from magicpig_cli.planner import Plan, predict


def predicted(plan: Plan, mode: str, context: int, batch: int, generated: int) -> dict[str, float | None]:
    """`tpot_ms` of that mode (None where it cannot be told), and `peak_bytes` of a process that runs this mode alone.

    The sampled ratio is the plan's expectation of real text, not what was measured.
    """
    found = predict(replace(plan, mode=mode), context, batch, generated=generated)  # type: ignore[arg-type]
    return {"tpot_ms": found.ms_per_token, "peak_bytes": found.host_bytes}
