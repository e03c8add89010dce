"""Bench results as documents: JSON as CLI.md specifies it, Markdown, CSV, and cells for a terminal table."""

from __future__ import annotations

import csv
import datetime
import io
import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import magicpig_cli
from magicpig_cli.bench.compare import Comparison, budget_words, key, label
from magicpig_cli.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.hardware import Hardware


COLUMNS = (
    "model", "params", "dtype", "device", "isa", "thr", "ctx", "batch", "fill", "mode", "K", "L", "sampled",
    "pp t/s", "tg t/s", "TTFT", "TPOT p50/p99", "RAM", "index", "vs exact", "attn err",
)  # fmt: skip
RUN_COLUMNS = ("model", "params", "dtype", "device", "isa", "thr")  # the same in all rows of a run
BEYOND = "beyond the model's context: speed only"
COMPARED_COLUMNS = (
    "ctx", "batch", "fill", "mode", "K", "L", "TPOT p50 old", "new", "old/new", "tg t/s old", "new", "new/old",
    "vs exact", "verdict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Results:
    """What a run has measured so far, and the earlier run that it is compared with."""

    meta: dict[str, Any]
    rows: list[dict[str, Any]]
    comparison: Comparison | None = None

    def warnings(self) -> list[str]:
        """One text for each row that has any."""
        return [f"{label(key(row))}: {'; '.join(row['warnings'])}" for row in self.rows if row["warnings"]]


def meta(engine: Engine, hardware: Hardware) -> dict[str, Any]:
    """What was measured where."""
    import torch
    import transformers

    return {
        "version": magicpig_cli.__version__,
        "commit": commit(),
        "model": engine.model_name,
        "params": engine.params,
        "dtype": engine.plan.weight_types,
        "kv_dtype": engine.plan.row_dtype,
        "device": engine.device,
        "cpu": hardware.cpu_model,
        "isa": engine.isa,
        "threads": engine.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": engine.settings.attention.hash_seed,
        "sink": engine.plan.sink,
        "local": engine.plan.local,
        "dense_layers": list(engine.plan.dense_layers),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """Commit of the checkout that this package runs from; None for an installed package."""
    root = Path(magicpig_cli.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def cells(meta: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """One row in the order of COLUMNS, as text for people."""
    ratio, error, speedup = row["sampled_ratio"], row["attn_error"], row["speedup_vs_exact"]
    tpot = row["tpot_ms"]
    fill = row["fill"] + (f" ({BEYOND})" if row["beyond_model_context"] else "")
    return [
        meta["model"], format_count(meta["params"]), meta["dtype"], meta["device"], meta["isa"], str(meta["threads"]),
        str(row["context"]), str(row["batch"]), fill, row["mode"] + budget_words(row),
        _or_dash(row["K"]), _or_dash(row["L"]),
        "-" if ratio is None or ratio["mean"] is None else f"{ratio['mean']:.1%}",
        f"{row['prefill_tok_s']:.0f}", f"{row['decode_tok_s']:.1f}",
        "-" if row["ttft_s"] is None else format_seconds(row["ttft_s"]),
        f"{tpot['p50']:.1f}/{tpot['p99']:.1f} ms", format_bytes(row["memory"]["rss_bytes"]),
        format_bytes(row["memory"]["index_bytes"]) if ratio is not None else "-",
        "-" if speedup is None else f"{speedup:.2f}×",
        "-" if error is None else f"{error['p50']:.3f}",
    ]  # fmt: skip


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def compared_cells(comparison: Comparison, row: dict[str, Any]) -> list[str]:
    """The comparison of one row of this run in the order of COMPARED_COLUMNS; only for rows that have one."""
    found = comparison.rows[key(row)]
    tpot, speed = found["tpot_ms"], found["decode_tok_s"]
    return [
        str(row["context"]), str(row["batch"]), row["fill"], row["mode"] + budget_words(row),
        _or_dash(row["K"]), _or_dash(row["L"]),
        f"{tpot['old']:.1f}", f"{tpot['new']:.1f} ms", _ratio(tpot),
        f"{speed['old']:.1f}", f"{speed['new']:.1f}", _ratio(speed), _ratio(found["vs_exact"]), found["verdict"],
    ]  # fmt: skip


def _ratio(figure: dict[str, Any] | None) -> str:
    """`1.04× (0.98–1.10)`: the interval of 95%."""
    if figure is None:
        return "-"
    if figure["ci95"] is None:
        return f"{figure['ratio']:.2f}×"
    low, high = figure["ci95"]
    return f"{figure['ratio']:.2f}× ({low:.2f}–{high:.2f})"


def as_markdown(results: Results) -> str:
    """The table of rows, then that of the comparison, then notes and warnings as a list."""
    parts = [markdown_table(COLUMNS, [cells(results.meta, row) for row in results.rows])]
    notes = []
    if (comparison := results.comparison) is not None:
        lines = [compared_cells(comparison, row) for row in results.rows if comparison.of(row)]
        if lines:
            parts.append(markdown_table(COMPARED_COLUMNS, lines))
        notes = [f"- {note}" for note in comparison.notes()]
    notes += [f"- warning: {text}" for text in results.warnings()]
    if notes:
        parts.append("\n".join(notes) + "\n")
    return "\n".join(parts)


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """With bars in cells escaped, and an end of line."""
    whole = [columns, ["---"] * len(columns), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in whole) + "\n"


def as_csv(results: Results) -> str:
    """Plain numbers, one line per row; nested keys become `outer.inner`, longer lists are left out."""
    flat = [{**_flatten(results.meta), **_flatten(row)} for row in _compared(results)]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(dict.fromkeys(key for line in flat for key in line)))
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        elif name == "ci95" and value is not None:
            flat |= {f"{prefix}low": value[0], f"{prefix}high": value[1]}
        elif name in ("warnings", "dense_layers"):
            flat[prefix + name] = "; ".join(map(str, value))
        elif not isinstance(value, list) and name != "ci95":
            flat[prefix + name] = value
    return flat


def _compared(results: Results) -> list[dict[str, Any]]:
    """Rows, each with its `comparison` if there is an earlier run."""
    if (comparison := results.comparison) is None:
        return results.rows
    return [{**row, "comparison": comparison.of(row)} for row in results.rows]


def as_json(results: Results) -> str:
    document: dict[str, Any] = {"meta": results.meta, "rows": results.rows}
    if results.comparison is not None:
        document["comparison"] = results.comparison.as_json()
    return json.dumps(document) + "\n"


def as_jsonl(results: Results) -> str:
    """A line for each row, with the meta of the run in it."""
    return "".join(json.dumps({"meta": results.meta, **row}) + "\n" for row in _compared(results))
