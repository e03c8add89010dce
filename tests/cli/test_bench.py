"""`magicpig bench` on a tiny random model: rows, formats, comparison, plots, and runs that do not reach their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from magicpig_cli.bench import measure
from magicpig_cli.cli import app
from magicpig_cli.cli.bench import _check_room, _plan
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.events import STAGES
from magicpig_cli.ui import console
from tests import warm
from tests.tiny import tiny_config

FEW = ("--gen-tokens", "4", "--reps", "3", "--kv-dtype", "float32", "--dtype", "float32", "-t", "1", "--device", "cpu")


@pytest.fixture(autouse=True)
def no_user_config(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_config("llama", eos_token_id=None).save_pretrained(folder)
    return ("-m", str(folder / "config.json"), "--load-format", "dummy")


@pytest.fixture
def bench(model, capsys):
    """Runs the command; (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = app.run(["bench", *model, *FEW, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def rows_of(text: str) -> dict[tuple, dict]:
    return {(row["mode"], row["context"], row["batch"]): row for row in json.loads(text)["rows"]}


def test_rows_have_every_key_and_they_agree(bench):
    code, out, err = bench("--contexts", "1k,512,1024", "--batch-size", "2,1", "--output-format", "json")
    assert code == 0, err
    assert out.count("\n") == 1
    document = json.loads(out)
    assert set(document) == {"meta", "rows"}
    assert {
        "version", "commit", "model", "params", "device", "cpu", "isa", "threads", "torch", "transformers", "seed",
        "date", "dtype", "kv_dtype", "sink", "local", "dense_layers", "complete",
    } == set(document["meta"])  # fmt: skip
    assert document["meta"]["complete"] is True
    order = [(row["context"], row["batch"], row["mode"]) for row in document["rows"]]
    assert order == [(n, b, mode) for n in (512, 1024) for b in (1, 2) for mode in ("exact", "lsh")]
    rows = rows_of(out)
    for (mode, context, batch), row in rows.items():
        wall = np.array(row["samples_ms"])
        assert wall.shape == (3 * 4,)
        assert (row["reps"], row["gen_tokens"]) == (3, 4)
        wanted = {"mean": wall.mean(), "std": wall.std()}
        wanted |= {f"p{p}": np.percentile(wall, p) for p in (50, 90, 99)}
        assert row["tpot_ms"] == pytest.approx(wanted)
        assert row["decode_tok_s"] == pytest.approx(batch * 1000 / wall.mean())
        means = wall.reshape(3, 4).mean(axis=1)
        assert row["cv"] == pytest.approx(means.std(ddof=1) / means.mean())
        assert list(row["stages_ms"]) == list(STAGES)
        assert sum(row["stages_ms"].values()) == pytest.approx(wall.mean(), rel=0.01)
        assert row["launch_ms"] is None  # nothing is launched on a CPU
        assert (row["fill"], row["prefilled_tokens"]) == ("real", context - 4)
        assert row["prefill_tok_s"] * row["ttft_s"] >= 0.999 * row["prefilled_tokens"]
        assert set(row["memory"]) == {"kv_bytes", "index_bytes", "rss_bytes", "vram_bytes"}
        assert all(isinstance(text, str) for text in row["warnings"])
        exact = rows["exact", context, batch]
        assert row["memory"]["kv_bytes"] == exact["memory"]["kv_bytes"]
        assert row["speedup_vs_exact"] == pytest.approx(exact["tpot_ms"]["p50"] / row["tpot_ms"]["p50"])
        if mode == "exact":
            assert (row["K"], row["L"], row["sampled_ratio"], row["attn_error"], row["index_s"]) == (None,) * 5
            assert row["memory"]["index_bytes"] == 0
        else:
            assert (row["K"], row["L"]) == (10, 150)
            ratio = row["sampled_ratio"]
            assert ratio["per_layer"][0] is None  # dense
            assert np.mean(ratio["per_layer"][1:]) == pytest.approx(ratio["mean"])
            assert ratio["p5"] <= ratio["mean"] <= ratio["p95"]
            assert 0 < row["attn_error"]["p50"] <= row["attn_error"]["p90"]
            assert row["attn_error"]["rms"] > 0
            assert row["memory"]["index_bytes"] > 0
            assert row["ttft_s"] == pytest.approx(exact["ttft_s"] + row["index_s"])


def test_memory_of_a_batch_is_that_of_its_sequences(bench):
    rows = rows_of(bench("--contexts", "1k", "--batch-size", "1,3", "--output-format", "json")[1])
    for name in ("kv_bytes", "index_bytes"):
        assert rows["lsh", 1024, 3]["memory"][name] == 3 * rows["lsh", 1024, 1]["memory"][name]


def test_a_tiled_row_says_what_it_is(bench):
    (row,) = json.loads(bench("--context", "4k", "--no-baseline", "--attention", "lsh", "--output-format", "json")[1])[
        "rows"
    ]
    assert (row["fill"], row["ttft_s"], row["beyond_model_context"]) == ("tiled", None, True)
    assert row["prefilled_tokens"] == 2048
    assert row["speedup_vs_exact"] is None


def test_a_context_too_short_to_sample_is_told(bench):
    code, out, err = bench("--context", "128", "--output-format", "json")
    row = rows_of(out)["lsh", 128, 1]
    assert code == 0
    assert "nothing was sampled: so short a context is attended exactly" in row["warnings"]
    assert row["sampled_ratio"]["mean"] is None
    assert "warning: lsh K=10 L=150 at 128, batch 1, real: " in err


def test_the_table_on_stdout(bench):
    code, out, err = bench("--context", "512")
    assert code == 0, err
    header, exact, lsh, _, same = out.splitlines()
    assert header.split()[:4] == ["ctx", "batch", "fill", "mode"]
    assert (exact.split()[3], lsh.split()[3:6]) == ("exact", ["lsh", "10", "150"])
    assert same.startswith("model tiny")
    assert "isa" in same


@pytest.mark.parametrize(
    ("name", "option", "begin"),
    [
        ("a.json", None, '{"meta"'), ("a.jsonl", None, '{"meta"'), ("a.csv", None, "version,"), ("a.md", None, "| mo"),
        ("a.txt", None, "| model"), ("a.json", "csv", "version,"), ("a.txt", "table", "ctx "),
    ],
)  # fmt: skip
def test_output_is_written_as_it_ends_or_as_asked(bench, tmp_path, name, option, begin):
    (tmp_path / name).write_text("old")
    asked = () if option is None else ("--output-format", option)
    code, out, err = bench("--context", "512", "--output", str(tmp_path / name), *asked)
    assert (code, out) == (0, ""), err
    assert (tmp_path / name).read_text().startswith(begin)
    assert f"2 rows in {tmp_path / name}" in err
    assert os.listdir(tmp_path) == [name]


def test_a_plot_is_drawn_though_nobody_reads_the_table(bench, tmp_path, monkeypatch):
    def print_table(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(console, "print_table", print_table)
    assert bench("--context", "512", "--plot", str(tmp_path / "p.svg"), "-q") == (141, "", "")
    assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")


def test_compare_and_plots(bench, tmp_path):
    old, image = tmp_path / "old.json", tmp_path / "p.svg"
    assert bench("--context", "512", "--output", str(old))[0] == 0
    code, out, err = bench("--contexts", "512,1k", "--compare", str(old), "--plot", "-", "-q")
    assert code == 0, err
    assert f"compared with {old} of 20" in out
    assert f"not in {old}: exact at 1k, batch 1, real; lsh K=10 L=150 at 1k, batch 1, real" in out
    assert "ms/token, p50" in out
    assert "\x1b" not in out
    code, out, err = bench(
        "--context", "512", "--compare", str(old), "--plot", str(image), "--output", str(old), "--output-format", "json"
    )
    assert (code, out) == (0, ""), err
    assert image.read_bytes().startswith(b"<?xml")
    comparison = json.loads(old.read_text())["comparison"]  # read before it was replaced
    assert [row["mode"] for row in comparison["rows"]] == ["exact", "lsh"]
    assert (comparison["only_old"], comparison["only_new"], comparison["meta"]) == ([], [], {})


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--compare", "none.json"], 2, "cannot read none.json"),
        (["--compare", "LICENSE"], 2, "neither json nor jsonl"),
        (["--plot", "p.gif"], 2, "does not end in"),
        (["--plot", "none/p.png"], 2, "cannot write none/p.png"),
        (["--output", "p.png", "--plot", "./p.png"], 2, "both name"),
        (["--plot", "-", "--output-format", "json"], 2, "would both go to stdout"),
        (["--output-format", "xml"], 2, "--output-format xml"),
        (["--output", "."], 2, "cannot write ."),
        (["--attention", ","], 2, "names no mode"),
        (["--contexts", "8k", "--context", "8k"], 2, "twice"),
        (["--contexts", "1k,64", "--gen-tokens", "64"], 2, "64 tokens has no room"),
        (["--batch-size", "1,0"], 2, "--batch-size 1,0"),
        (["--batch-size", "9999999", "--context", "1k"], 1, "9999999 sequences of 1,024 tokens"),
    ],
)
def test_mistakes_are_answered_before_a_model_is_loaded(bench, monkeypatch, arguments, code, said):
    monkeypatch.setattr("magicpig_cli.ui.loading.load_engine", lambda *_, **__: pytest.fail("a model was loaded"))
    got, out, err = bench(*arguments)
    assert (got, out) == (code, "")
    error, hint = err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert hint.startswith("hint: ")
    assert not Path("p.png").exists()


def test_the_hint_names_what_fits(model):
    shape_and_options = Settings(ModelOptions(model[1], device="cpu", load_format="dummy"), AttentionOptions("lsh"))
    plan = _plan(shape_and_options)
    plan = replace(plan, budget_bytes=3 * plan.sequence_bytes(1024))
    _check_room(plan, measure.BenchRequest((512, 1024), (1, 3)))
    with pytest.raises(MemoryBudgetError, match=r"4 sequences of 1,024 tokens") as caught:
        _check_room(plan, measure.BenchRequest((512, 1024), (1, 4)))
    assert caught.value.hint == "--batch-size 3 fits at this context"
    with pytest.raises(MemoryBudgetError) as caught:
        _check_room(replace(plan, budget_bytes=1000), measure.BenchRequest((1024,)))
    assert caught.value.hint == "a smaller --context"


def broken_at(monkeypatch, context: int, problem: BaseException) -> None:
    """Measuring raises at this context."""
    whole = measure._measure

    def until(engine, request, *others):
        sequences = next(part for part in others if isinstance(part, dict))
        if sequences["exact"][0].length == context - request.gen_tokens:
            raise problem
        yield from whole(engine, request, *others)

    monkeypatch.setattr(measure, "_measure", until)


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (MemoryError(), 1, "memory ran out at a context of 1,024 tokens and batch size 1: MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), 1, "memory ran out at a context"),
        (RuntimeError("mat1 and mat2 do not fit"), 1, "RuntimeError: mat1"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_rows_before_a_failure_are_not_lost(bench, tmp_path, monkeypatch, problem, code, said):
    broken_at(monkeypatch, 1024, problem)
    arguments = ("--contexts", "512,1k,2k", "--output-format", "json")
    got, out, err = bench(*arguments)
    assert got == code
    assert said in err
    assert "2 of 6 rows were finished" in err
    document = json.loads(out)
    assert [row["context"] for row in document["rows"]] == [512, 512]
    assert document["meta"]["complete"] is False
    assert bench(*arguments, "--output", str(tmp_path / "o.json"))[0] == code
    assert json.loads((tmp_path / "o.json").read_text())["meta"]["complete"] is False


def test_a_pipe_gets_one_document_although_a_file_is_kept_row_by_row(model):
    command = [
        sys.executable,
        "-m",
        "magicpig_cli",
        "bench",
        *model,
        *FEW,
        "--contexts",
        "512,1k",
        "--output-format",
        "json",
    ]
    done = subprocess.run([*command, "--output", "/dev/stdout"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 4


def test_a_failure_before_any_row_leaves_the_old_file(bench, tmp_path, monkeypatch):
    broken_at(monkeypatch, 512, MemoryError())
    (tmp_path / "o.json").write_text("old")
    code, out, _ = bench("--context", "512", "--output", str(tmp_path / "o.json"))
    assert (code, out) == (1, "")
    assert (tmp_path / "o.json").read_text() == "old"


def test_a_disk_that_is_full_at_the_end_sends_rows_to_stdout(bench, tmp_path, monkeypatch):
    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, out, err = bench("--context", "512", "--output", str(tmp_path / "o.json"))
    assert code == 1
    assert "No space left" in err
    assert len(json.loads(out)["rows"]) == 1  # the first row that could not be written ended the run


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_a_real_process_that_is_stopped(model, tmp_path, ending):
    """Rows are in the file as soon as they are finished, and it is a whole document whenever the process ends."""
    output = tmp_path / "o.json"
    arguments = ("--context", "512", "--reps", "100", "--batch-size", "1,2,3,4,5,6,7,8", "--output", str(output))
    process = warm.Program("bench", *model, *FEW, *arguments, text=True)
    while not output.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(ending)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130 if ending == signal.SIGINT else -9, ""), err
    document = json.loads(output.read_text())
    assert document["meta"]["complete"] is False
    assert 1 <= len(document["rows"]) < 16
    assert "Traceback" not in err
    assert ("rows were finished" in err) == (ending == signal.SIGINT)
