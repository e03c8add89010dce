"""What it takes the host to launch a decode step on a GPU, attention left out: by the model's code, and by graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from magicpig_cli.attention.base import LogitRule
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.model import hook
from magicpig_cli.model.trial import StandIn

STEPS = 15  # measured of each, after one that is not


@dataclass(slots=True)
class _NoAttention(StandIn):
    """Launches nothing: each layer gets the same zeros at every step."""

    prefill: bool = False
    zeros: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        rule: LogitRule,
    ) -> torch.Tensor:  # fmt: skip
        if layer not in self.zeros:
            shape = query.shape[0], query.shape[2], query.shape[1], value.shape[3]
            self.zeros[layer] = query.new_zeros(shape)
        return self.zeros[layer]


def launch_ms(runner: ModelRunner, batch: int) -> dict[str, float | None] | None:
    """Milliseconds per step of `batch` tokens, `{"eager", "graphs"}`, until the GPU has been given all of it.

    graphs: None where steps are not recorded. None on a CPU, where nothing is launched.
    """
    device = runner.model.device
    return None if device.type == "cpu" else measure(runner, batch, lambda: torch.cuda.synchronize(device))


def measure(runner: ModelRunner, batch: int, finish: Callable[[], None]) -> dict[str, float | None]:
    """As `launch_ms`, on any device. finish: waits until everything is done that was launched."""
    ids = torch.full((batch, 1), 3, device=runner.model.device)
    nothing, recording = _NoAttention(), runner.segments.prepare(batch)

    def median(step: Callable[[], object]) -> float:
        found = []
        for _ in range(1 + STEPS):
            finish()
            begin = time.perf_counter()
            step()
            found.append(1e3 * (time.perf_counter() - begin))
        finish()
        return statistics.median(found[1:])

    with torch.inference_mode():
        eager = median(lambda: hook.run(runner.model, ids, ids, nothing))
        graphs = None if recording is None else median(lambda: recording.replay(ids, ids, nothing))
    return {"eager": eager, "graphs": graphs}
