"""Every choice that nobody has made: from facts, wishes and a profile to a Plan that fits, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from magicpig_cli.config import (
    BUDGET_RANGE,
    DEFAULT_BITS,
    DEFAULT_BUDGET,
    SAMPLERS,
    AttentionOptions,
    Settings,
)
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.hardware import Gpu, Hardware
from magicpig_cli.kernels import RowType
from magicpig_cli.model.as_stored import is_as_stored
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import forms, memory, reasons
from magicpig_cli.planner.checks import check_device, check_request, check_window
from magicpig_cli.planner.plan import Mode, Plan, most_together
from magicpig_cli.planner.predict import predict
from magicpig_cli.planner.quality import budget_for, expected_ratio
from magicpig_cli.planner.ways_out import ways_out
from magicpig_cli.profiles import BUILT_IN, Profile, TableSize
from magicpig_cli.units import format_bytes

SHORTEST_CHUNK = 128  # to which chunks are cut where a GPU has no room for longer ones
# Taken after a profile's own, where no larger tables fit: the paper's other two. They sample more keys (7 and 8% where
# (10, 150) samples 4.5%), so they cost time, not accuracy: EVIDENCE.md section 2.
SMALLER_TABLES = (TableSize(9, 120), TableSize(8, 75))
SAME_SPEED = 1.1  # times the other sampler's step, at the same error, up to which the more accurate one is taken


def plan(
    hardware: Hardware, shape: ModelShape, settings: Settings, profile: Profile = BUILT_IN, why: str = "",
    model: str | None = None,
) -> Plan:  # fmt: skip
    """Choose everything that `settings` leave open, as `profile` (picked because of `why`) recommends.

    model: its name as profiles have it; what a profile has measured on one model alone is used for no other.
    Raises UsageError (values that cannot be meant), ContextError (longer than the model's context), and
    MemoryBudgetError (weights, or one sequence of the context that was asked for, do not fit: the sum, and what would).
    Called before and after loading on a CPU it gives the same budget: what the process already holds counts as its own.
    """
    try:
        return _choose(hardware, shape, settings, profile, why, model)
    except MemoryBudgetError as refusal:

        def fits(machine: Hardware, changed: Settings, smaller: ModelShape) -> Plan:
            return _choose(machine, smaller, changed, profile, why, model)

        hint = ways_out(fits, hardware, shape, settings)
        raise MemoryBudgetError(refusal.message, hint=hint) from None


def _choose(
    hardware: Hardware, shape: ModelShape, settings: Settings, profile: Profile, why: str, model: str | None
) -> Plan:
    check_device(hardware, settings.model.device)
    gpu = hardware.gpu_of(settings.model.device)
    check_request(shape, settings, on_gpu=gpu is not None)
    wanted = settings.context or shape.context
    no_shares = reasons.against_shares(profile, shape, model)
    shares = profile.head_shares if no_shares is None else {}
    draft = replace(_draft(hardware, shape, settings, profile, gpu, wanted=wanted), head_shares=shares)
    check_window(draft)
    choice = _best_sampler(hardware, draft, settings, profile)
    chosen = choice.plan
    found = reasons.of(
        chosen, hardware, settings, profile, why, wanted=wanted, too_large=choice.too_large, other=choice.other,
        no_shares=no_shares,
    )  # fmt: skip
    return replace(chosen, reasons=found)


def _draft(
    hardware: Hardware, shape: ModelShape, settings: Settings, profile: Profile, gpu: Gpu | None, *, wanted: int
) -> Plan:  # fmt: skip
    """What does not depend on memory. Tables are those for the context that is wanted."""
    attention, model, on_gpu = settings.attention, settings.model, gpu is not None
    form, as_stored = forms.form_of(shape, model, on_gpu=on_gpu), is_as_stored(model, shape.in_file, on_gpu=on_gpu)
    if as_stored:
        shape = shape.as_in_file()
    size = _recommended(profile, attention, wanted)
    most = hardware.threads if profile.threads is None else min(hardware.threads, profile.threads)
    return Plan(
        shape=shape,
        mode=cast(Mode, attention.mode),
        auto_sampler=profile.sampler,
        K=size.K,
        L=size.L,
        table_ratio=_ratio(size),
        budget=_budget(attention, profile),
        bits=attention.bits or profile.bits or DEFAULT_BITS,
        tail=profile.tail if attention.tail is None else attention.tail,
        target_error=_target_error(attention, profile),
        sink=profile.sink if attention.sink is None else attention.sink,
        local=profile.local if attention.local is None else attention.local,
        dense_layers=_dense_layers(attention, shape, profile),
        threads=settings.threads or most,
        context=wanted,
        row_dtype="bfloat16" if attention.kv_dtype == "auto" else cast(RowType, attention.kv_dtype),
        weight_type=form,
        as_stored=as_stored,
        weights_bytes=0 if on_gpu else forms.total(forms.on_host(shape, form)),
        budget_bytes=0,
        max_batch=most_together(profile, on_gpu=on_gpu),
        windows_on_host=not on_gpu,
        chunk=profile.chunk,
        auto_lsh_from=profile.auto_lsh_from,
        host_reserve=profile.host_reserve,
        gpu=gpu,
        device_weights_bytes=forms.total(forms.on_device(shape, form)) if on_gpu else 0,
        device_reserve=profile.device_reserve if on_gpu else 0,
        graphs=on_gpu and not model.no_cuda_graphs,
        speeds=hardware.speeds,
        profile=profile.name,
    )


def _target_error(attention: AttentionOptions, profile: Profile) -> float | None:
    return profile.target_error if attention.target_error is None else attention.target_error


def _budget(attention: AttentionOptions, profile: Profile) -> float:
    """What was asked for, the profile's or the default; where it moves, within its bounds."""
    budget = attention.budget or profile.budget or DEFAULT_BUDGET
    if _target_error(attention, profile) is None:
        return budget
    low, high = BUDGET_RANGE
    return min(max(budget, low), high)


def _dense_layers(attention: AttentionOptions, shape: ModelShape, profile: Profile) -> tuple[int, ...]:
    """What was asked for, else those of the profile that this model has."""
    if attention.dense_layers is not None:
        return tuple(sorted(set(attention.dense_layers)))
    return tuple(layer for layer in profile.dense_layers if layer < shape.layers)


# --- sampler -------------------------------------------------------------------------------------------------------


def _best_sampler(hardware: Hardware, draft: Plan, settings: Settings, profile: Profile) -> _Choice:
    """What fits with the sampler that `auto` means, or with the best one where a profile leaves that open.

    That is the one with which the longest context fits, of two the more accurate one, unless the other is faster even
    at the same error. Raises MemoryBudgetError.
    """
    found: list[_Choice] = []
    refusals: list[MemoryBudgetError] = []
    for name in _samplers(settings.attention, profile):
        try:
            found.append(_that_fits(hardware, replace(draft, auto_sampler=name), settings, profile))
        except MemoryBudgetError as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[-1]  # of signatures, which need less
    longest = max(choice.plan.context for choice in found)
    found = [choice for choice in found if choice.plan.context == longest]
    best, *others = sorted(found, key=lambda choice: choice.plan.expected_error or 0.0)
    if not others:
        return best
    (other,) = others
    if _faster_at_its_error(other.plan, best.plan):
        best, other = other, best
    return replace(best, other=other.plan)


def _faster_at_its_error(plan: Plan, accurate: Plan) -> bool:
    """Whether steps are shorter than those of a more accurate sampler that reads just enough to err as much."""
    error = plan.expected_error
    if accurate.sampler == "rabitq" and accurate.target_error is None and error:
        accurate = replace(accurate, budget=min(accurate.budget, budget_for(error, accurate.bits)))
    ms, wanted = (predict(one, one.context).ms_per_token for one in (plan, accurate))
    return ms is not None and wanted is not None and wanted > SAME_SPEED * ms


def _samplers(attention: AttentionOptions, profile: Profile) -> tuple[str, ...]:
    """With which ones the mode `auto` may sample: who sets the size of tables means tables."""
    if any(option is not None for option in (attention.K, attention.L)):
        return ("lsh",)
    if any(option is not None for option in (attention.budget, attention.bits, attention.target_error)):
        return ("rabitq",)
    return SAMPLERS if profile.sampler == "auto" else (profile.sampler,)


def _that_fits(hardware: Hardware, draft: Plan, settings: Settings, profile: Profile) -> _Choice:
    draft = _within_device(draft)
    choice = _tables_that_fit(replace(draft, budget_bytes=_host_budget(hardware, draft)), settings, profile)
    if settings.attention.signatures != "device":
        return choice
    return replace(choice, plan=memory.with_signature_copies(choice.plan))  # of the context that is left


# --- tables and context --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Choice:
    """A plan that fits, what was recommended instead of its tables but does not, and the one with the other sampler."""

    plan: Plan
    too_large: Plan | None
    other: Plan | None = None  # None: it was not to choose from


def _recommended(profile: Profile, attention: AttentionOptions, tokens: int) -> TableSize:
    """What was asked for, completed by the profile's tables for a sequence of `tokens`."""
    size = profile.table_size(tokens)
    if attention.K is None and attention.L is None:
        return size
    K, L = attention.K or size.K, attention.L or size.L
    known = (table for table in profile.tables if (table.K, table.L) == (K, L))
    return next(known, TableSize(K, L))


def _ratio(size: TableSize) -> float:
    return expected_ratio(size.K, size.L) if size.sampled_ratio is None else size.sampled_ratio


def _with_tables(draft: Plan, size: TableSize) -> Plan:
    return replace(draft, K=size.K, L=size.L, table_ratio=_ratio(size))


def _cheaper(draft: Plan, profile: Profile) -> Iterator[Plan]:
    """The draft with smaller tables, the largest of them first: the profile's own, then the paper's."""
    for sizes in (profile.tables, SMALLER_TABLES):
        plans = [_with_tables(draft, size) for size in sizes]
        plans.sort(key=lambda plan: plan.sequence_bytes(plan.context), reverse=True)
        for smaller in plans:
            if smaller.sequence_bytes(smaller.context) < draft.sequence_bytes(draft.context):
                yield smaller
                draft = smaller


def _tables_that_fit(draft: Plan, settings: Settings, profile: Profile) -> _Choice:
    """The recommended tables if the context fits with them, else the largest smaller ones with which it does.

    A context that nobody asked for shrinks to the longest that fits with any. Raises MemoryBudgetError.
    """
    candidates = [draft]
    free = settings.attention.K is None and settings.attention.L is None
    if draft.sampled_layers and draft.sampler == "lsh" and free:
        candidates += _cheaper(draft, profile)
    for candidate in candidates:
        if candidate.sequence_bytes(candidate.context) <= candidate.budget_bytes:
            return _Choice(candidate, None if candidate is draft else draft)
    if settings.context is not None:
        raise MemoryBudgetError(_refusal(candidates[-1], draft.context, smallest=len(candidates) > 1))
    best = max(candidates, key=lambda plan: plan.longest_that_fits(plan.context))
    context = best.longest_that_fits(draft.context)
    if context == 0:
        raise MemoryBudgetError(_refusal(best, 1, smallest=False))
    best = replace(best, context=context)
    recommended = _with_tables(best, _recommended(profile, settings.attention, context))
    if recommended.sequence_bytes(context) <= recommended.budget_bytes:
        return _Choice(recommended, None)
    return _Choice(best, draft)


def _refusal(draft: Plan, tokens: int, *, smallest: bool) -> str:
    """`one sequence of 131,072 tokens does not fit: 15.0 GiB weights + … = 40.1 GiB, but 32.0 GiB are free`."""
    parts = memory.reserved_host(draft, tokens)
    free = draft.budget_bytes + draft.weights_bytes + draft.host_reserve
    what = f"one sequence of {tokens:,} tokens" if tokens > 1 else "one token with its window"
    if smallest:
        what += f", with the smallest tables (K={draft.K} L={draft.L}),"
    return f"{what} does not fit: {memory.written_out(parts)}, but {format_bytes(free)} of memory are free"


# --- memory --------------------------------------------------------------------------------------------------------


def _host_budget(hardware: Hardware, draft: Plan) -> int:
    """Free memory after weights and program. What the process already holds is part of these two."""
    mine = hardware.process_bytes
    left = hardware.memory_free + mine - max(draft.weights_bytes + draft.host_reserve, mine)
    if left <= 0:
        parts = [part for part in memory.reserved_host(draft, draft.context) if part.name in ("weights", "program")]
        free = format_bytes(hardware.memory_free + mine)
        raise MemoryBudgetError(
            f"there is no room for sequences: {memory.written_out(parts)}, but {free} of memory are free"
        )
    return left


def _within_device(draft: Plan) -> Plan:
    """Chunks and batches that the GPU has room for, and graphs if it has any for them. Raises MemoryBudgetError."""
    gpu = draft.gpu
    if gpu is None:
        return draft
    while memory.total(memory.device(draft, 1)) > gpu.free_bytes and (draft.chunk > SHORTEST_CHUNK or draft.graphs):
        if draft.chunk > SHORTEST_CHUNK:
            draft = replace(draft, chunk=max(SHORTEST_CHUNK, draft.chunk // 2))
        else:
            draft = replace(draft, graphs=False)
    if memory.total(memory.device(draft, 1)) > gpu.free_bytes:
        raise MemoryBudgetError(
            f"{gpu.name} has no room: {memory.written_out(memory.device(draft, 1))}, but "
            f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} are free"
        )
    most = draft.max_batch
    while most > 1 and memory.total(memory.device(draft, most)) > gpu.free_bytes:
        most -= 1
    return replace(draft, max_batch=most)
