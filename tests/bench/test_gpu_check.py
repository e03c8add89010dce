"""scripts/gpu_check.sh as far as it goes without a GPU: all of it at toy size on the CPU, and what it is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from magicpig_cli import kernels
from magicpig_cli.bench import gpu_check, gpu_parity, gpu_sizes, gpu_steps
from magicpig_cli.bench.on_device import DeviceRunner
from magicpig_cli.bench.overlap import common, length, measure_overlap, union
from magicpig_cli.model import linear
from tests.model.test_parity import make_runner, prompts
from tests.tiny import tiny_model
from tests.tolerances import close_logits

ROOT = Path(__file__).parents[2]
MODES = ("exact-on-gpu", "exact-offloaded", "lsh")
EAGER = ("exact-on-gpu", "lsh", "exact-offloaded", "rabitq")  # in the order in which they are measured


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "scripts/gpu_check.sh", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=500, env={**os.environ, "PYTHON": sys.executable, **environment},
    )  # fmt: skip


def test_a_dry_run_goes_to_the_end(tmp_path):
    done = script("--dry-run", "--output", str(tmp_path / "kept.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "kept.json").read_text()) == document
    assert document["problems"] == []
    assert document["meta"]["dry_run"]
    assert document["parity"]["tokens_equal"]
    assert all((part["sampled_ratio"] == 1) == ("lsh" in name) for name, part in document["parity"]["parts"].items())
    rows = {(row["mode"], row["batch"]): row for row in document["rows"]}
    assert set(rows) >= {(mode, batch) for mode in MODES for batch in (1, 2)}
    for (mode, _), row in rows.items():
        assert row["context"] == 2048
        assert row["tpot_ms"] > 0
        assert set(row["stages_ms"]) == {"dense", "hash", "retrieve", "attend", "merge", "window", "other"}
        assert (row["sampled_ratio"] is None) == mode.startswith("exact")
        assert row["vram_bytes"] == 0
        assert not row["graphs"]
        assert (row["device_ms"], row["waited_ms"]) == ({}, 0)  # nothing ran on a GPU
    assert [(row["mode"], row["batch"]) for row in document["without_graphs"]] == [(mode, 1) for mode in EAGER]
    assert document["launch_ms"] == {"1": None, "2": None}
    assert {name: set(batches) for name, batches in document["halves"].items()} == {"lsh": {"2"}, "rabitq": {"2"}}
    assert document["halves"]["lsh"]["2"]["whole_ms"] > 0
    assert set(document["signatures"]) == {"1", "2"}  # scanned by the CPU both times, where there is no GPU
    for batch, both in document["signatures"].items():
        assert both["device_ms"] > 0
        assert both["sampled_ratio"] == pytest.approx(rows["rabitq", int(batch)]["sampled_ratio"])
    assert document["prefill_tok_s"] > 0
    assert document["prefill"]["at_context_tok_s"] > 0
    assert document["overlap_percent"] is None  # nothing ran on a GPU
    assert document["overlap"]["lsh"]["1"]["cpu_kernels_ms"] > 0
    assert set(document["faster_than_offloaded"]["lsh"]) == {"1", "2"}
    assert "gpu_check:" in done.stderr


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 1
    told = capsys.readouterr()
    assert "sees no GPU" in told.err
    assert "--dry-run" in told.err
    assert not told.out


@pytest.mark.parametrize(("name", "version"), [("transformers", "4.57.1"), ("torch", "2.5.1+cu124")])
def test_versions_out_of_range_are_named_before_anything_is_installed(name, version, tmp_path):
    about = tmp_path / "site" / f"{name}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    done = script("--wheelhouse", str(tmp_path), "--dry-run", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 2
    assert f"{name} {version} is outside of" in done.stderr
    assert "hint: " in done.stderr
    assert not done.stdout


def test_what_fails_is_noted_and_the_rest_goes_on(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu_check.Check, "_exact_on_gpu", fail)
    document = gpu_check.check(gpu_sizes.TOY, torch.device("cpu"), limit_s=300)
    assert document["problems"] == ["exact-on-gpu: OutOfMemoryError: CUDA out of memory"]
    assert {row["mode"] for row in document["rows"]} >= {"lsh", "exact-offloaded"}


def test_no_row_begins_when_time_is_up():
    document = gpu_check.check(gpu_sizes.TOY, torch.device("cpu"), limit_s=0)
    assert document["rows"] == []
    assert document["skipped"]["lsh, batch 2"] == document["skipped"]["lsh, batch 2 whole"] == "no time was left"


def test_sequences_share_memory_where_there_is_none_for_each():
    """One has memory of its own, whatever is free; the other is a fork of it."""
    document = gpu_check.check(gpu_sizes.TOY, torch.device("cpu"), limit_s=300, memory=4 << 30)
    assert document["problems"] == []
    assert [row["own_memory"] for row in document["rows"] if row["mode"] == "lsh"] == [1, 1]


def test_what_was_measured_is_kept_when_a_run_is_ended(monkeypatch, tmp_path):
    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_steps.Steps, "overlap", end)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.check(gpu_sizes.TOY, torch.device("cpu"), 300, output=tmp_path / "kept.json")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert [row["mode"] for row in kept["rows"]][-2:] == ["lsh", "exact-offloaded"]


def test_parity_notices_another_model(monkeypatch):
    """What stands for the GPU computes something else."""
    config, tokens = gpu_sizes.TOY.models["tiny"], gpu_parity.Tokens(prompt=40, steps=3)
    assert gpu_parity.compare_devices(config, "exact", torch.device("cpu"), tokens)["tokens_equal"]
    hold = linear.hold

    def other(model, form):
        hold(model, form)
        model.model.norm.weight.data.mul_(torch.linspace(-1, 1, len(model.model.norm.weight)))

    monkeypatch.setattr(linear, "hold", other)
    found = gpu_parity.compare_devices(config, "exact", torch.device("cpu"), tokens)
    assert not found["tokens_equal"]
    assert found["max_logit_diff"] > 0.1


def test_attention_on_the_device_is_exact_attention():
    model = tiny_model("llama")
    runner = make_runner(model, chunk=64)
    device = DeviceRunner(model, runner.plan.shape, runner.plan, torch.device("cpu"))
    batch = prompts(model.config.vocab_size, (300, 150))
    both = []
    for each in (runner, device):
        sequences = [each.new_sequence() for _ in batch]
        for sequence, prompt in zip(sequences, batch, strict=True):
            list(each.prefill(sequence, prompt))
        both.append(torch.stack([each.decode(sequences, [token, token + 1]).logits for token in (5, 9)]))
        assert [sequence.kv_bytes > 0 for sequence in sequences] == [each is runner] * 2
    assert all(close_logits(a, b) for a, b in zip(both[0].flatten(0, 1), both[1].flatten(0, 1), strict=True))


# Overlap


def test_intervals():
    assert union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)]) == [(0, 2.5), (3, 4)]
    assert length(union([(0, 2), (1, 3)])) == 3
    assert common([(0, 2), (4, 6)], [(1, 5)]) == 2
    assert common([(0, 1)], [(1, 2)]) == 0


def test_calls_of_the_kernels_are_seen_on_the_profilers_clock(monkeypatch):
    monkeypatch.setattr(kernels, "exact_attend", lambda: time.sleep(0.02))

    def steps() -> None:
        for _ in range(2):
            kernels.exact_attend()
            time.sleep(0.01)

    found = measure_overlap(steps)
    assert len(found.cpu) == 2
    assert all(end - begin >= 19 for begin, end in found.cpu)
    assert found.cpu[1][0] - found.cpu[0][0] >= 29
    assert found.wall_ms >= 59
    assert (found.percent, found.gpu) == (None, [])
    assert kernels.exact_attend.__name__ == "<lambda>"  # the doors are as before
