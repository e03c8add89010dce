"""Bench results as documents: JSON as CLI.md specifies it, Markdown, CSV, and cells for a terminal table."""

from __future__ import annotations

import csv
import datetime
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import magicpig_cli
from magicpig_cli.engine.engine import Engine
from magicpig_cli.hardware import Hardware
from magicpig_cli.units import format_bytes, format_count, format_seconds

COLUMNS = (
    "model", "params", "dtype", "device", "isa", "thr", "ctx", "batch", "fill", "mode", "K", "L", "sampled",
    "pp t/s", "tg t/s", "TTFT", "TPOT p50/p99", "RAM", "index", "vs exact", "attn err",
)  # fmt: skip
RUN_COLUMNS = ("model", "params", "dtype", "device", "isa", "thr")  # the same in all rows of a run


def meta(engine: Engine, hardware: Hardware) -> dict[str, Any]:
    """What was measured where."""
    import torch
    import transformers

    return {
        "version": magicpig_cli.__version__,
        "commit": commit(),
        "model": engine.model_name,
        "params": engine.params,
        "dtype": engine.plan.weight_type,
        "kv_dtype": engine.plan.row_dtype,
        "device": engine.device,
        "cpu": hardware.cpu_model,
        "isa": engine.isa,
        "threads": engine.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": engine.settings.attention.hash_seed,
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
    fill = row["fill"] + (" (beyond the model's context: speed only)" if row["beyond_model_context"] else "")
    return [
        meta["model"], format_count(meta["params"]), meta["dtype"], meta["device"], meta["isa"], str(meta["threads"]),
        str(row["context"]), str(row["batch"]), fill, row["mode"],
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


def as_markdown(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells(meta, row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def as_csv(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Plain numbers, one line per row; nested keys become `outer.inner`."""
    flat = [{**meta, **_flatten(row)} for row in rows]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(dict.fromkeys(key for line in flat for key in line)))
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flatten(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat[prefix + key] = value
    return flat


def as_json(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    return json.dumps({"meta": meta, "rows": rows}) + "\n"


def as_jsonl(meta: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps({"meta": meta, **row}) + "\n" for row in rows)
