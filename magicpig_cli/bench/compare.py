"""An earlier bench run read from its file, and its rows beside those of this run.

Ratios are above 1 where this run is faster. Their intervals tell what repetitions within each run tell; what differs
from one run to the next (another program beside it, memory laid out differently) they cannot know. Exact attention is
the control for that: `vs_exact` compares what each run measured in turns with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicpig_cli.bench.intervals import Estimate, Timings, mean, median, ratio, relative_ratio
from magicpig_cli.errors import UsageError
from magicpig_cli.units import format_tokens

Row = dict[str, Any]
Key = tuple[Any, ...]
# Rows with the same are the same measurement.
_KEYS = ("mode", "context", "batch", "fill", "K", "L", "budget", "tail", "bits", "target_error")
_ALSO = ("fill_fresh_positions", "gen_tokens")  # told if they differ
_NOT_TOLD = ("date", "complete")  # of meta
_HINT = "magicpig bench --output old.json writes one"


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run wrote."""

    path: str
    meta: dict[str, Any]
    rows: dict[Key, Row]  # in the order of the file; of rows with the same key the last


@dataclass(frozen=True, slots=True)
class Comparison:
    """This run beside an earlier one."""

    path: str
    date: str | None
    differs: dict[str, tuple[Any, Any]]  # of meta: (old, new)
    rows: dict[Key, Row]  # what CLI.md's `comparison` says of each row that both have
    only_old: tuple[Key, ...]
    only_new: tuple[Key, ...]

    def of(self, row: Row) -> Row | None:
        """The comparison of one row of this run; None without partner."""
        return self.rows.get(key(row))

    def as_json(self) -> dict[str, Any]:
        return {
            "file": self.path,
            "date": self.date,
            "meta": {name: list(pair) for name, pair in self.differs.items()},
            "rows": [{**dict(zip(_KEYS, at, strict=True)), **row} for at, row in self.rows.items()],
            "only_old": [dict(zip(_KEYS, at, strict=True)) for at in self.only_old],
            "only_new": [dict(zip(_KEYS, at, strict=True)) for at in self.only_new],
        }

    def notes(self) -> list[str]:
        """What a reader of the table must know besides."""
        found = [f"{name}: {_shown(old)} → {_shown(new)}" for name, (old, new) in self.differs.items()]
        if self.only_old:
            found.append(f"only in {self.path}: {'; '.join(map(label, self.only_old))}")
        if self.only_new:
            found.append(f"not in {self.path}: {'; '.join(map(label, self.only_new))}")
        for at, row in self.rows.items():
            found += [
                f"{label(at)}: {name} {_shown(old)} → {_shown(new)}" for name, (old, new) in row["differs"].items()
            ]
            if at[0] == "exact" and row["verdict"] in ("faster", "slower"):
                found.append(
                    f"{label(at)}: the control itself is {row['verdict']} ({row['tpot_ms']['ratio']:.2f}×); "
                    "`vs exact` is what the other modes gained or lost beside that"
                )
        return found


def key(row: Row) -> Key:
    found = dict.fromkeys(_KEYS) | {name: row[name] for name in _KEYS if name in row}
    if found["K"] is not None and not found["tail"]:
        found["tail"] = None  # of lsh; earlier documents do not have it
    return tuple(found.values())


def label(at: Key) -> str:
    """A key for people: `lsh K10 L150 at 32k, batch 4, tiled`."""
    row = dict(zip(_KEYS, at, strict=True))
    where = f"{format_tokens(row['context'])}, batch {row['batch']}, {row['fill']}"
    return f"{mode_words(row)} at {where}"


def mode_words(row: Row) -> str:
    """`exact`, `lsh K=10 L=150`, `rabitq 2%`."""
    if row.get("K") is not None:
        return f"{row['mode']} K={row['K']} L={row['L']}"
    return f"{row['mode']}{budget_words(row)}"


def budget_words(row: Row) -> str:
    """` 2%` or ` error 0.05` of a row whose sampler has a budget, else nothing."""
    if row.get("target_error") is not None:
        return f" error {row['target_error']:g}"
    return "" if row.get("budget") is None else f" {100 * row['budget']:.3g}%"


