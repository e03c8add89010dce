"""How `magicpig doctor` describes machines other than this one, and this one under a narrower affinity."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from magicpig_cli import hardware, speeds
from magicpig_cli.cli import app, doctor
from magicpig_cli.events import MEASURING
from magicpig_cli.gpus import Gpu
from magicpig_cli.kernels import isa
from tests.conftest import STEADY_SPEEDS

CARDS = (Gpu(0, "NVIDIA L20 [x]", 48 << 30, 40 << 30, 4, 16), Gpu(2, "other", 8 << 30, 1 << 30))


@pytest.fixture
def machine(monkeypatch):
    """Call it with what differs from this machine; `doctor` then sees that."""
    real = hardware.probe()

    def see(**changes) -> hardware.Hardware:
        made = dataclasses.replace(real, **changes)
        monkeypatch.setattr(hardware, "probe", lambda: made)
        return made

    return see


@pytest.mark.parametrize(
    ("used", "runnable", "compiled", "wanted"),
    [
        ("neon", ("portable", "neon"), ("portable", "neon"), "neon, tested under emulation (can run: portable, neon)"),
        (
            "avx2", ("portable", "avx2"), ("portable", "avx2", "avx512"),
            "avx2, tested natively (can run: portable, avx2; compiled, but not for this CPU: avx512)",
        ),
        ("reference", (), (), "reference (can run: only the NumPy reference)"),
    ],
)  # fmt: skip
def test_the_kernels_in_use_and_how_they_are_tested(monkeypatch, used, runnable, compiled, wanted):
    monkeypatch.setattr(isa, "compiled", lambda: compiled)
    machine = dataclasses.replace(hardware.probe(), isa=used, tiers=runnable)
    assert doctor._kernels(machine) == wanted


def test_every_tier_says_how_it_is_tested():
    assert set(isa.TESTED) == set(isa.TIERS)


def test_gpus_and_speeds_in_json(machine, monkeypatch, capsys):
    machine(gpus=CARDS, threads=7)
    asked: list[tuple] = []
    measured = dataclasses.replace(STEADY_SPEEDS, host_to_device_bytes_s=25e9, device_to_host_bytes_s=24e9)

    def load_or_measure(machine, threads, gpu, **more):
        asked.append((threads, gpu, more["anew"]))
        return measured

    monkeypatch.setattr(speeds, "load_or_measure", load_or_measure)
    assert app.run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"] == [
        {
            "index": 0, "name": "NVIDIA L20 [x]", "total_bytes": 48 << 30, "free_bytes": 40 << 30,
            "pcie_generation": 4, "pcie_lanes": 16, "memory_bytes_s": None,
        },
        {
            "index": 2, "name": "other", "total_bytes": 8 << 30, "free_bytes": 1 << 30,
            "pcie_generation": None, "pcie_lanes": None, "memory_bytes_s": None,
        },
    ]  # fmt: skip
    assert report["speeds"] == dataclasses.asdict(measured)
    assert report["speeds"]["product_bytes_s"].keys() == {"float32", "bfloat16", "int8", "int4"}
    assert app.run(["doctor", "--json", "--measure"]) == 0
    assert asked == [(7, CARDS[0], False), (7, CARDS[0], True)]


def test_page(machine, monkeypatch, capsys):
    machine(gpus=CARDS)
    measured = dataclasses.replace(
        STEADY_SPEEDS, threads=8, host_to_device_bytes_s=25e9, device_to_host_bytes_s=24e9,
        device_product_bytes_s=700e9, cpu_share=0.55,
    )  # fmt: skip
    monkeypatch.setattr(speeds, "load_or_measure", lambda *_, **__: measured)
    assert app.run(["doctor"]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["GPU 0"].endswith("NVIDIA L20 [x], 40.0 GiB of 48.0 GiB free, PCIe 4, 16 lanes")
    assert lines["GPU 2"].endswith("other, 1.0 GiB of 8.0 GiB free")
    assert lines["memory speed"].endswith(
        "20.0 GB/s in order, 15.0 GB/s by sorted rows (8 threads, through 1.0 GiB; caches 32.0 MiB)"
    )
    assert "float32 20.0 GB/s, bfloat16 15.0 GB/s, int8 15.0 GB/s, int4 12.0 GB/s" in lines["weights read"]
    assert "25.0 ns per table and 1.20 ns per id" in lines["look-ups"]
    assert "45% of the cores" in lines["disturbed"]
    assert "magicpig doctor --measure" in lines["disturbed"]
    assert lines["GPU copies"].endswith("25.0 GB/s there, 24.0 GB/s back, from pinned memory")
    assert lines["GPU weights"].endswith("bfloat16 700.0 GB/s, by a product with one row")


def test_page_of_a_machine_that_could_not_be_measured(machine, monkeypatch, capsys):
    machine(gpus=())
    monkeypatch.setattr(speeds, "load_or_measure", lambda *_, **__: None)
    assert app.run(["doctor"]) == 0
    page = capsys.readouterr().out
    assert "no memory to measure them in" in page
    assert "disturbed" not in page
    assert app.run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speeds"] is None


def test_one_core(tmp_path):
    """What `taskset -c 0` leaves is what is used and measured: one thread; told once, and read the next time."""
    core = min(os.sched_getaffinity(0))
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def run() -> tuple[dict, str]:
        done = subprocess.run(
            [sys.executable, "-m", "magicpig_cli", "doctor", "--json"], capture_output=True, text=True, timeout=300,
            env=environment, check=True, preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )  # fmt: skip
        return json.loads(done.stdout), done.stderr

    first, said = run()
    assert (first["cpu"]["cores_usable"], first["cpu"]["threads"], first["speeds"]["threads"]) == (1, 1, 1)
    assert said == MEASURING + "\n"
    (kept,) = (tmp_path / "magicpig-cli/speeds").glob("*.json")
    content = json.loads(kept.read_text())
    kept.write_text(json.dumps({**content, "tries": speeds.MAX_TRIES}))  # however busy this machine was
    second, said = run()
    assert second["speeds"] == first["speeds"]
    assert said == ""


def test_listing_models_measures_nothing(monkeypatch, capsys):
    monkeypatch.setattr(speeds, "load_or_measure", lambda *_, **__: pytest.fail("measured"))
    assert app.run(["models"]) == 0
