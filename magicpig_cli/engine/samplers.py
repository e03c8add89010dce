"""The samplers that a plan may name, each made of what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from magicpig_cli.attention.base import Sampler
from magicpig_cli.attention.lsh import LshSampler
from magicpig_cli.attention.oracle import BASELINES, FullScores
from magicpig_cli.attention.rabitq import RabitqSampler
from magicpig_cli.attention.scan_there import ScanThere
from magicpig_cli.attention.shares import head_budgets
from magicpig_cli.cache.staging import Staging
from magicpig_cli.planner import Plan


def _lsh(plan: Plan, hash_seed: int, staging: Staging) -> Sampler:
    return LshSampler(plan.K, plan.L, hash_seed, plan.threads, staging, plan.tables.tail_rate)


def _rabitq(plan: Plan, hash_seed: int, staging: Staging) -> Sampler:
    moves = plan.target_error is not None  # by which each head finds its own
    there = None
    if plan.scans_there and not staging.on_host:
        there = ScanThere(staging, plan.indexed_keys(plan.context), plan.signature_room)
    return RabitqSampler(
        budget=plan.budget, tail=plan.tail_share, bits=plan.bits, target_error=plan.target_error,
        hash_seed=hash_seed, threads=plan.threads,
        head_budgets=None if moves else head_budgets(plan.budget, plan.head_shares, plan.sampled_by_any),
        there=there,
    )  # fmt: skip


def _baseline(name: str, plan: Plan, hash_seed: int, staging: Staging) -> Sampler:
    return FullScores(name, plan.budget, hash_seed, plan.threads, staging)


_MAKERS: dict[str, Callable[[Plan, int, Staging], Sampler]] = {
    "lsh": _lsh, "rabitq": _rabitq, **{name: partial(_baseline, name) for name in BASELINES},
}  # fmt: skip


def make_sampler(name: str, plan: Plan, hash_seed: int, staging: Staging) -> Sampler:
    """The sampler of this name."""
    return _MAKERS[name](plan, hash_seed, staging)
