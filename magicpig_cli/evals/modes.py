"""The ways to attend that are held to exact attention, each as a runner over the same model and sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from magicpig_cli.attention.oracle import BASELINES
from magicpig_cli.config import MAX_SEED
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.planner import Plan

EXACT = "exact"
WITHOUT_BUDGET = (EXACT, "lsh")  # its tables decide what `lsh` samples
_WITHOUT_SEEDS = (EXACT, "topk")


@dataclass(frozen=True, slots=True)
class Mode:
    """A name of `--attention` or a baseline, and the share of keys that it may sample (None: not its to say)."""

    name: str
    budget: float | None = None

    @property
    def label(self) -> str:
        """For people: `rabitq 2%`."""
        return self.name if self.budget is None else f"{self.name} {100 * self.budget:.3g}%"

    @property
    def baseline(self) -> bool:
        """Whether it reads all keys: no fast path."""
        return self.name in BASELINES

    def seeds(self, first: int, count: int) -> list[int]:
        """Hash seeds to run it with; one where it draws nothing."""
        return [(first + i) % (MAX_SEED + 1) for i in range(1 if self.name in _WITHOUT_SEEDS else count)]


def modes(names: list[str], budgets: list[float]) -> list[Mode]:
    """Exact attention first, then each mode with each budget that it can take."""
    found = [Mode(EXACT)]
    for name in names:
        if name in WITHOUT_BUDGET:
            found.append(Mode(name))
        else:
            found += [Mode(name, budget) for budget in budgets]
    return list(dict.fromkeys(found))


def runner(engine: Engine, mode: Mode, plans: Mapping[Mode, Plan], hash_seed: int) -> ModelRunner:
    """Attends in that mode to sequences of the engine's own runner, or of forks of them.

    plans: of the samplers; sink, window and rows as in the engine's plan.
    """
    model, device = engine.runner.model, engine.runner.model.device
    if mode.name == EXACT:
        return engine.runner
    plan = replace(engine.plan, budget=mode.budget or 0.0) if mode.baseline else plans[mode]
    return ModelRunner(model, engine.shape, plan, device, hash_seed)
