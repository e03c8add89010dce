"""The outcome of tuning as CLI.md's JSON, as cells of a table, and as a profile."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from magicpig_cli.config import DEFAULT_BUDGET
from magicpig_cli.engine.engine import Engine
from magicpig_cli.hardware import Hardware
from magicpig_cli.profiles import Match, Profile, TableSize
from magicpig_cli.tuning.search import Candidate
from magicpig_cli.tuning.trial import AnyCandidate
from magicpig_cli.tuning.tune import Tuned
from magicpig_cli.tuning.verify import LayerQuality
from magicpig_cli.units import format_bytes

MEASURED = "measured"  # heads the column beside each prediction
COLUMNS = (
    "", "sampler", "sampled", MEASURED, "error", "expected", MEASURED, "ms", MEASURED, "index", "dense layers",
)  # fmt: skip
RIGHT = ("sampled", MEASURED, "error", "expected", "ms", "index")
ROWS = 12  # of the table: the front near the target
WORTH_TELLING = 1.05  # times the error with shares of heads that an even budget has


def as_json(engine: Engine, tuned: Tuned, profile: str | None) -> dict[str, Any]:
    """The object that CLI.md specifies; `layers`, `meta` and some keys inside of others are added."""
    verified = {candidate.size for candidate in tuned.verified}
    front = {candidate.size for candidate in tuned.front}
    budgets = {candidate.budget for candidate in tuned.budgets}
    return {
        "model": engine.model_name,
        "context": tuned.context,
        "target": {"error": tuned.goal.error, "ratio": tuned.goal.ratio},
        "met": tuned.met,
        "calibration": tuned.calibration,
        "chosen": {
            **_candidate(tuned, tuned.chosen), "sink": engine.plan.sink, "local": engine.plan.local,
            "head_shares": _shares(tuned.chosen),
        },
        "candidates": [
            _candidate(tuned, candidate) | {"verified": candidate.size in verified, "front": candidate.size in front}
            for candidate in (
                *tuned.verified, *(other for other in tuned.candidates if other.size not in verified)
            )
        ]
        + [
            _candidate(tuned, candidate) | {"verified": candidate.budget in budgets, "front": False}
            for candidate in (
                *tuned.budgets, *(other for other in tuned.predicted_budgets if other.budget not in budgets)
            )
        ],
        "held_out": {"error": tuned.held_out.error, "ratio": tuned.held_out.ratio},
        "layers": layers(tuned),
        "meta": _meta(engine, tuned, profile),
    }  # fmt: skip


def _candidate(tuned: Tuned, candidate: AnyCandidate) -> dict[str, Any]:
    measured = tuned.measurement(candidate)
    return {
        **_options(candidate),
        "dense_layers": list(candidate.dense_layers),
        "predicted": {
            "ratio": candidate.ratio, "error": candidate.error, "ms": candidate.ms,
            "index_bytes": candidate.index_bytes,
        },
        "expected_error": candidate.expected_error,
        "measured": None if measured is None
        else {"ratio": measured.quality.ratio, "error": measured.quality.error, "ms": measured.ms},
    }  # fmt: skip


def _options(candidate: AnyCandidate) -> dict[str, Any]:
    """The sampler, and what belongs to it."""
    if isinstance(candidate, Candidate):
        return {"sampler": "lsh", "K": candidate.K, "L": candidate.L}
    own = {"budget": candidate.budget, "bits": candidate.bits, "tail": candidate.tail}
    return {"sampler": "rabitq", "K": None, "L": None, **own}


def _shares(candidate: AnyCandidate) -> dict[int, list[float]] | None:
    """Of each query head, by layer; None where all read as much."""
    shares = {} if isinstance(candidate, Candidate) else candidate.head_shares
    return {layer: list(heads) for layer, heads in shares.items()} or None


def _typed(candidate: AnyCandidate, profile: str | None) -> str:
    """The same as options of the commands. profile: the one that was saved, which alone holds shares of heads."""
    dense = f"--dense-layers {','.join(map(str, candidate.dense_layers)) or 'none'}"
    if isinstance(candidate, Candidate):
        return f"-K {candidate.K} -L {candidate.L} {dense}"
    own = f"--budget {candidate.budget:g}" if profile is None else f"--profile {profile}"
    return f"--attention rabitq {own} {dense}"


def _other_line(tuned: Tuned, profile: str | None) -> list[str]:
    """What the best of the other sampler does."""
    if tuned.no_tables is not None:
        return [f"tables have no room: {tuned.no_tables}"]
    other = tuned.other
    measured = None if other is None else tuned.measurement(other)
    if other is None or measured is None:
        return ["signatures have no room at this context"]
    value = tuned.goal.value(measured.quality.error, measured.quality.ratio)
    return [
        f"the other sampler, {other.words}: error {measured.quality.error:.3f}, {measured.quality.ratio:.1%} of the "
        f"keys, {measured.relative_ms:.2f} times an exact step, {format_bytes(other.index_bytes)} of index"
        + (": misses the target" if value > tuned.goal.target else "")
        + f"; to have it: {_typed(other, profile)}"
    ]


def layers(tuned: Tuned) -> list[dict[str, Any]]:
    """What the choice does to each layer that may be sampled: on the tuning text and on the other one."""
    dense = set(tuned.chosen.dense_layers)
    numbers = sorted({*tuned.layers, *tuned.chosen.sampled_layers})
    return [
        {
            "layer": number,
            "dense": number in dense,
            "measured": _quality(tuned.layers, number),
            "held_out": _quality(tuned.held_out_layers, number),
        }
        for number in numbers
    ]


def _quality(layers: Mapping[int, LayerQuality], number: int) -> dict[str, float] | None:
    quality = layers.get(number)
    return None if quality is None else {"error": quality.error, "ratio": quality.ratio}


def _meta(engine: Engine, tuned: Tuned, profile: str | None) -> dict[str, Any]:
    return {
        "text": tuned.texts.source,
        "text_repeated": tuned.texts.repeated,
        "depths": list(tuned.lengths),
        "exact_ms": tuned.exact_ms,
        "device": engine.device,
        "isa": engine.isa,
        "threads": engine.threads,
        "kv_dtype": engine.plan.row_dtype,
        "hash_seed": engine.settings.attention.hash_seed,
        "profile": profile,
        "no_tables": tuned.no_tables,
        "date": _today(),
    }


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def table_rows(tuned: Tuned) -> list[list[str]]:
    """The pairs of the front whose error (or ratio) is nearest to the target, and all that were measured."""
    goal = tuned.goal

    def distance(candidate: Candidate) -> float:
        return abs(goal.value(candidate.expected_error, candidate.ratio) / goal.target - 1)

    verified = list(tuned.verified)
    sizes = {candidate.size for candidate in verified}
    others = sorted((candidate for candidate in tuned.front if candidate.size not in sizes), key=distance)
    shown: list[AnyCandidate] = [*tuned.budgets, *verified]
    shown += others[: max(0, ROWS - len(shown))]
    return [_row(tuned, candidate) for candidate in sorted(shown, key=lambda candidate: candidate.expected_error)]


def _row(tuned: Tuned, candidate: AnyCandidate) -> list[str]:
    measured = tuned.measurement(candidate)
    return [
        "*" if candidate.words == tuned.chosen.words else "", candidate.words,
        f"{candidate.ratio:.1%}", "" if measured is None else f"{measured.quality.ratio:.1%}",
        f"{candidate.error:.3f}", f"{candidate.expected_error:.3f}",
        "" if measured is None else f"{measured.quality.error:.3f}",
        f"{candidate.ms:.1f}", "" if measured is None else f"{measured.ms:.1f}",
        format_bytes(candidate.index_bytes), ", ".join(map(str, candidate.dense_layers)) or "none",
    ]  # fmt: skip


def as_profile(engine: Engine, tuned: Tuned, base: Profile, machine: Hardware, name: str) -> Profile:
    """The profile in use with what was chosen, and the best of the other sampler, for this model on this machine.

    Sequences shorter than those for which sampling was measured to pay stay exact with `--attention auto`.
    """
    chosen, measured = tuned.chosen, tuned.measurement(tuned.chosen)
    budget = tuned.budgets[0] if tuned.budgets else None
    assert measured is not None, "the choice was measured"
    on_gpu = engine.device != "cpu"
    machine_name = machine.cpu_model + (f", {engine.device}" if on_gpu else "")
    source = (
        f"measured: tune-kl, {_today()}, {engine.model_name} at {tuned.context:,} tokens of {tuned.texts.source}, "
        f"{machine_name}"
    )
    times = f"{source}: {measured.ms:.1f} ms per token, exact {tuned.exact_ms:.1f}"
    pays = measured.ms < tuned.exact_ms
    own = {
        "attention.sampler": source,
        **({"attention.tables": source} if tuned.verified else {}),
        "attention.dense_layers": source,
        "attention.auto_lsh_from": times,
        **({} if budget is None else {f"attention.{key}": source for key in ("budget", "bits", "tail", "head_shares")}),
        **{
            f"attention.{key}": f"as asked of {source.removeprefix('measured: ')}"
            for key in ("sink", "local")
            if getattr(base, key) != getattr(engine.plan, key)
        },
    }
    # Shares of heads are of one model: those of another one's profile are not in the plan (021).
    gone = set() if engine.plan.head_shares else {"attention.head_shares"}
    inherited = {key: text for key, text in base.sources.items() if key.partition("[")[0] not in {*own, *gone}}
    base = replace(base, head_shares=engine.plan.head_shares)
    if tuned.verified:
        tables = tuned.verified[0]
        of_tables = tuned.measurement(tables)
        assert of_tables is not None, "the verified were measured"
        base = replace(base, tables=(TableSize(tables.K, tables.L, None, of_tables.quality.ratio),))
    if budget is not None:
        base = replace(
            base, budget=budget.budget, bits=budget.bits, tail=budget.tail, head_shares=budget.head_shares
        )  # fmt: skip
    return replace(
        base,
        name=name,
        match=Match(
            device="gpu" if on_gpu else "cpu", gpu_name=engine.device if on_gpu else None,
            cpu_model=machine.cpu_model, model=engine.model_name,
        ),
        sampler="lsh" if isinstance(chosen, Candidate) else "rabitq",
        dense_layers=chosen.dense_layers,
        sink=engine.plan.sink,
        local=engine.plan.local,
        auto_lsh_from=min(base.auto_lsh_from, tuned.context) if pays else max(base.auto_lsh_from, tuned.context + 1),
        sources=inherited | own,
        path=None,
    )  # fmt: skip


def verdict(engine: Engine, tuned: Tuned, profile: str | None) -> list[str]:
    """What was chosen, how it did on the other text, what it costs, and what to type."""
    chosen, goal, measured = tuned.chosen, tuned.goal, tuned.measurement(tuned.chosen)
    assert measured is not None, "the choice was measured"
    held = tuned.held_out
    wanted = f"error {goal.error:g}" if goal.error is not None else f"ratio {goal.ratio:.2%}"
    lines = [
        f"* chosen: {chosen.words}, dense layers {', '.join(map(str, chosen.dense_layers)) or 'none'} "
        f"(calibration: measured error / predicted = {tuned.calibration:.2f})",
        f"on text that was not tuned on: error {held.error:.3f}, {held.ratio:.1%} of the keys sampled; "
        + (f"meets the target ({wanted})" if tuned.met else f"misses the target ({wanted}): {_advice(tuned)}"),
        f"{measured.ms:.1f} ms per token at {tuned.context:,} tokens, with exact attention {tuned.exact_ms:.1f}"
        + ("" if measured.ms < tuned.exact_ms else ": sampling does not pay at this length"),
    ]
    lines += _other_line(tuned, profile)
    if profile is None and tuned.budgets and tuned.even_error is not None and tuned.even_error >= WORTH_TELLING:
        lines.append(
            f"--budget alone reads the same share in all heads, which errs about {tuned.even_error:.1f} times as much "
            f"(at {DEFAULT_BUDGET:.0%}): the shares of heads that were measured with it are kept by --save-profile NAME"
        )
    named = f"--profile {profile}" if profile else _typed(chosen, None)
    return [*lines, f"magicpig chat -m {shlex.quote(engine.settings.model.model)} {named}"]


def _advice(tuned: Tuned) -> str:
    """Why the target was missed: by the text, or by everything that was tried."""
    if tuned.expected_to_meet:
        return "the tuning text met it; a longer or more similar --text tells more"
    return "no pair of the grid and no budget meets it in the memory there is"


def layer_lines(tuned: Tuned) -> list[str]:
    """One line per layer, for -v."""
    lines = []
    for layer in layers(tuned):
        figures = [
            f"{name.replace('_', ' ')}: error {layer[name]['error']:.3f}, ratio {layer[name]['ratio']:.2%}"
            for name in ("measured", "held_out")
            if layer[name] is not None
        ]
        lines.append("  ".join([f"layer {layer['layer']:>3}" + (" dense" if layer["dense"] else ""), *figures]))
    return lines
