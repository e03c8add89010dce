"""Two bench documents side by side: matching rows, ratios, verdicts, and files that are none."""

from __future__ import annotations

import json
import math

import pytest

from magicpig_cli.bench.compare import compare, label, load
from magicpig_cli.bench.report import Results, as_csv, as_json, as_jsonl, as_markdown
from magicpig_cli.errors import UsageError
from tests.bench.rows import META, row, steady

OLD = [
    row("exact", 8192, steady(50)), row("lsh", 8192, steady(40)),
    row("exact", 32768, steady(100)), row("lsh", 32768, steady(60)),
    row("lsh", 32768, steady(60), batch=4),
]  # fmt: skip


def write(path, form, rows=OLD, meta=META):
    path.write_text(as_json(Results(meta, rows)) if form == "json" else as_jsonl(Results(meta, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_what_bench_writes_is_read(tmp_path, form):
    earlier = load(write(tmp_path / "old", form))
    assert earlier.meta == META
    assert [{key: one[key] for key in OLD[0]} for one in earlier.rows.values()] == OLD


def test_json_over_several_lines_and_one_line_of_jsonl(tmp_path):
    (tmp_path / "a").write_text(json.dumps({"meta": META, "rows": OLD}, indent=2))
    (tmp_path / "b").write_text("\ufeff" + json.dumps({"meta": META, **OLD[0]}), encoding="utf-8")
    assert len(load(tmp_path / "a").rows) == len(OLD)
    assert len(load(tmp_path / "b").rows) == 1


def test_rows_are_matched_by_what_they_measured(tmp_path):
    earlier = load(write(tmp_path / "old", "json"))
    new = [
        row("exact", 8192, steady(50)),
        row("lsh", 8192, steady(40), K=9),  # other tables
        row("lsh", 32768, steady(50)),
        row("exact", 32768, steady(100), fill="real"),
        row("lsh", 32768, steady(60), batch=2),
    ]
    found = compare(earlier, META, new)
    assert [label(at) for at in found.rows] == ["exact at 8k, batch 1, tiled", "lsh K=10 L=150 at 32k, batch 1, tiled"]
    assert [label(at) for at in found.only_new] == [
        "lsh K=9 L=150 at 8k, batch 1, tiled", "exact at 32k, batch 1, real", "lsh K=10 L=150 at 32k, batch 2, tiled",
    ]  # fmt: skip
    assert [at[:3] for at in found.only_old] == [("lsh", 8192, 1), ("exact", 32768, 1), ("lsh", 32768, 4)]
    notes = "\n".join(found.notes())
    assert f"only in {tmp_path}/old: lsh K=10 L=150 at 8k, batch 1, tiled; exact at 32k" in notes
    assert f"not in {tmp_path}/old: lsh K=9 L=150 at 8k" in notes


def test_ratios_are_above_one_where_this_run_is_faster(tmp_path):
    earlier = load(write(tmp_path / "old", "json"))
    new = [row("exact", 32768, steady(100.2)), row("lsh", 32768, steady(50)), row("lsh", 8192, steady(44))]
    exact, faster, slower = (compare(earlier, META, new).of(one) for one in new)
    assert exact["verdict"] == "within noise"
    assert faster["verdict"] == "faster"
    assert slower["verdict"] == "slower"
    assert faster["tpot_ms"]["ratio"] == pytest.approx(60 / 50, rel=1e-3)
    assert faster["decode_tok_s"]["ratio"] == pytest.approx(60 / 50, rel=1e-3)
    low, high = faster["tpot_ms"]["ci95"]
    assert 1.15 < low < 1.2 < high < 1.25
    assert faster["vs_exact"]["ratio"] == pytest.approx((100.2 / 50) / (100 / 60), rel=1e-3)
    assert exact["vs_exact"] is None  # it is the control
    assert slower["vs_exact"] is None  # which was not measured at this context
    assert faster["basis"] == "repetitions"


def test_a_machine_that_changed_is_told_by_the_control(tmp_path):
    """Everything is 20% slower: so is exact attention, and beside it nothing changed."""
    earlier = load(write(tmp_path / "old", "json"))
    found = compare(earlier, META, [row("exact", 32768, steady(120)), row("lsh", 32768, steady(72))])
    (exact, sampled) = found.rows.values()
    assert (exact["verdict"], sampled["verdict"]) == ("slower", "slower")
    assert sampled["vs_exact"]["ratio"] == pytest.approx(1.0, rel=1e-3)
    assert any("the control itself is slower" in note for note in found.notes())


def test_one_repetition_says_nothing_about_noise(tmp_path):
    earlier = load(write(tmp_path / "old", "json", [row("lsh", 8192, steady(40, reps=1))]))
    found = compare(earlier, META, [row("lsh", 8192, steady(30))]).rows
    (one,) = found.values()
    assert one["verdict"] == "noise unknown"
    assert one["tpot_ms"]["ci95"] is None
    assert one["tpot_ms"]["ratio"] == pytest.approx(40 / 30, rel=0.02)


def test_files_of_before_that_do_not_tell_repetitions(tmp_path):
    old = {key: value for key, value in OLD[1].items() if key not in ("reps", "gen_tokens", "warnings", "cv")}
    earlier = load(write(tmp_path / "old", "json", [old]))
    (one,) = compare(earlier, META, [row("lsh", 8192, steady(40))]).rows.values()
    assert one["basis"] == "steps"
    assert one["verdict"] == "within noise"
    (one,) = compare(earlier, META, [row("lsh", 8192, steady(20))]).rows.values()
    assert one["verdict"] == "faster"


def test_what_differs_is_named(tmp_path):
    earlier = load(write(tmp_path / "old", "json"))
    meta = {**META, "commit": "b" * 40, "threads": 8, "date": "2027-01-01T00:00:00+00:00", "complete": False, "new": 1}
    found = compare(earlier, meta, [row("lsh", 8192, steady(40, steps=40))])
    assert found.differs == {"commit": ("a" * 40, "b" * 40), "threads": (2, 8)}
    assert found.notes()[:2] == ["commit: aaaaaaaaaa → bbbbbbbbbb", "threads: 2 → 8"]
    assert "lsh K=10 L=150 at 8k, batch 1, tiled: gen_tokens 20 → 40" in found.notes()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no bench rows"),
        (b"mode,context\nexact,8192\n", "neither json nor jsonl"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "neither json nor jsonl"),
        (b"{}", "holds no bench rows"),
        (b"[]", "holds no bench rows"),
        (b"3", "holds no bench rows"),
        (b'{"meta": {}, "rows": []}', "holds no bench rows"),
        (b'{"meta": {}, "cases": [{"case": "d128"}]}', "holds no bench rows"),
        (json.dumps({"meta": META, "rows": [OLD[0], {**OLD[1], "context": "8k"}]}).encode(), "row 2 of"),
        (json.dumps({"meta": META, "rows": [{**OLD[0], "tpot_ms": {}}]}).encode(), "no valid tpot_ms.p50"),
        (json.dumps({"meta": META, "rows": [{**OLD[0], "decode_tok_s": math.nan}]}).encode(), "no valid decode_tok_s"),
        (json.dumps({"meta": META, "rows": [{**OLD[0], "samples_ms": [1, 0]}]}).encode(), "no valid samples_ms"),
        (json.dumps({"meta": META, "rows": [{**OLD[0], "batch": True}]}).encode(), "no valid batch"),
        (json.dumps({"meta": META, "rows": [{**OLD[0], "K": [10]}]}).encode(), "no valid K"),
    ],
)
def test_what_is_no_bench_document_is_refused(tmp_path, content, said):
    (tmp_path / "old").write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        load(tmp_path / "old")
    assert str(tmp_path / "old") in caught.value.message
    assert caught.value.hint


def test_every_format_carries_the_comparison(tmp_path):
    earlier = load(write(tmp_path / "old", "json"))
    rows = [row("exact", 32768, steady(100.2)), row("lsh", 32768, steady(50), warnings=["it was | noisy"])]
    results = Results(META, rows, compare(earlier, META, rows))
    document = json.loads(as_json(results))
    assert [one["verdict"] for one in document["comparison"]["rows"]] == ["within noise", "faster"]
    assert document["comparison"]["rows"][1]["context"] == 32768
    assert document["rows"] == rows
    lines = [json.loads(line) for line in as_jsonl(results).splitlines()]
    assert [line["comparison"]["verdict"] for line in lines] == ["within noise", "faster"]
    measured = set(compare(earlier, META, rows).rows)
    assert load_text(tmp_path, as_json(results)) == load_text(tmp_path, as_jsonl(results)) == measured
    header, *body = as_csv(results).splitlines()
    for name in ("comparison.tpot_ms.ratio", "comparison.tpot_ms.low", "comparison.verdict", "warnings", "cv"):
        assert name in header.split(",")
    assert len(body) == 2
    table = as_markdown(results)
    assert "| 32768 | 1 | tiled | lsh | 10 | 150 |" in table
    assert "- warning: lsh K=10 L=150 at 32k, batch 1, tiled: it was | noisy" in table
    assert {line.count(" | ") for line in table.splitlines() if line.startswith("| ")} == {13, 20}


def load_text(tmp_path, text):
    (tmp_path / "again").write_text(text, encoding="utf-8")
    return set(load(tmp_path / "again").rows)
