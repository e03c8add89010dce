"""The outcome of tuning as CLI.md's JSON, as cells of a table, and as a profile."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from magicpig_cli.engine.engine import Engine
from magicpig_cli.hardware import Hardware
from magicpig_cli.profiles import Match, Profile, TableSize
from magicpig_cli.tuning.search import Candidate
from magicpig_cli.tuning.signatures import SignatureCandidate
from magicpig_cli.tuning.tune import Tuned
from magicpig_cli.tuning.verify import LayerQuality
from magicpig_cli.units import format_bytes

MEASURED = "measured"  # heads the column beside each prediction
COLUMNS = ("", "K", "L", "sampled", MEASURED, "error", "expected", MEASURED, "ms", MEASURED, "index", "dense layers")
RIGHT = ("K", "L", "sampled", MEASURED, "error", "expected", "ms", "index")
ROWS = 12  # of the table: the front near the target


def as_json(engine: Engine, tuned: Tuned, profile: str | None) -> dict[str, Any]:
    """The object that CLI.md specifies; `layers`, `meta` and some keys inside of others are added."""
    verified = {candidate.size for candidate in tuned.verified}
    front = {candidate.size for candidate in tuned.front}
    return {
        "model": engine.model_name,
        "context": tuned.context,
        "target": {"error": tuned.goal.error, "ratio": tuned.goal.ratio},
        "met": tuned.met,
        "calibration": tuned.calibration,
        "chosen": {
            **_candidate(tuned, tuned.chosen),
            "dense_layers": list(tuned.chosen.dense_layers),
            "sink": engine.plan.sink,
            "local": engine.plan.local,
        },
        "candidates": [
            _candidate(tuned, candidate) | {"verified": candidate.size in verified, "front": candidate.size in front}
            for candidate in (
                *tuned.verified, *(other for other in tuned.candidates if other.size not in verified)
            )
        ]
        + [_signatures(candidate) for candidate in tuned.signatures],
        "held_out": {"error": tuned.held_out.error, "ratio": tuned.held_out.ratio},
        "layers": layers(tuned),
        "meta": _meta(engine, tuned, profile),
    }  # fmt: skip


def _candidate(tuned: Tuned, candidate: Candidate) -> dict[str, Any]:
    measured = tuned.measurement(candidate)
    return {
        "sampler": "lsh",
        "K": candidate.K,
        "L": candidate.L,
        "dense_layers": list(candidate.dense_layers),
        "predicted": {
            "ratio": candidate.ratio, "error": candidate.error, "ms": candidate.ms,
            "index_bytes": candidate.index_bytes,
        },
        "expected_error": candidate.expected_error,
        "measured": None if measured is None
        else {"ratio": measured.quality.ratio, "error": measured.quality.error, "ms": measured.ms},
    }  # fmt: skip


def _signatures(candidate: SignatureCandidate) -> dict[str, Any]:
    return {
        "sampler": "rabitq", "K": None, "L": None,
        "budget": candidate.budget, "bits": candidate.bits, "tail": candidate.tail,
        "predicted": {
            "ratio": candidate.ratio, "error": candidate.error, "ms": candidate.ms,
            "index_bytes": candidate.index_bytes,
        },
        "measured": None, "verified": False, "front": False,
    }  # fmt: skip


def signature_line(tuned: Tuned) -> str:
    """What the other sampler is predicted to do, at the smallest budget that meets the target if one does."""
    meeting = [c for c in tuned.signatures if tuned.goal.value(c.error, c.ratio) <= tuned.goal.target]
    ratio_asked = tuned.goal.error is None
    best = (meeting[-1] if ratio_asked else meeting[0]) if meeting else tuned.signatures[-1 if not ratio_asked else 0]
    meets = "meet the target" if meeting else "miss the target"
    return (
        f"not measured: --attention rabitq --budget {best.budget:g} is predicted to {meets}: "
        f"error {best.error:.3f}, {best.ratio:.1%} of the keys, {best.ms:.1f} ms per token, "
        f"{format_bytes(best.index_bytes)} of index"
    )


def layers(tuned: Tuned) -> list[dict[str, Any]]:
    """What the chosen pair does to each layer that may be sampled: on the tuning text and on the other one."""
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
        "date": _today(),
    }


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def table_rows(tuned: Tuned) -> list[list[str]]:
    """The candidates of the front whose error (or ratio) is nearest to the target, and all that were verified."""
    goal = tuned.goal

    def distance(candidate: Candidate) -> float:
        return abs(goal.value(candidate.expected_error, candidate.ratio) / goal.target - 1)

    verified = list(tuned.verified)
    sizes = {candidate.size for candidate in verified}
    others = sorted((candidate for candidate in tuned.front if candidate.size not in sizes), key=distance)
    shown = verified + others[: max(0, ROWS - len(verified))]
    return [_row(tuned, candidate) for candidate in sorted(shown, key=lambda candidate: candidate.expected_error)]


def _row(tuned: Tuned, candidate: Candidate) -> list[str]:
    measured = tuned.measurement(candidate)
    return [
        "*" if candidate.size == tuned.chosen.size else "",
        str(candidate.K), str(candidate.L),
        f"{candidate.ratio:.1%}", "" if measured is None else f"{measured.quality.ratio:.1%}",
        f"{candidate.error:.3f}", f"{candidate.expected_error:.3f}",
        "" if measured is None else f"{measured.quality.error:.3f}",
        f"{candidate.ms:.1f}", "" if measured is None else f"{measured.ms:.1f}",
        format_bytes(candidate.index_bytes), ", ".join(map(str, candidate.dense_layers)) or "none",
    ]  # fmt: skip


def as_profile(engine: Engine, tuned: Tuned, base: Profile, machine: Hardware, name: str) -> Profile:
    """The profile in use with what was chosen, for this model on this machine.

    Sequences shorter than those for which sampling was measured to pay stay exact with `--attention auto`.
    """
    chosen, measured = tuned.chosen, tuned.measurement(tuned.chosen)
    assert measured is not None, "the chosen pair was measured"
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
        "attention.tables": source,
        "attention.dense_layers": source,
        "attention.auto_lsh_from": times,
        **{
            f"attention.{key}": f"as asked of {source.removeprefix('measured: ')}"
            for key in ("sink", "local")
            if getattr(base, key) != getattr(engine.plan, key)
        },
    }
    inherited = {key: text for key, text in base.sources.items() if key.partition("[")[0] not in own}
    return replace(
        base,
        name=name,
        match=Match(
            device="gpu" if on_gpu else "cpu", gpu_name=engine.device if on_gpu else None,
            cpu_model=machine.cpu_model, model=engine.model_name,
        ),
        sampler="lsh",
        tables=(TableSize(chosen.K, chosen.L, None, measured.quality.ratio),),
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
    assert measured is not None, "the chosen pair was measured"
    held = tuned.held_out
    wanted = f"error {goal.error:g}" if goal.error is not None else f"ratio {goal.ratio:.2%}"
    lines = [
        f"* chosen: K={chosen.K} L={chosen.L}, dense layers {', '.join(map(str, chosen.dense_layers)) or 'none'} "
        f"(calibration: measured error / predicted = {tuned.calibration:.2f})",
        f"on text that was not tuned on: error {held.error:.3f}, {held.ratio:.1%} of the keys sampled; "
        + (f"meets the target ({wanted})" if tuned.met else f"misses the target ({wanted}): {_advice(tuned)}"),
        f"{measured.ms:.1f} ms per token at {tuned.context:,} tokens, with exact attention {tuned.exact_ms:.1f}"
        + ("" if measured.ms < tuned.exact_ms else ": sampling does not pay at this length"),
    ]
    named = (
        f" --profile {profile}"
        if profile
        else (f" -K {chosen.K} -L {chosen.L} --dense-layers {','.join(map(str, chosen.dense_layers)) or 'none'}")
    )
    return [*lines, signature_line(tuned), f"magicpig chat -m {shlex.quote(engine.settings.model.model)}{named}"]


def _advice(tuned: Tuned) -> str:
    """Why the target was missed: by the text, or by all pairs."""
    if tuned.expected_to_meet:
        return "the tuning text met it; a longer or more similar --text tells more"
    return "no pair of the grid meets it in the memory there is"


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
