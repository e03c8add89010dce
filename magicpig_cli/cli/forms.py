"""`magicpig models check` with a GPU: one sequence in every form of weights and at long contexts, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from magicpig_cli.config import Settings
from magicpig_cli.errors import MagicpigError
from magicpig_cli.ui import console
from magicpig_cli.units import format_bytes

if TYPE_CHECKING:
    from magicpig_cli.model.shape import ModelShape
    from magicpig_cli.planner import Part, Plan

CONTEXTS = (98_304, 131_072)
FORMS = ("none", "int8", "int4")  # of --quantize


def compared(
    shape: ModelShape, settings: Settings, planned: Callable[[ModelShape, Settings], Plan]
) -> list[dict[str, Any]]:
    """Form by form and context by context what `planned` gives for one sequence; `problem` where it refuses.

    What was asked for stays: `--quantize` and `-c` leave one form and one context.
    """
    asked = settings.model.quantize
    forms = (asked,) if asked != "auto" or shape.published is not None else FORMS
    fitting = [tokens for tokens in CONTEXTS if tokens <= shape.context] or [shape.context]
    contexts = fitting if settings.context is None else [settings.context]
    return [_entry(shape, settings, form, tokens, planned) for form in forms for tokens in contexts]


def _entry(
    shape: ModelShape, settings: Settings, form: str, tokens: int, planned: Callable[[ModelShape, Settings], Plan]
) -> dict[str, Any]:
    from magicpig_cli.planner import predict
    from magicpig_cli.planner.forms import form_of
    from magicpig_cli.planner.memory import device, reserved_host, total

    model = replace(settings.model, quantize=form)
    entry: dict[str, Any] = {"weights": form_of(shape, model, on_gpu=True), "context": tokens}
    try:
        chosen = planned(shape, replace(settings, model=model, context=tokens))
    except MagicpigError as problem:
        return entry | {"problem": problem.message, "hint": problem.hint}
    there, here, found = device(chosen, 1), reserved_host(chosen, tokens), predict(chosen, tokens)
    assert chosen.gpu is not None
    return entry | {
        "problem": None, "hint": None, "attention": chosen.title, "threads": chosen.threads,
        "device": _parts(there), "device_bytes": total(there), "device_free_bytes": chosen.gpu.free_bytes,
        "host": _parts(here), "host_bytes": total(here), "host_free_bytes": chosen.budget_bytes + chosen.host_reserve,
        "tpot_ms": found.ms_per_token, "stages_ms": dict(found.stages_ms),
        "terms": [
            {"stage": term.stage, "ms": 1e3 * term.seconds, "formula": term.formula} for term in found.time.terms
        ],
        "missing": list(found.missing), "assumed": list(found.assumed),
    }  # fmt: skip


def _parts(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [asdict(part) for part in parts]


def show(entries: list[dict[str, Any]], batches: list[dict[str, Any]]) -> None:
    """The table, then the arithmetic of each row, and what that and the expectations of batches rest on."""
    columns = ("weights", "context", "GPU memory", "host memory", "ms per token")
    print()
    console.print_table(columns, [row for entry in entries for row in _rows(entry)], right=("context",))
    for entry in entries:
        print()
        print("\n".join(_arithmetic(entry)))
    if threads := next((entry["threads"] for entry in entries if not entry["problem"]), None):
        print(f"\nattention on the host is told as of this machine, with {threads} threads")
    if assumed := list(dict.fromkeys(line for entry in (*entries, *batches) for line in entry.get("assumed", ()))):
        print("assumed, not measured: " + "; ".join(assumed))


def _rows(entry: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """As many lines as the longest sum has addends, and its total."""
    begin = (entry["weights"], f"{entry['context']:,}")
    if entry["problem"]:
        yield (*begin, "does not fit", "", "")
        yield ("",) * 5
        return
    times = [f"{ms:7.1f} {stage}" for stage, ms in entry["stages_ms"].items() if ms >= 0.05]
    whole = "not known as a whole" if entry["tpot_ms"] is None else f"{entry['tpot_ms']:7.1f} together"
    sums = [(*_bytes(entry["device"]),), (*_bytes(entry["host"]),), times]
    for line in zip_longest(*sums, fillvalue=""):
        yield (*begin, *line)
        begin = ("", "")
    of = [
        f"{_size(entry[f'{where}_bytes'])} of {format_bytes(entry[f'{where}_free_bytes'])}"
        for where in ("device", "host")
    ]
    yield ("", "", *of, whole)
    yield ("",) * 5


def _size(count: int) -> str:
    return f"{format_bytes(count):>9}"


def _bytes(parts: list[dict[str, Any]]) -> Iterator[str]:
    return (f"{_size(part['bytes'])} {part['name']}" for part in parts)


def _arithmetic(entry: dict[str, Any]) -> Iterator[str]:
    yield f"{entry['weights']}, {entry['context']:,} tokens" + (
        f", attention {entry['attention']}" if not entry["problem"] else ""
    )
    if entry["problem"]:
        yield f"  {entry['problem']}"
        yield f"  what would fit: {entry['hint']}"
        return
    for where, name in (("device", "GPU"), ("host", "host")):
        for part in entry[where]:
            yield f"  {name} {part['name']}: {format_bytes(part['bytes'])} = {part['formula']}"
    for term in entry["terms"]:
        yield f"  {term['stage']}: {term['ms']:.2f} ms = {term['formula']}"
    for left_out in entry["missing"]:
        yield f"  not in it: {left_out}"
