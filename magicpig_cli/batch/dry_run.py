"""What a batch would meet, from its checked lines and its plan alone: tokens, what is shared, what fits, how long.

Every answer is taken at its longest, so a run is rarely slower than told for that reason and often faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from magicpig_cli.batch.check import Checked
from magicpig_cli.planner import Plan, predict
from magicpig_cli.planner.prompts import PromptTimes


@dataclass(frozen=True, slots=True)
class Room:
    """How many sequences of one length the memory that is free now holds at once, each counted by itself."""

    tokens: int
    sequences: int

    @classmethod
    def of(cls, plan: Plan, tokens: int) -> Room:
        return cls(tokens, plan.budget_bytes // max(1, plan.sequence_bytes(tokens)))


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds without loading the model. None where `missing` says what is not known of this machine."""

    prefill_s: float | None
    decode_s: float | None
    missing: tuple[str, ...] = ()

    @property
    def total_s(self) -> float | None:
        return None if self.prefill_s is None or self.decode_s is None else self.prefill_s + self.decode_s


@dataclass(frozen=True, slots=True)
class DryRun:
    """The figures of a run that answers all good lines."""

    checked: Checked
    plan: Plan
    batch_size: int
    prefixes: int
    saved_tokens: int  # prompt tokens that are read once for several lines
    longest: Room
    typical: Room  # of the median length
    together: int  # sequences decoded together on average, as far as memory lets them
    duration: Duration

    @classmethod
    def of(cls, checked: Checked, plan: Plan, batch_size: int) -> DryRun:
        lengths = checked.lengths()
        longest, typical = (
            Room.of(plan, int(tokens)) for tokens in (lengths[:, 1].max(initial=0), _median(lengths[:, 1]))
        )
        together = max(1, min(batch_size, typical.sequences))
        return cls(
            checked, plan, batch_size, len(checked.sharing.tokens), checked.sharing.saved_tokens(), longest, typical,
            together, _duration(checked, plan, lengths, together),
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """The object of `--json`."""
        checked, duration = self.checked, self.duration
        return {
            "dry_run": True,
            "total": checked.total,
            "ok": checked.good,
            "failed": len(checked.errors),
            "skipped": 0,
            "prompt_tokens": checked.prompt_tokens,
            "sequence_tokens": checked.sequence_tokens,
            "histogram": [{"up_to": up_to, "lines": lines} for up_to, lines in checked.histogram()],
            "shared_prefixes": self.prefixes,
            "saved_prompt_tokens": self.saved_tokens,
            "batch_size": self.batch_size,
            "fits": {
                name: {"tokens": room.tokens, "sequences": room.sequences}
                for name, room in (("longest", self.longest), ("typical", self.typical))
            },
            "predicted": {
                "prefill_s": duration.prefill_s,
                "decode_s": duration.decode_s,
                "total_s": duration.total_s,
                "decoded_together": self.together,
                "missing": list(duration.missing),
            },
            "plan": list(self.plan.reasons),
        }


def _median(lengths: np.ndarray) -> int:
    return int(np.median(lengths)) if len(lengths) else 0


def _duration(checked: Checked, plan: Plan, lengths: np.ndarray, together: int) -> Duration:
    decode_s, missing = _decode_s(plan, lengths, together)
    times = PromptTimes.of(plan)
    if times is None:
        missing = missing or ("how fast prompts are read was not measured",)
        return Duration(None, decode_s, missing)
    return Duration(_prefill_s(times, checked), decode_s, missing)


def _prefill_s(times: PromptTimes, checked: Checked) -> float:
    """Each shared prefix once, and of each line what follows its own."""
    sharing = checked.sharing
    prefixes = sum(
        times.seconds(sharing.begins_at(prefix), tokens) for prefix, tokens in enumerate(sharing.tokens)
    )  # fmt: skip
    return prefixes + sum(
        times.seconds(sharing.shared_tokens(line), entry.prompt_tokens) for line, entry in enumerate(checked.entries())
    )


def _decode_s(plan: Plan, lengths: np.ndarray, together: int) -> tuple[float | None, tuple[str, ...]]:
    """(seconds of all decode steps, what is not known): lines of about one length at a time, at their mean length.

    The first token of an answer comes from its prompt and takes no step.
    """
    found = 0.0
    for rows in _alike(lengths):
        steps = (rows[:, 1] - rows[:, 0] - 1).clip(min=0)
        tokens = round(float(rows.mean()))  # between the end of the prompt and that of the answer
        step = predict(plan, tokens, together)
        if step.ms_per_token is None:
            return None, step.missing
        found += float(steps.sum()) / together * step.ms_per_token / 1e3
    return found, ()


def _alike(lengths: np.ndarray) -> list[np.ndarray]:
    """Lines [lines, 2] grouped by powers of √2 of their length."""
    if not len(lengths):
        return []
    group = np.round(2 * np.log2(lengths[:, 1]))
    return [lengths[group == number] for number in np.unique(group)]