def load(path: Path) -> Earlier:
    """Read a bench document, json or jsonl. Raises UsageError for what is not one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise UsageError(f"--compare: cannot read {path}: {problem.strerror}", hint=_HINT) from None
    except UnicodeDecodeError:
        raise UsageError(f"--compare: {path} is not UTF-8 text", hint=_HINT) from None
    meta, rows = _document(path, text)
    return Earlier(str(path), meta, {key(row): row for row in rows})


def _document(path: Path, text: str) -> tuple[dict[str, Any], list[Row]]:
    """Meta and rows; of several runs in one jsonl file the meta of the last."""
    try:
        documents = _parsed(text)
    except (ValueError, RecursionError):
        raise UsageError(f"--compare: {path} is neither json nor jsonl", hint=_HINT) from None
    whole = documents[0] if len(documents) == 1 else None
    rows = whole["rows"] if isinstance(whole, dict) and isinstance(whole.get("rows"), list) else documents
    last = rows[-1] if rows is documents and rows else whole
    meta = last.get("meta") if isinstance(last, dict) else None
    if not isinstance(meta, dict) or not any(isinstance(row, dict) and "mode" in row for row in rows):
        raise UsageError(f"--compare: {path} holds no bench rows", hint=_HINT)
    for number, row in enumerate(rows, 1):
        if missing := _wrong(row):
            raise UsageError(f"--compare: row {number} of {path} has no valid {missing}", hint=_HINT)
    return meta, rows


def _parsed(text: str) -> list[Any]:
    """One document however it is laid out, or one per line. Raises ValueError or RecursionError."""
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _wrong(row: Any) -> str | None:
    """The first key of a row that is missing or not what bench writes."""
    if not isinstance(row, dict):
        return "keys"
    tpot = row.get("tpot_ms")
    samples = row.get("samples_ms", [])
    checks = {
        "mode": isinstance(row.get("mode"), str),
        "fill": isinstance(row.get("fill"), str),
        "context": _is_count(row.get("context")),
        "batch": _is_count(row.get("batch")),
        "K": row.get("K") is None or _is_count(row["K"]),
        "L": row.get("L") is None or _is_count(row["L"]),
        "reps": row.get("reps") is None or _is_count(row["reps"]),
        "tpot_ms.p50": isinstance(tpot, dict) and _is_positive(tpot.get("p50")),
        "decode_tok_s": _is_positive(row.get("decode_tok_s")),
        "samples_ms": isinstance(samples, list) and all(map(_is_positive, samples)),
    }
    return next((name for name, fine in checks.items() if not fine), None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def compare(earlier: Earlier, meta: Mapping[str, Any], rows: list[Row]) -> Comparison:
    """Rows of this run beside those of the earlier one that measured the same."""
    current = {key(row): row for row in rows}
    names = [name for name in {**earlier.meta, **meta} if name not in _NOT_TOLD]
    date = earlier.meta.get("date")
    return Comparison(
        path=earlier.path,
        date=date if isinstance(date, str) else None,
        differs={
            name: (earlier.meta[name], meta[name])
            for name in names
            if name in earlier.meta and name in meta and earlier.meta[name] != meta[name]
        },
        rows={
            at: _beside(earlier.rows, current, at) for at in current if at in earlier.rows
        },
        only_old=tuple(at for at in earlier.rows if at not in current),
        only_new=tuple(at for at in current if at not in earlier.rows),
    )  # fmt: skip


def _beside(old_rows: Mapping[Key, Row], new_rows: Mapping[Key, Row], at: Key) -> Row:
    old, new = old_rows[at], new_rows[at]
    old_times, new_times = _timings(old), _timings(new)
    p50 = tokens = None
    if old_times and new_times:
        p50, tokens = (ratio(old_times, new_times, statistic) for statistic in (median, mean))
    by_repetition = bool(old_times and new_times and old_times.by_repetition and new_times.by_repetition)
    return {
        "tpot_ms": _figure(old["tpot_ms"]["p50"], new["tpot_ms"]["p50"], p50),
        "decode_tok_s": _figure(old["decode_tok_s"], new["decode_tok_s"], tokens, inverse=True),
        "vs_exact": _vs_exact(old_rows, new_rows, at),
        "verdict": _verdict(p50),
        "basis": None if p50 is None else "repetitions" if by_repetition else "steps",
        "differs": {
            name: [old[name], new[name]]
            for name in _ALSO
            if name in old and name in new and old[name] != new[name]
        },
    }  # fmt: skip


def _timings(row: Row) -> Timings | None:
    return Timings.of(row.get("samples_ms", []), row.get("reps"))


def _figure(old: float, new: float, estimate: Estimate | None, inverse: bool = False) -> Row:
    """Both values, and the ratio that is above 1 where this run is faster.

    With an interval the ratio is of the figures by repetition, which may differ a little from that of the two values.
    """
    if estimate is None:
        return {"old": old, "new": new, "ratio": new / old if inverse else old / new, "ci95": None}
    return {"old": old, "new": new, "ratio": estimate.ratio, "ci95": [estimate.low, estimate.high]}


def _vs_exact(old_rows: Mapping[Key, Row], new_rows: Mapping[Key, Row], at: Key) -> Row | None:
    """How the speed-up over exact attention changed; it cancels what slowed both modes of a run alike."""
    control = ("exact", *at[1:4], *[None] * (len(at) - 4))
    if at == control or control not in old_rows or control not in new_rows:
        return None
    pairs = [(rows[at], rows[control]) for rows in (old_rows, new_rows)]
    old, new = (exact["tpot_ms"]["p50"] / sampled["tpot_ms"]["p50"] for sampled, exact in pairs)
    timings = [_timings(row) for pair in pairs for row in pair]
    known = [one for one in timings if one is not None]
    estimate = relative_ratio(known[0], known[1], known[2], known[3], median) if len(known) == len(timings) else None
    return _figure(old, new, estimate, inverse=True)


def _verdict(estimate: Estimate | None) -> str:
    if estimate is None:
        return "noise unknown"
    if estimate.is_noise:
        return "within noise"
    return "faster" if estimate.ratio > 1 else "slower"


def _shown(value: Any) -> str:
    """Commits in their short form."""
    text = str(value)
    return text[:10] if len(text) == 40 and all(sign in "0123456789abcdef" for sign in text) else text
