"""Batches: what decoding together gains, and what one document costs that many lines ask about."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.must_show.test_figures import measure

EXACT = ("--dtype", "float32", "--kv-dtype", "float32", "--quantize", "none", "--attention", "exact")
QUESTIONS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_together_decode_twice_the_tokens_of_one(demo_available):
    document, _ = measure("bench_batch.py", "--questions", "0", "--quantize", "int8")
    speeds = {row["batch"]: row["decode_tok_s"] for row in document["rows"]}
    assert list(speeds) == [1, 2, 4, 8]
    assert speeds[8] >= 2 * speeds[1]
    for row in document["rows"]:
        assert sum(row["stages_ms"].values()) == pytest.approx(row["step_ms"], rel=0.1)


def run(folder: Path, *options: str) -> tuple[dict[str, Any], dict[str, str]]:
    """(summary, answers by id) of a batch about one document."""
    out = folder / f"out{len(options)}.jsonl"
    command = [sys.executable, "-m", "magicpig_cli", "batch", str(folder / "in.jsonl"), "-m", "demo", "-o", str(out)]
    done = subprocess.run(
        [*command, *EXACT, "--temperature", "0", "--max-tokens", "16", "-c", "8k", "--json", *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = map(json.loads, out.read_text().splitlines())
    answers = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in records}
    return json.loads(done.stdout.splitlines()[-1]), answers


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_questions_on_one_document_cost_one_prefill(demo_available, demo_model, tmp_path):
    from magicpig_cli.corpus import natural_text

    ids = demo_model.tokenizer(natural_text()[:60_000])["input_ids"][: 6 * 1024]
    (tmp_path / "book.txt").write_text(demo_model.tokenizer.decode(ids))
    lines = [{"id": str(n), "file": "book.txt", "prompt": f"What does it say about {n}?"} for n in range(QUESTIONS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared, answers = run(tmp_path)
    unshared, alone = run(tmp_path, "--no-prefix-sharing")
    assert len(answers) == QUESTIONS
    assert answers == alone
    print(f"{shared['wall_s']:.1f} s with a shared prefix, {unshared['wall_s']:.1f} s without")
    assert shared["wall_s"] <= 0.25 * unshared["wall_s"]
