"""What this chat's answers took, for the toolbar and `/stats`. Memory is bounded however long the chat is."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from magicpig_cli.events import Event, Finished, StepStats
from magicpig_cli.units import format_seconds

_TIMED_STEPS = 4096  # of the percentiles over all answers


@dataclass(slots=True)
class Totals:
    """`last` is the last answer. Sampled and offloaded keys are per layer, of the last answer and of all."""

    last: Finished | None = None
    answers: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    tpot_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED_STEPS))
    last_layers: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))
    layers: tuple[Counter[int], Counter[int]] = field(default_factory=lambda: (Counter(), Counter()))

    def begin(self) -> None:
        """Another answer begins."""
        self.last_layers = (Counter(), Counter())

    def observe(self, event: Event) -> None:
        """Take in what the engine says."""
        if isinstance(event, StepStats):
            for sampled, offloaded in (self.last_layers, self.layers):
                sampled.update(event.sampled)
                offloaded.update(event.offloaded)
        elif isinstance(event, Finished):
            self.last = event
            self.answers += 1
            self.prompt_tokens += event.prompt_tokens
            self.reused_tokens += event.reused_tokens
            self.completion_tokens += len(event.token_ids)
            self.prefill_s += event.timing.prefill_s
            self.tpot_ms.extend(event.timing.tpot_ms)

    @property
    def tok_s(self) -> float | None:
        """Tokens per second of the last answer."""
        times = self.last.timing.tpot_ms if self.last else ()
        return 1000 / float(np.mean(times)) if times else None

    def lines(self) -> list[str]:
        """The page of `/stats`, memory aside."""
        if self.last is None:
            return ["no answer yet"]
        read = self.prompt_tokens - self.reused_tokens
        return [
            *_answer_lines("last answer", self.last),
            *_layer_lines(self.last_layers),
            f"all {self.answers:,} answers",
            f"  tokens   {read:,} read in {format_seconds(self.prefill_s)}, {self.reused_tokens:,} reused, "
            f"{self.completion_tokens:,} generated",
            *_speed_lines(self.tpot_ms),
            *_layer_lines(self.layers),
        ]


def _answer_lines(title: str, finished: Finished) -> list[str]:
    timing = finished.timing
    return [
        title,
        f"  tokens   {finished.prompt_tokens:,} in the prompt, {finished.reused_tokens:,} of them reused, "
        f"{len(finished.token_ids):,} generated, seed {finished.seed}",
        f"  TTFT     {format_seconds(timing.ttft_s)}" if finished.token_ids else "  TTFT     none: it was interrupted",
        *_speed_lines(timing.tpot_ms),
        *_estimate_lines(finished),
    ]


def _estimate_lines(finished: Finished) -> list[str]:
    if finished.error_estimate is None:
        return []
    budget = "" if finished.budget is None else f", with a budget of {finished.budget:.2%} of the keys on average"
    return [f"  error    about {finished.error_estimate:.1%} of attention outputs, as estimated{budget}"]


def _speed_lines(tpot_ms: tuple[float, ...] | deque[float]) -> list[str]:
    if not tpot_ms:
        return []
    p50, p99 = np.percentile(tpot_ms, [50, 99])
    return [f"  decode   {1000 / np.mean(tpot_ms):.1f} tok/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms per token"]


def _layer_lines(layers: tuple[Counter[int], Counter[int]]) -> list[str]:
    sampled, offloaded = layers
    if not sum(offloaded.values()):
        return ["  sampled  nothing: exact attention"]
    ratios = [f"{layer}: {sampled[layer] / keys:.1%}" for layer, keys in sorted(offloaded.items()) if keys]
    whole = sum(sampled.values()) / sum(offloaded.values())
    return [f"  sampled  {whole:.1%} of the offloaded keys; by layer " + ", ".join(ratios)]
