"""The outcome as CLI.md's JSON, and as tables for people."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from magicpig_cli.attention.oracle import BASELINES
from magicpig_cli.bench.report import markdown_table
from magicpig_cli.bench.report import meta as bench_meta
from magicpig_cli.engine.engine import Engine
from magicpig_cli.evals.continuation import BLOCK
from magicpig_cli.evals.metrics import Mean, jackknife, mean, mean_of_blocks, share
from magicpig_cli.evals.modes import EXACT, Mode
from magicpig_cli.evals.run import CONTINUATION, Request
from magicpig_cli.evals.suite import TEACHER_FORCED
from magicpig_cli.evals.units import Record, Unit
from magicpig_cli.hardware import Hardware

Row = dict[str, Any]
Group = tuple[str, str, int]  # task, text, context

FULL_SCORES = "reads all keys before it chooses: a research baseline, no fast path"
TASK_COLUMNS = ("task", "text", "context", "mode", "accuracy", "kept", "gold logprob", "vs exact", "sampled", "index")
TEXT_COLUMNS = ("text", "context", "mode", "KL", "perplexity", "attn error", "sampled", "index")
TASK_RIGHT, TEXT_RIGHT = TASK_COLUMNS[2:3] + TASK_COLUMNS[4:], TEXT_COLUMNS[1:2] + TEXT_COLUMNS[3:]
_TASK_NOTES = (
    "accuracy: share of what had to be found. kept: of the questions that exact attention answers in full, those "
    "answered in full (both with Wilson's interval over questions).",
    "gold logprob: nats per token of the right answer after its first token (Student's interval over questions).",
)
_TEXT_NOTES = (
    f"KL: exact ‖ mode, nats per token; like perplexity with Student's interval over blocks of {BLOCK} positions.",
    "attn error: ‖õ − o‖ / ‖o‖, RMS over heads and steps, averaged over sampled layers (jackknife over these blocks).",
)
_NOTES = ("Intervals in brackets: 95%. index: bytes per token and KV head.",)


def meta(engine: Engine, hardware: Hardware, request: Request) -> dict[str, Any]:
    """What was evaluated where, and how."""
    return {
        **bench_meta(engine, hardware),
        "seed": request.seed,
        "hash_seed": engine.settings.attention.hash_seed,
        "hash_seeds": request.hash_seeds,
        "tasks": list(request.tasks),
        "texts": [{"name": text.name, "characters": len(text.content)} for text in request.texts],
        "contexts": list(request.contexts),
        "samples": request.samples,
        "positions": request.positions,
        "samplers": {mode.label: plan.sampler_options for mode, plan in request.plans.items()},
        "full_scores": sorted({mode.name for mode in request.modes if mode.baseline}),
        "notes": [*_TASK_NOTES, *_TEXT_NOTES, *_NOTES],
    }


def rows(results: Iterable[tuple[Unit, Record]], tasks: Sequence[str]) -> list[Row]:
    """One row per (task, text, context, mode, metric), in the order of the results."""
    groups: dict[Group, dict[Mode, list[Record]]] = {}
    for unit, record in results:
        by_mode = groups.setdefault((unit.task, unit.text, unit.context), {})
        by_mode.setdefault(unit.mode, []).append(record | {"sample": unit.sample})
    found: list[Row] = []
    for group, by_mode in groups.items():
        for mode, records in by_mode.items():
            if group[0] == CONTINUATION:
                found += _text_rows(group, mode, records, tasks)
            else:
                found += _task_rows(group, mode, records, by_mode.get(Mode(EXACT)))
    return found


def _row(group: Group, mode: Mode, records: list[Record], metric: str, figure: Mean, **more: Any) -> Row:
    sampled, offloaded = (sum(record[key] for record in records) for key in ("sampled", "offloaded"))
    sizes = [size for record in records if (size := record["index_bytes_per_token"]) is not None]
    task, text, context = group
    return {
        "task": task,
        "text": text,
        "context": context,
        "mode": mode.name,
        "budget": mode.budget,
        "metric": metric,
        "value": figure.value,
        "ci95": None if figure.ci95 is None else list(figure.ci95),
        "n": figure.n,
        "sampled_ratio": sampled / offloaded if offloaded else None,
        "index_bytes_per_token": float(np.mean(sizes)) if sizes else None,
        **more,
    }


def _task_rows(group: Group, mode: Mode, records: list[Record], exact: list[Record] | None) -> list[Row]:
    scores, gold = _by_question(records, "scores"), _by_question(records, "gold_logprobs")
    found = [
        _row(group, mode, records, "accuracy", share(list(scores.values()))),
        _row(group, mode, records, "gold_logprob", mean(list(gold.values()))),
    ]
    if exact is None or mode.name == EXACT:
        return found
    right = [question for question, score in _by_question(exact, "scores").items() if score == 1]
    in_full = _by_question([{**r, "in_full": [score == 1 for score in r["scores"]]} for r in records], "in_full")
    if both := [in_full[question] for question in right if question in in_full]:
        found.append(_row(group, mode, records, "kept", share(both)))
    reference = _by_question(exact, "gold_logprobs")
    gaps = [gold[question] - reference[question] for question in gold if question in reference]
    return [*found, _row(group, mode, records, "gold_logprob_vs_exact", mean(gaps))]


def _by_question(records: list[Record], key: str) -> dict[tuple[int, int], float]:
    """(sample, prompt) → mean over hash seeds: they share the prompt, so they are no observations of their own."""
    values: dict[tuple[int, int], list[float]] = {}
    for record in records:
        for prompt, value in enumerate(record[key]):
            values.setdefault((record["sample"], prompt), []).append(value)
    return {question: float(np.mean(found)) for question, found in values.items()}


def _text_rows(group: Group, mode: Mode, records: list[Record], tasks: Sequence[str]) -> list[Row]:
    _, text, context = group
    found = []
    if "ppl" in tasks:
        losses = np.mean([record["loss"] for record in records], axis=0)
        figure = mean_of_blocks(losses, BLOCK).map(math.exp)
        found.append(_row(("ppl", text, context), mode, records, "perplexity", figure))
    if "kl" in tasks:
        group = ("kl", text, context)
        divergences = np.mean([record["kl"] for record in records], axis=0)
        found.append(_row(group, mode, records, "kl_mean", mean_of_blocks(divergences, BLOCK)))
        found += _error_rows(group, mode, records)
    return found


def _error_rows(group: Group, mode: Mode, records: list[Record]) -> list[Row]:
    """Attention error as CLI.md defines it, and of each layer; none where nothing was sampled."""
    layers, positions = records[0]["layers"], len(records[0]["kl"])
    if not layers:
        return []
    squares = np.mean([record["squared_errors"] for record in records], axis=0)  # [blocks, layers]
    steps = np.full(len(squares), float(BLOCK))
    steps[-1] = positions - BLOCK * (len(squares) - 1)
    weighted = np.column_stack([squares, steps])

    def by_layer(blocks: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(np.average(blocks[:, :-1], axis=0, weights=blocks[:, -1])))

    whole = jackknife(lambda blocks: float(by_layer(blocks).mean()), weighted, positions)
    found = [_row(group, mode, records, "attn_error", whole)]
    for place, layer in enumerate(layers):
        one = jackknife(lambda blocks, place=place: float(by_layer(blocks)[place]), weighted, positions)  # type: ignore[misc]
        found.append(_row(group, mode, records, "attn_error_layer", one, layer=layer))
    return found


def as_json(meta: dict[str, Any], rows: list[Row]) -> str:
    """One line, with its end."""
    return json.dumps({"meta": meta, "results": rows}) + "\n"


def as_csv(rows: list[Row]) -> str:
    """One line per row; the interval as `low` and `high`."""
    out = io.StringIO()
    names = [*(key for key in rows[0] if key != "ci95"), "low", "high", "layer"] if rows else []
    writer = csv.DictWriter(out, fieldnames=list(dict.fromkeys(names)))
    writer.writeheader()
    for row in rows:
        low, high = row["ci95"] or (None, None)
        writer.writerow({**{key: value for key, value in row.items() if key != "ci95"}, "low": low, "high": high})
    return out.getvalue()


def as_markdown(rows: list[Row]) -> str:
    """Both tables and what they mean."""
    tables = ((TASK_COLUMNS, task_cells(rows)), (TEXT_COLUMNS, text_cells(rows)))
    parts = [markdown_table(columns, lines) for columns, lines in tables if lines]
    return "\n".join([*parts, *(f"- {line}" for line in notes(rows))]) + "\n"


def notes(rows: list[Row]) -> list[str]:
    """What the tables show, and what must be known to read them."""
    found = [
        *(_TASK_NOTES if any(row["task"] not in TEACHER_FORCED for row in rows) else ()),
        *(_TEXT_NOTES if any(row["task"] in TEACHER_FORCED for row in rows) else ()),
        *_NOTES,
    ]
    names = dict.fromkeys(label(row) for row in rows if row["mode"] in BASELINES)
    if names:
        found.append(f"*{', *'.join(names)}: {FULL_SCORES}.")
    if any(row["mode"] != EXACT and row["sampled_ratio"] is None for row in rows):
        found.append("sampled -: nothing was sampled; so short a context is attended exactly.")
    return found


def label(row: Row) -> str:
    return Mode(row["mode"], row["budget"]).label


def task_cells(rows: list[Row]) -> list[list[str]]:
    """A line per (task, text, context, mode) in the order of TASK_COLUMNS."""
    lines = []
    for metrics in _lines([row for row in rows if row["task"] not in TEACHER_FORCED]):
        row = metrics["accuracy"]
        lines.append([
            row["task"], row["text"], str(row["context"]), _starred(row),
            _figure(row, _percent), _figure(metrics.get("kept"), _percent),
            _figure(metrics["gold_logprob"], _signed), _figure(metrics.get("gold_logprob_vs_exact"), _signed),
            *_costs(row),
        ])  # fmt: skip
    return lines


def text_cells(rows: list[Row]) -> list[list[str]]:
    """A line per (text, context, mode) in the order of TEXT_COLUMNS."""
    lines = []
    for metrics in _lines([{**row, "task": ""} for row in rows if row["task"] in TEACHER_FORCED]):
        row = next(iter(metrics.values()))
        lines.append([
            row["text"], str(row["context"]), _starred(row), _figure(metrics.get("kl_mean"), _small),
            _figure(metrics.get("perplexity"), _small), _figure(metrics.get("attn_error"), _small), *_costs(row),
        ])  # fmt: skip
    return lines


def _lines(rows: list[Row]) -> list[dict[str, Row]]:
    """Rows by metric, of each (task, text, context, mode)."""
    merged: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["task"], row["text"], row["context"], row["mode"], row["budget"])
        merged.setdefault(key, {})[row["metric"]] = row
    return list(merged.values())


def _starred(row: Row) -> str:
    return ("*" if row["mode"] in BASELINES else "") + label(row)


def _costs(row: Row) -> list[str]:
    ratio, size = row["sampled_ratio"], row["index_bytes_per_token"]
    return ["-" if ratio is None else f"{ratio:.2%}", "-" if size is None else f"{size:.1f}"]


def _figure(row: Row | None, form: Any) -> str:
    """`0.0123 (0.0101–0.0145)`."""
    if row is None:
        return "-"
    if row["ci95"] is None:
        return str(form(row["value"]))
    low, high = map(form, row["ci95"])
    return f"{form(row['value'])} ({low}–{high})"


def _percent(x: float) -> str:
    return f"{100 * x:.0f}%"


def _small(x: float) -> str:
    return f"{x:.4g}" if x >= 1 else f"{x:.4f}"


def _signed(x: float) -> str:
    return f"{x:.3f}".replace("-", "−")
