"""From records to rows, tables and files: cases worked out by hand."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math

import pytest

from magicpig_cli.errors import UsageError
from magicpig_cli.evals import plot, report
from magicpig_cli.evals.metrics import mean, share
from magicpig_cli.evals.modes import Mode, modes
from magicpig_cli.evals.run import CONTINUATION
from magicpig_cli.evals.units import Unit

KEYS = {
    "task", "text", "context", "mode", "budget", "metric", "value", "ci95", "n", "sampled_ratio",
    "index_bytes_per_token",
}  # fmt: skip
META = {
    "model": "a$b^{$ [/x]", "dtype": "float32", "device": "cpu", "isa": "avx2", "threads": 1, "full_scores": ["topk"],
}  # fmt: skip


def answers(mode: Mode, sample: int, seed: int, scores: list[float], gold: list[float], sampled: int = 0) -> tuple:
    record = {
        "scores": scores, "gold_logprobs": gold, "sampled": sampled, "offloaded": 100 if sampled else 0,
        "index_bytes_per_token": 18.0 if mode.name == "rabitq" else None,
    }  # fmt: skip
    return Unit("tenkeys", "topics", 4096, sample, mode, seed), record


def continuation(mode: Mode, seed: int, kl: float, squares: list[list[float]], positions: int = 24) -> tuple:
    record = {
        "kl": [kl] * positions, "loss": [1.0 + kl] * positions, "layers": [1, 5] if squares else [],
        "squared_errors": squares, "sampled": 40 if squares else 0, "offloaded": 1000 if squares else 0,
        "index_bytes_per_token": 300.0 if mode.name == "lsh" else None,
    }  # fmt: skip
    return Unit(CONTINUATION, "topics [/x]", 4608, 0, mode, seed), record


EXACT, RABITQ, LSH, TOPK = Mode("exact"), Mode("rabitq", 0.02), Mode("lsh"), Mode("topk", 0.04)
ANSWERS = [
    answers(EXACT, 0, 0, [1, 1], [-0.1, -0.2]), answers(EXACT, 1, 0, [0.5, 1], [-0.3, -0.4]),
    answers(RABITQ, 0, 0, [1, 0], [-0.1, -0.3], 2), answers(RABITQ, 0, 1, [1, 1], [-0.1, -0.5], 4),
    answers(RABITQ, 1, 0, [1, 1], [-0.3, -0.4], 2), answers(RABITQ, 1, 1, [1, 1], [-0.3, -0.4], 2),
]  # fmt: skip
SQUARES = [[0.01, 0.04], [0.04, 0.16]]
TEXTS = [
    continuation(EXACT, 0, 0.0, []), continuation(LSH, 0, 0.1, SQUARES), continuation(LSH, 1, 0.3, SQUARES),
    continuation(TOPK, 0, 0.05, SQUARES),
]  # fmt: skip


def of(rows: list[dict], mode: str, metric: str) -> dict:
    (row,) = (row for row in rows if (row["mode"], row["metric"]) == (mode, metric))
    return row


def test_answers_are_averaged_over_seeds_before_questions():
    rows = report.rows(ANSWERS, ("tenkeys",))
    assert all(set(row) == KEYS for row in rows)
    exact, rabitq = of(rows, "exact", "accuracy"), of(rows, "rabitq", "accuracy")
    assert (exact["value"], exact["n"], exact["sampled_ratio"]) == (0.875, 4, None)
    assert rabitq["value"] == 0.875
    assert tuple(rabitq["ci95"]) == share([1, 0.5, 1, 1]).ci95
    assert rabitq["sampled_ratio"] == 10 / 400
    assert (rabitq["index_bytes_per_token"], rabitq["budget"]) == (18, 0.02)
    kept = of(rows, "rabitq", "kept")
    assert (kept["value"], kept["n"]) == (pytest.approx(2.5 / 3), 3)  # of the three that exact attention answers
    gap = of(rows, "rabitq", "gold_logprob_vs_exact")
    assert tuple(gap["ci95"]) == pytest.approx(mean([0, -0.2, 0, 0]).ci95)
    assert {row["metric"] for row in rows if row["mode"] == "exact"} == {"accuracy", "gold_logprob"}


def test_nothing_is_kept_of_what_exact_attention_did_not_find():
    rows = report.rows([answers(EXACT, 0, 0, [0.0], [-9]), answers(RABITQ, 0, 0, [1.0], [-1])], ("tenkeys",))
    assert "kept" not in {row["metric"] for row in rows}


def test_text_rows():
    rows = report.rows(TEXTS, ("ppl", "kl"))
    assert {(row["task"], row["metric"]) for row in rows} == {
        ("ppl", "perplexity"), ("kl", "kl_mean"), ("kl", "attn_error"), ("kl", "attn_error_layer"),
    }  # fmt: skip
    assert of(rows, "exact", "kl_mean")["value"] == 0
    kl = of(rows, "lsh", "kl_mean")
    assert (kl["value"], kl["n"], kl["sampled_ratio"]) == (pytest.approx(0.2), 24, 0.04)
    assert kl["index_bytes_per_token"] == 300
    assert of(rows, "lsh", "perplexity")["value"] == pytest.approx(math.exp(1.2))
    # Blocks of 16 and of 8 positions: mean squares (2·0.01 + 0.04)/3 and (2·0.04 + 0.16)/3.
    layers = [row for row in rows if row["metric"] == "attn_error_layer" and row["mode"] == "lsh"]
    assert [row["layer"] for row in layers] == [1, 5]
    assert [row["value"] for row in layers] == pytest.approx([0.02**0.5, 0.08**0.5])
    assert of(rows, "lsh", "attn_error")["value"] == pytest.approx((0.02**0.5 + 0.08**0.5) / 2)
    assert not [row for row in rows if row["mode"] == "exact" and "error" in row["metric"]]


@pytest.mark.parametrize(("tasks", "metrics"), [(("kl",), {"kl_mean"}), (("ppl",), {"perplexity"})])
def test_only_what_was_asked_for_is_reported(tasks, metrics):
    rows = report.rows(TEXTS[:1], tasks)
    assert {row["metric"] for row in rows} == metrics
    assert len(report.text_cells(rows)) == 1


def test_tables_mark_what_is_no_fast_path():
    rows = report.rows([*ANSWERS, *TEXTS], ("tenkeys", "ppl", "kl"))
    tasks, texts = report.task_cells(rows), report.text_cells(rows)
    assert [line[3] for line in tasks] == ["exact", "rabitq 2%"]
    assert tasks[1][4].startswith("88% (")
    assert tasks[1][-2:] == ["2.50%", "18.0"]
    assert tasks[0][5:] == ["-", tasks[0][6], "-", "-", "-"]
    assert [line[2] for line in texts] == ["exact", "lsh", "*topk 4%"]
    assert all(len(line) == len(report.TASK_COLUMNS) for line in tasks)
    assert all(len(line) == len(report.TEXT_COLUMNS) for line in texts)
    (note,) = (note for note in report.notes(rows) if "no fast path" in note)
    assert note.startswith("*topk 4%: ")
    assert not [note for note in report.notes(report.rows(ANSWERS, ())) if "fast path" in note or "KL" in note]


def test_files():
    rows = report.rows([*ANSWERS, *TEXTS], ("tenkeys", "ppl", "kl"))
    document = report.as_json(META, rows)
    assert document.count("\n") == 1
    assert json.loads(document) == {"meta": META, "results": rows}
    lines = list(csv.DictReader(io.StringIO(report.as_csv(rows))))
    assert len(lines) == len(rows)
    assert float(lines[0]["low"]) == rows[0]["ci95"][0]
    assert lines[-1]["layer"] == "5"
    markdown = report.as_markdown(rows)
    assert "| tenkeys | topics | 4096 | rabitq 2% |" in markdown
    assert "| topics [/x] | 4608 | *topk 4% |" in markdown


def test_modes_and_budgets():
    assert modes(["lsh", "topk", "lsh"], [0.02, 0.04]) == [EXACT, LSH, Mode("topk", 0.02), TOPK]
    assert modes(["exact"], [0.02]) == [EXACT]
    assert [mode.label for mode in modes(["oracle"], [0.005, 0.125])] == ["exact", "oracle 0.5%", "oracle 12.5%"]
    assert LSH.seeds(2**64 - 1, 2) == [2**64 - 1, 0]
    assert TOPK.seeds(3, 4) == EXACT.seeds(3, 4) == [3]


def test_points_of_a_plot_are_by_mode_and_place_with_rising_cost():
    rows = report.rows([*TEXTS, continuation(Mode("topk", 0.02), 0, 0.2, SQUARES)], ("kl",))
    rows[-4]["sampled_ratio"] = 0.02
    found = plot.series(rows, "kl_mean", "sampled_ratio")
    assert list(found) == [("lsh", "topics [/x]", 4608), ("topk", "topics [/x]", 4608)]
    assert [row["budget"] for row in found["topk", "topics [/x]", 4608]] == [0.02, 0.04]
    assert list(plot.series(rows, "attn_error", "index_bytes_per_token")) == [("lsh", "topics [/x]", 4608)]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plot`")
@pytest.mark.parametrize(("suffix", "begin"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".pdf", b"%PDF-")])
@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1]], ids=["several", "exact alone"])
def test_images(suffix, begin, texts):
    assert plot.image(META, report.rows(texts, ("kl",)), suffix).startswith(begin)


@pytest.mark.parametrize("where", ["-", "plot.txt", "plot"])
def test_places_that_hold_no_plot_are_refused(where):
    with pytest.raises(UsageError, match=f"--plot {where} "):
        plot.refuse(plot.Path(where))
