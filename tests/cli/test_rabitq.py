"""The signature sampler from the command line: what is told, kept and refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from magicpig_cli.cli import app

QUESTION = "Once there was a long text. " * 40


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> Path:
    for kind in ("config", "data", "cache", "state"):
        monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", str(tmp_path / kind))
    monkeypatch.setattr(sys, "stdin", None)
    return tmp_path


@pytest.fixture
def chat(tiny_directory, capsys):
    """One turn of `chat --json`: (its object, stderr)."""

    def run(*arguments: str) -> tuple[dict, str]:
        code = app.run([
            "chat", "-m", str(tiny_directory), "--device", "cpu", "-t", "1", "-n", "9", "--temperature", "0", "--json",
            *arguments,
        ])  # fmt: skip
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out), printed.err

    return run


def test_what_was_chosen_and_sampled_is_told(chat):
    told = chat("--attention", "rabitq", "--budget", "0.1", "--bits", "64", "--tail", "0.5", QUESTION)[0]["attention"]
    assert (told["mode"], told["sampler"], told["K"], told["L"]) == ("rabitq", "rabitq", None, None)
    assert (told["budget"], told["bits"], told["tail"], told["target_error"]) == (0.1, 64, 0.5, None)
    assert told["budget_used"] == 0.1
    assert 0.02 < told["sampled_ratio"] < 0.3
    assert told["attn_error_estimate"] > 0
    assert told["segments"] == 1

    moved = chat("--attention", "rabitq", "--target-error", "0.001", QUESTION)[0]["attention"]
    assert (moved["budget"], moved["target_error"]) == (0.02, 0.001)
    assert 0.02 < moved["budget_used"] <= 0.16

    tables = chat("--attention", "lsh", QUESTION)[0]["attention"]
    assert (tables["sampler"], tables["K"], tables["L"], tables["tail"]) == ("lsh", 10, 150, 0.0)
    assert {tables[key] for key in ("budget", "bits", "target_error", "budget_used")} == {None}
    assert tables["attn_error_estimate"] > 0

    exact = chat("--attention", "exact", QUESTION)[0]["attention"]
    keys = ("sampler", "K", "budget", "tail", "bits", "target_error", "budget_used", "attn_error_estimate")
    assert {exact[key] for key in keys} == {None}


def test_a_session_goes_on_with_its_signatures(chat):
    name = ("--session", "one", "--attention", "rabitq")
    chat(*name, QUESTION)
    going_on, said = chat(*name, "And then?")
    assert going_on["usage"]["reused_tokens"] > 1000
    assert "made anew" not in said
    _, said = chat("--session", "one", "--attention", "lsh", "And then?")
    assert "the index is made anew (sampler lsh here, rabitq in the file)" in said
    _, said = chat(*name, "--bits", "64", "And then?")
    assert "the index is made anew (sampler rabitq here, lsh in the file)" in said


def test_a_prompt_cache_keeps_signatures(chat, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(QUESTION, encoding="utf-8")
    arguments = ("--attention", "rabitq", "--prompt-cache", str(tmp_path / "book.cache"), "-f", str(book))
    first, _ = chat(*arguments, "What is it about?")
    second, said = chat(*arguments, "What is it about?")
    assert second["usage"]["reused_tokens"] > 1000 > first["usage"]["reused_tokens"]
    assert "made anew" not in said
    assert second["text"] == first["text"]


def test_options_of_another_sampler_have_no_effect_and_are_named(tiny_directory, capsys):
    def plan(*arguments: str) -> list[str]:
        assert app.run(["models", "check", str(tiny_directory), "--device", "cpu", "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["plan"]

    lines = plan("--attention", "lsh", "--budget", "0.1", "--bits", "64", "--target-error", "0.1")
    assert "without effect on attention lsh: --budget 0.1, --bits 64, --target-error 0.1" in lines
    lines = plan("--attention", "rabitq", "-K", "9", "-L", "120")
    assert "without effect on attention rabitq: -K 9, -L 120" in lines
    lines = plan("--attention", "exact", "-K", "9", "--tail", "0.5")
    assert "without effect on attention exact: -K 9, --tail 0.5" in lines
    lines = plan("--attention", "lsh", "--tail", "0.5")
    assert not [line for line in lines if line.startswith("without effect")]
    assert any(line.startswith("tail 0.5: as asked, 2.") for line in lines)  # half of what (10, 150) are expected to


def test_models_check_has_the_sum_of_signatures(tiny_directory, capsys):
    assert app.run(["models", "check", str(tiny_directory), "--device", "cpu", "--attention", "rabitq", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    keys = (memory["context"] - 68) // 64 * 64 // 256 * 256
    # Bits and a factor per key; a mean per block.
    assert memory["index_bytes"] == 2 * 2 * (keys * (16 + 2) + keys // 256 * 2 * 16)
    parts = {part["name"]: part for part in memory["host"]}
    batch = parts["index"]["bytes"] // memory["index_bytes"]
    assert parts["index"]["bytes"] == batch * memory["index_bytes"]
    assert parts["index"]["formula"].endswith(
        f"2 layers × 2 heads × ({keys:,} keys × 18 B + {keys // 256} means × 32 B)"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "0"], "--budget: 0 is not above 0"),
        (["--budget", "1.5"], "--budget"),
        (["--budget", "nan"], "--budget"),
        (["--tail", "-0.1"], "--tail"),
        (["--bits", "100"], "--bits: 100 is not a multiple of 32"),
        (["--bits", "1024"], "--bits"),
        (["--target-error", "0"], "--target-error: 0 is not above 0"),
        (["--attention", "rabbit"], "'rabbit' is unknown"),
    ],
)
def test_wrong_values(capsys, arguments, words):
    assert app.run(["chat", "-m", "demo", *arguments, "Hi"]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert words in error
    assert hint.startswith("hint: ")


def test_bench_measures_three_modes_in_one_run(tiny_directory, capsys):
    code = app.run([
        "bench", "-m", str(tiny_directory), "--device", "cpu", "-t", "1", "--contexts", "1k", "--batch-size", "1,2",
        "--attention", "lsh,rabitq,exact", "--budget", "0.05", "--gen-tokens", "4", "--reps", "2",
        "--output-format", "json",
    ])  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    rows = {(row["mode"], row["batch"]): row for row in json.loads(printed.out)["rows"]}
    assert list(rows) == [(mode, batch) for batch in (1, 2) for mode in ("exact", "lsh", "rabitq")]
    for batch in (1, 2):
        exact, lsh, rabitq = (rows[mode, batch] for mode in ("exact", "lsh", "rabitq"))
        assert (rabitq["K"], rabitq["L"], rabitq["budget"], rabitq["bits"]) == (None, None, 0.05, 128)
        assert (lsh["K"], lsh["L"], lsh["budget"], exact["budget"]) == (10, 150, None, None)
        assert 0.01 < rabitq["sampled_ratio"]["mean"] < 0.2
        assert rabitq["budget_used"] == 0.05
        for row in (lsh, rabitq):
            assert row["attn_error"]["rms"] > 0
            assert row["attn_error_estimate"] > 0
            assert row["index_s"] > 0
            assert row["stages_ms"]["retrieve"] > 0
        assert exact["attn_error_estimate"] is exact["index_s"] is None
        # Each mode alone: rows as many, and an index of its own.
        assert exact["memory"]["kv_bytes"] == lsh["memory"]["kv_bytes"] == rabitq["memory"]["kv_bytes"]
        blocks = (1024 - 4 - 68) // 64 * 64 // 256
        assert rabitq["memory"]["index_bytes"] == batch * 2 * 2 * blocks * (256 * 18 + 2 * 16)
        assert lsh["memory"]["index_bytes"] > 10 * rabitq["memory"]["index_bytes"]
    assert rows["lsh", 2]["memory"]["index_bytes"] == 2 * rows["lsh", 1]["memory"]["index_bytes"]


def test_the_table_names_the_budget(tiny_directory, capsys):
    code = app.run([
        "bench", "-m", str(tiny_directory), "--device", "cpu", "-t", "1", "--context", "512", "--attention", "rabitq",
        "--gen-tokens", "4", "--reps", "1", "--warmup", "0",
    ])  # fmt: skip
    assert code == 0
    _, exact, rabitq, *_ = capsys.readouterr().out.splitlines()
    assert exact.split()[3:6] == ["exact", "-", "-"]
    assert rabitq.split()[3:7] == ["rabitq", "2%", "-", "-"]
