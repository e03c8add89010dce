"""`models` and `models check` on configs in directories and in a Hub cache; no weights are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from magicpig_cli.cli import app
from magicpig_cli.config import TAIL_ROOM

LLAMA_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
SMALL = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32_768,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_user_config(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))


def folder(path: Path, family: str, **values) -> str:
    AutoConfig.for_model(family, **values).save_pretrained(path)
    return str(path)


def check(capsys, *arguments: str) -> tuple[int, dict]:
    code = app.run(["models", "check", *arguments, "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    return code, json.loads(printed.out)


def test_check_says_what_would_happen(tmp_path, capsys):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    model = folder(tmp_path / "qwen", "qwen2", **SMALL, rope_scaling=scaling)
    code, report = check(capsys, model, "-c", "8k", "--attention", "lsh", "-K", "8", "-L", "75")
    assert code == 0
    assert (report["supported"], report["verified"], report["problem"]) == (True, True, None)
    assert (report["context"], report["trained_context"], report["rope"]) == (131_072, 32_768, "yarn")
    assert (report["layers"], report["heads"], report["kv_heads"], report["head_dim"]) == (4, 4, 2, 16)
    memory = report["memory"]
    assert memory["context"] == 8192
    assert memory["kv_bytes"] == 4 * 2 * (8192 + 1024) * 2 * 16 * 2  # and a block that is ready
    keys = (8192 - 68) // 64 * 64
    per_head = 75 * 2 * (keys + 3 * 257 + TAIL_ROOM)  # at most 3 segments
    assert memory["index_bytes"] == 3 * (2 * per_head + 2 * TAIL_ROOM)
    assert report["batch_size"] == 8
    assert report["bytes_per_token"] == {
        "kv": 4 * 2 * 2 * 16 * 2,
        "index": round(3 * 2 * (128 / 8 + 2 + 2 * 16 / 256)),
    }


def test_check_page(tmp_path, capsys):
    model = folder(tmp_path / "gemma [/b]", "gemma2", **SMALL, sliding_window=512)
    assert app.run(["models", "check", model]) == 0
    page = capsys.readouterr().out
    assert f"{tmp_path}/gemma [/b] (gemma2)" in page
    assert "2 of 4 layers see 512 tokens" in page
    assert "32,768 tokens" in page
    assert "keys and values" in page


def test_the_sum_of_a_plan_is_written_out(tmp_path, capsys):
    model = folder(tmp_path / "llama", "llama", **LLAMA_8B)
    arguments = ["--assume-gpu", "rtx 4090", "--assume-memory", "64GiB", "-c", "96k"]
    code, report = check(capsys, model, *arguments)
    assert code == 0
    memory = report["memory"]
    assert report["batch_size"] >= 2
    assert memory["free_bytes"] == 64 << 30
    assert sum(part["bytes"] for part in memory["host"]) <= memory["free_bytes"]
    rows = next(part for part in memory["host"] if part["name"] == "keys and values")
    assert rows["formula"] == f"{report['batch_size']} sequences × 32 layers × 8 heads × 99,328 keys × 512 B"
    assert rows["bytes"] == report["batch_size"] * 32 * 8 * 99_328 * 512
    assert memory["gpu"]["name"] == "NVIDIA GeForce RTX 4090"
    assert {"weights", "reserve", "activations", "windows"} <= {part["name"] for part in memory["device"]}
    assert [entry["batch"] for entry in report["predicted"]] == [1, report["batch_size"]]
    assert all(entry["tpot_ms"] > 0 and entry["assumed"] and not entry["missing"] for entry in report["predicted"])
    assert any("halves of a batch" in line for line in report["predicted"][1]["assumed"])
    assert any(line.startswith("profile rtx4090: ") for line in report["plan"])

    assert app.run(["models", "check", model, *arguments]) == 0
    page = capsys.readouterr().out
    assert "keys and values = " in page
    assert " × 32 layers × 8 heads × 99,328 keys × 512 B" in page
    assert "of 64.0 GiB free" in page
    assert all(line in page for entry in report["predicted"] for line in entry["assumed"])
    for line in report["plan"]:
        assert line in page


FITS_96K = ["bfloat16", "int8", "int4"]


def test_every_form_of_weights_at_long_contexts_side_by_side(tmp_path, capsys):
    """Must show 5 of step 7: plan, bytes and milliseconds of Llama-3.1-8B, each with its arithmetic."""
    model = folder(tmp_path / "llama", "llama", **LLAMA_8B, dtype="bfloat16", tie_word_embeddings=False)
    arguments = ["--assume-gpu", "rtx4090", "--assume-memory", "64GiB"]
    code, report = check(capsys, model, *arguments)
    assert code == 0
    found = {(entry["weights"], entry["context"]): entry for entry in report["forms"]}
    assert list(found) == [(form, tokens) for form in FITS_96K for tokens in (98_304, 131_072)]
    weights = {"bfloat16": 16_060_522_496, "int8": 9_088_081_920, "int4": 6_027_747_328}
    for (form, tokens), entry in found.items():
        assert entry["problem"] is None
        assert entry["device_bytes"] == sum(part["bytes"] for part in entry["device"]) <= entry["device_free_bytes"]
        assert (
            entry["host_bytes"] == sum(part["bytes"] for part in entry["host"]) <= entry["host_free_bytes"] == 64 << 30
        )
        assert entry["device"][0]["bytes"] == weights[form]
        rows = next(part for part in entry["host"] if part["name"] == "keys and values")
        assert rows["bytes"] == 32 * 8 * (tokens + 1024) * 512
        assert entry["tpot_ms"] == pytest.approx(sum(entry["stages_ms"].values()))
        assert entry["tpot_ms"] == pytest.approx(sum(term["ms"] for term in entry["terms"]))
        assert all(part["formula"] for part in (*entry["device"], *entry["host"], *entry["terms"]))
        assert any("1,008 GB/s" in line for line in entry["assumed"])
        assert any("33 graphs × 10 µs" in term["formula"] for term in entry["terms"])
    assert found["int4", 98_304]["tpot_ms"] < found["bfloat16", 98_304]["tpot_ms"] < found["int8", 98_304]["tpot_ms"]

    assert app.run(["models", "check", model, *arguments]) == 0
    page = capsys.readouterr().out
    for entry in report["forms"]:
        assert f"{entry['weights']}, {entry['context']:,} tokens, attention auto 2%" in page
        for part in (*entry["device"], *entry["host"]):
            assert part["formula"] in page
    assert "int8 is cast to bfloat16 first = 34.90 GB / 756 GB/s" in page
    assert f"as of this machine, with {report['forms'][0]['threads']} threads" in page
    assert "assumed, not measured: products reach 75% of 1,008 GB/s" in page


def test_a_form_that_does_not_fit_says_the_sum_and_what_would(tmp_path, capsys):
    model = folder(tmp_path / "llama", "llama", **LLAMA_8B, dtype="bfloat16")
    arguments = ["--assume-gpu", "rtx3060", "--assume-memory", "32GiB", "-c", "96k"]
    code, report = check(capsys, model, *arguments)
    assert code == 1  # as bfloat16, which is what was asked about
    plain, int8, int4 = report["forms"]
    assert "no room: 15.0 GiB weights + " in plain["problem"]
    assert "--quantize int8" in plain["hint"]
    assert int8["problem"] is int4["problem"] is None
    app.run(["models", "check", model, *arguments])
    page = capsys.readouterr().out
    assert "does not fit" in page
    assert plain["problem"] in page
    assert plain["hint"] in page


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["-c", "8k"], [("bfloat16", 8192), ("int8", 8192), ("int4", 8192)]),
        (["--quantize", "int4"], [("int4", 32_768)]),
        (["--quantize", "int8", "-c", "4k"], [("int8", 4096)]),
        (["--device", "cpu"], None),
    ],
)
def test_what_was_asked_for_is_compared_alone(tmp_path, capsys, arguments, wanted):
    """Models without such long contexts are compared at their own."""
    model = folder(tmp_path / "small", "llama", **SMALL)
    gpu = [] if wanted is None else ["--assume-gpu", "L20"]
    code, report = check(capsys, model, *gpu, *arguments)
    assert code == 0
    found = [(entry["weights"], entry["context"]) for entry in report.get("forms", [])]
    assert found == (wanted or [])


def test_a_published_quantized_model_has_one_form_and_the_bytes_of_its_files(tmp_path, capsys):
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    model = folder(tmp_path / "small", "llama", **SMALL, quantization_config=quantization)
    _, estimated = check(capsys, model, "--assume-gpu", "L20")
    assert [entry["weights"] for entry in estimated["forms"]] == ["gptq"]
    assert "estimated from its config" in estimated["forms"][0]["device"][0]["formula"]
    save_file({"qweight": torch.zeros(100, 8, dtype=torch.int32)}, tmp_path / "small" / "model.safetensors")
    _, counted = check(capsys, model, "--assume-gpu", "L20")
    assert counted["forms"][0]["device"][0]["bytes"] == 100 * 8 * 4
    assert app.run(["models", "check", model, "--quantize", "int8"]) == 1
    assert "published quantized (gptq)" in capsys.readouterr().out


def test_an_assumed_machine_refuses_too(tmp_path, capsys):
    model = folder(tmp_path / "llama", "llama", **LLAMA_8B)
    code, report = check(capsys, model, "--assume-gpu", "RTX 3060", "--assume-memory", "64GiB")
    assert code == 1
    assert "NVIDIA GeForce RTX 3060 has no room: 15.0 GiB weights" in report["problem"]
    assert "--device cpu" in report["hint"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--assume-gpu", "RTX 9999"], "'RTX 9999'"),
        (["--assume-memory", "much"], "'much'"),
        (["--assume-memory", "0"], "0 B"),
    ],
)
def test_machines_that_nobody_knows(tmp_path, capsys, arguments, words):
    model = folder(tmp_path / "llama", "llama", **LLAMA_8B)
    assert app.run(["models", "check", model, *arguments]) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert "hint: " in told.err
    assert not told.out


def test_check_of_an_unsupported_model(tmp_path, capsys):
    code, report = check(capsys, folder(tmp_path / "t5", "t5"))
    assert (code, report["supported"]) == (1, False)
    assert "encoder-decoder" in report["reason"]
    assert app.run(["models", "check", str(tmp_path / "t5")]) == 1
    assert "encoder-decoder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-c", "200k"], "204,800"),
        (["--dense-layers", "32"], "layer 32"),
        (["-c", "128k", "--kv-dtype", "float32"], "GiB"),
    ],
)
def test_check_of_a_plan_that_cannot_work(tmp_path, capsys, monkeypatch, arguments, words):
    from dataclasses import replace

    from magicpig_cli import hardware

    probe = hardware.probe
    monkeypatch.setattr(hardware, "probe", lambda: replace(probe(), memory_free=48 << 30))
    model = folder(tmp_path / "big", "llama", **LLAMA_8B)
    code, report = check(capsys, model, *arguments)
    assert code == 1
    assert report["supported"]
    assert words in report["problem"]
    assert report["hint"]
    assert report["memory"] is None
    assert app.run(["models", "check", model, *arguments]) == 1
    assert words in capsys.readouterr().out


def test_check_of_nothing(capsys):
    assert app.run(["models", "check"]) == 2
    assert "MODEL" in capsys.readouterr().err
    assert app.run(["models", "check", "./no/such/directory"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def snapshot(cache: Path, repo: str, family: str, *files: str) -> None:
    """A repository in the layout of the Hub cache."""
    base = cache / f"models--{repo.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    folder(base / "snapshots" / commit, family, **SMALL)
    for name in files:
        (base / "snapshots" / commit / name).write_bytes(b"")


def test_the_list_holds_what_can_run(tmp_path):
    snapshot(tmp_path, "org/complete", "qwen3", "model.safetensors")
    snapshot(tmp_path, "org/config-only", "llama")
    snapshot(tmp_path, "org/masked", "bert", "model.safetensors")
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "magicpig_cli", "models", "--json", "-v"], capture_output=True, text=True,
        env=environment, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed = {model["model"]: model for model in json.loads(done.stdout)}
    assert listed.keys() - {"demo"} == {"org/complete"}
    assert listed["org/complete"]["family"] == "qwen3"
    assert listed["org/complete"]["context"] == 32_768
    assert "org/masked" in done.stderr  # -v says why not


def test_a_gpu_that_is_assumed_or_meant_must_be_one(tmp_path, capsys):
    model = folder(tmp_path / "llama", "llama", **SMALL)
    assert app.run(["models", "check", model, "--assume-gpu", "RTX 4090", "--device", "cpu"]) == 2
    assert "--device cpu" in capsys.readouterr().err
    code, report = check(capsys, model, "--assume-gpu", "RTX 4090", "--device", "cuda:1")
    assert (code, report["plan"]) == (1, [])
    assert "cuda:0 is NVIDIA GeForce RTX 4090" in report["problem"]
