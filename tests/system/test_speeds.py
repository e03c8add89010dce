"""What is kept of measured speeds: when it is taken, when it is measured again, and that nothing breaks over it."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from magicpig_cli import hardware, planning, speeds
from magicpig_cli.cards import assumed
from magicpig_cli.config import ModelOptions, Settings
from magicpig_cli.errors import MemoryBudgetError, UsageError
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Speeds
from magicpig_cli.speeds import MAX_TRIES, load_or_measure  # before the tests' own takes its place
from tests.system.test_hardware import SMOL

MACHINE = hardware.Hardware(
    cpu_model="Some CPU", isa="avx2", tiers=("portable", "avx2"), cores_physical=8, cores_usable=16, threads=8,
    numa_nodes=1, memory_total=64 << 30, memory_free=32 << 30, memory_limit=None, process_bytes=0,
)  # fmt: skip
CARD = Gpu(0, "NVIDIA L20", 48 << 30, 40 << 30, 4, 16)
FOUND = Speeds(
    threads=8, sequential_bytes_s=40e9, gather_bytes_s=25e9, count_ns=1.1, scan_ns=0.7, operator_us=3.0, visit_ns=20.0,
    product_bytes_s={"float32": 30e9, "bfloat16": 16e9, "int8": 21e9, "int4": 18e9}, prompt_multiply_adds_s=1e11,
    buffer_bytes=1 << 30, cache_bytes=64 << 20,
)  # fmt: skip


class Meter:
    """Stands in for measuring: counts, and gives one result after another, the last one for ever."""

    def __init__(self) -> None:
        self.results: list[Speeds | BaseException] = [FOUND]
        self.times = 0

    def __call__(self, machine, threads, gpu=None) -> Speeds:
        self.times += 1
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, BaseException):
            raise result
        return result


@pytest.fixture
def meter(monkeypatch, tmp_path):
    made = Meter()
    monkeypatch.setattr(speeds, "measure", made)
    monkeypatch.setattr(speeds, "folder", lambda: tmp_path / "cache/speeds")
    monkeypatch.setattr(speeds, "_known", {})
    return made


def ask(machine=MACHINE, threads=8, gpu=None, announce=lambda: None, **more) -> Speeds | None:
    return load_or_measure(machine, threads, gpu, announce=announce, **more)


def new_process(monkeypatch) -> None:
    monkeypatch.setattr(speeds, "_known", {})


def kept_file() -> Path:
    (path,) = speeds.folder().glob("*.json")
    return path


def test_measured_once_and_announced_before(meter):
    told: list[int] = []
    for _ in range(3):
        assert ask(announce=lambda: told.append(meter.times)) == FOUND
    assert told == [0]
    assert meter.times == 1


def test_the_next_process_reads_what_was_kept(meter, monkeypatch):
    ask()
    new_process(monkeypatch)
    assert ask() == FOUND
    new_process(monkeypatch)
    assert ask(announce=None) == FOUND
    assert meter.times == 1


def test_nobody_to_tell_nothing_measured(meter):
    assert ask(announce=None) is None
    assert meter.times == 0
    assert not speeds.folder().exists()


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_model": "Other CPU"}, {"isa": "avx512"}, {"cores_physical": 4}, {"cores_usable": 3}, {"numa_nodes": 2},
        {"memory_total": 128 << 30},
    ],
)  # fmt: skip
def test_another_machine_is_measured_for_itself(meter, monkeypatch, change):
    ask()
    new_process(monkeypatch)
    ask(machine=replace(MACHINE, **change))
    assert meter.times == 2
    new_process(monkeypatch)
    ask()
    assert meter.times == 2


def test_threads_gpu_and_versions_are_told_apart(meter, monkeypatch):
    ask()
    ask(threads=4)
    ask(gpu=CARD)
    ask(gpu=replace(CARD, pcie_lanes=8))
    assert meter.times == 4
    monkeypatch.setattr(speeds, "_torch_version", lambda: "99.0")
    ask()
    monkeypatch.setattr(speeds.magicpig_cli, "__version__", "99.0")
    ask()
    assert meter.times == 6


def test_free_memory_and_what_a_kernel_takes_do_not_matter(meter, monkeypatch):
    ask()
    new_process(monkeypatch)
    ask(machine=replace(MACHINE, memory_free=1 << 30, process_bytes=5, memory_total=MACHINE.memory_total - (9 << 20)))
    ask(gpu=None, machine=replace(MACHINE, gpus=(CARD,)))
    assert meter.times == 1


def broken(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:200]),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text("null"),
        lambda path: broken(path, lambda content: content["facts"].update(cpu="Other CPU")),
        lambda path: broken(path, lambda content: content["speeds"].pop("count_ns")),
        lambda path: broken(path, lambda content: content["speeds"].update(warp=9)),
        lambda path: broken(path, lambda content: content["speeds"].update(gather_bytes_s=0)),
        lambda path: broken(path, lambda content: content["speeds"].update(gather_bytes_s=-1.0)),
        lambda path: broken(path, lambda content: content["speeds"].update(gather_bytes_s=None)),
        lambda path: broken(path, lambda content: content["speeds"].update(gather_bytes_s="fast")),
        lambda path: broken(path, lambda content: content["speeds"].update(gather_bytes_s=float("nan"))),
        lambda path: broken(path, lambda content: content["speeds"].update(gather_bytes_s=True)),
        lambda path: broken(path, lambda content: content["speeds"]["product_bytes_s"].pop("int8")),
        lambda path: broken(path, lambda content: content["speeds"]["product_bytes_s"].update(int8=float("inf"))),
        lambda path: broken(path, lambda content: content["speeds"]["product_bytes_s"].update(int2=1e9)),
        lambda path: broken(path, lambda content: content["speeds"].update(product_bytes_s=7)),
        lambda path: broken(path, lambda content: content["speeds"].update(visit_ns=-1.0)),
        lambda path: broken(path, lambda content: content["speeds"].update(device_to_host_bytes_s=0)),
        lambda path: broken(path, lambda content: content.pop("tries")),
        lambda path: broken(path, lambda content: content.update(tries="two")),
        lambda path: broken(path, lambda content: content.pop("speeds")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_a_file_that_is_not_whole_or_not_ours_is_measured_anew(meter, monkeypatch, damage):
    ask()
    damage(kept_file())
    new_process(monkeypatch)
    assert ask() == FOUND
    assert meter.times == 2
    assert not [path for path in speeds.folder().iterdir() if path.suffix in (".new", ".tmp")]


def test_a_file_from_before_int4_is_taken_and_measured_again_when_it_may(meter, monkeypatch):
    """However often it has been measured; and what knows int4 is kept over what was disturbed less."""
    ask()
    broken(kept_file(), lambda content: content["speeds"]["product_bytes_s"].pop("int4"))
    broken(kept_file(), lambda content: content.update(tries=MAX_TRIES))
    new_process(monkeypatch)
    older = ask(announce=None)
    assert older == replace(FOUND, product_bytes_s={"float32": 30e9, "bfloat16": 16e9, "int8": 21e9})
    assert meter.times == 1
    new_process(monkeypatch)
    meter.results = [disturbed(0.9)]
    assert ask() == disturbed(0.9)
    assert meter.times == 2


def test_a_damaged_file_is_replaced(meter, monkeypatch):
    ask()
    kept_file().write_text("{")
    new_process(monkeypatch)
    ask()
    new_process(monkeypatch)
    assert ask(announce=None) == FOUND


def test_a_folder_that_cannot_be_written(meter, monkeypatch, tmp_path):
    """Here a file stands where it would be; a read-only file system gives the same kind of error."""
    (tmp_path / "cache").write_text("not a folder")
    assert ask() == FOUND
    assert ask() == FOUND
    assert meter.times == 1
    new_process(monkeypatch)
    assert ask() == FOUND
    assert meter.times == 2


def test_a_full_disk_leaves_nothing_half_written(meter, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(speeds.os, "replace", full)
    assert ask() == FOUND
    assert [path.suffix for path in speeds.folder().iterdir()] == [".lock"]


def test_anew_forgets_what_is_kept(meter, monkeypatch):
    ask()
    meter.results = [replace(FOUND, count_ns=2.0)]
    assert ask() == FOUND
    assert ask(anew=True).count_ns == 2.0
    assert ask().count_ns == 2.0
    new_process(monkeypatch)
    assert ask(announce=None).count_ns == 2.0
    assert meter.times == 2


@pytest.mark.parametrize("problem", [MemoryError(), OSError(12, "Cannot allocate memory"), RuntimeError("no memory")])
def test_no_room_to_measure_in(meter, problem):
    meter.results = [problem, FOUND]
    assert ask() is None
    assert not list(speeds.folder().glob("*.json"))
    assert ask() == FOUND


def test_an_interrupt_keeps_nothing(meter):
    meter.results = [KeyboardInterrupt(), FOUND]
    with pytest.raises(KeyboardInterrupt):
        ask()
    assert [path.suffix for path in speeds.folder().iterdir()] == [".lock"]
    assert ask() == FOUND


def disturbed(share: float) -> Speeds:
    return replace(FOUND, cpu_share=share, sequential_bytes_s=share * 40e9)


def test_what_was_disturbed_is_measured_again_by_the_next_process_not_by_this_one(meter, monkeypatch):
    meter.results = [disturbed(0.5), FOUND]
    assert ask().cpu_share == 0.5
    assert ask().cpu_share == 0.5
    new_process(monkeypatch)
    assert ask(announce=None).cpu_share == 0.5
    new_process(monkeypatch)
    assert ask() == FOUND
    new_process(monkeypatch)
    assert ask() == FOUND
    assert meter.times == 2


def test_on_a_machine_that_is_never_idle_the_best_of_a_few_is_kept(meter, monkeypatch):
    meter.results = [disturbed(0.4), disturbed(0.7), disturbed(0.3), disturbed(0.2)]
    shares = []
    for _ in range(MAX_TRIES + 3):
        new_process(monkeypatch)
        shares.append(ask().cpu_share)
    assert shares == [0.4, *[0.7] * (MAX_TRIES + 2)]
    assert meter.times == MAX_TRIES


def test_copies_for_which_a_gpu_had_no_room_are_measured_again(meter, monkeypatch):
    copied = replace(FOUND, host_to_device_bytes_s=20e9, device_to_host_bytes_s=10e9, cpu_share=0.9)
    copied = replace(copied, device_product_bytes_s=700e9)
    meter.results = [FOUND, copied, FOUND]
    up = []
    for _ in range(4):
        new_process(monkeypatch)
        up.append(ask(gpu=CARD).host_to_device_bytes_s)
    assert up == [None, 20e9, 20e9, 20e9]
    assert meter.times == 2


def test_a_gpu_of_which_only_copies_are_known_is_measured_again(meter, monkeypatch):
    copied = replace(FOUND, host_to_device_bytes_s=20e9, device_to_host_bytes_s=10e9)
    meter.results = [copied, replace(copied, device_product_bytes_s=700e9)]
    products = []
    for _ in range(3):
        new_process(monkeypatch)
        products.append(ask(gpu=CARD).device_product_bytes_s)
    assert products == [None, 700e9, 700e9]


def _one_of_many(folder: Path, started, results) -> None:
    def measure(*_: object) -> Speeds:
        results.put("measured")
        return FOUND

    speeds.folder, speeds.measure = lambda: folder, measure
    started.wait()
    results.put(load_or_measure(MACHINE, 8, None, announce=lambda: None) == FOUND)


def test_of_many_processes_one_measures(tmp_path):
    context = multiprocessing.get_context("fork")
    started, results = context.Event(), context.Queue()
    processes = [context.Process(target=_one_of_many, args=(tmp_path, started, results)) for _ in range(6)]
    for process in processes:
        process.start()
    started.set()
    said = [results.get(timeout=60) for _ in range(7)]
    for process in processes:
        process.join(timeout=60)
    assert sorted(map(str, said)) == ["True"] * 6 + ["measured"]
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".json", ".lock"]


def test_a_process_that_holds_the_lock_for_ever_is_not_waited_for(meter, monkeypatch):
    monkeypatch.setattr(speeds, "WAIT_S", 0.1)
    ask()
    kept_file().unlink()
    (lock,) = speeds.folder().glob("*.lock")
    with lock.open() as held:
        speeds.fcntl.flock(held, speeds.fcntl.LOCK_EX)
        new_process(monkeypatch)
        assert ask() == FOUND


# --- plans ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(meter, monkeypatch):
    """`plan_here` on MACHINE with the real look-up; returns what was told."""
    told: list[str] = []
    monkeypatch.setattr(speeds, "load_or_measure", load_or_measure)
    monkeypatch.setattr(hardware, "probe", lambda: MACHINE)
    monkeypatch.setattr(
        planning, "plan", lambda machine, *rest: told.append(machine.speeds) or REAL_PLAN(machine, *rest)
    )
    return told


REAL_PLAN = planning.plan


def test_a_plan_is_made_with_the_speeds_of_its_threads(here, meter, monkeypatch):
    asked: list[tuple] = []
    monkeypatch.setattr(speeds, "measure", lambda *about: asked.append(about) or meter(*about))
    planning.plan_here(SMOL, Settings(ModelOptions(device="cpu"), threads=3), lambda: None)
    assert asked == [(MACHINE, 3, None)]
    assert here == [None, FOUND]


def test_a_plan_of_a_machine_that_was_never_measured(here, meter):
    planning.plan_here(SMOL, Settings(ModelOptions(device="cpu")))
    assert here == [None]
    assert meter.times == 0


def test_what_is_refused_is_refused_before_anything_is_measured(here, meter):
    with pytest.raises(UsageError):
        planning.plan_here(SMOL, Settings(threads=0), lambda: None)
    with pytest.raises(MemoryBudgetError):
        planning.plan_here(replace(SMOL, params=10**12), Settings(ModelOptions(device="cpu")), lambda: None)
    assert meter.times == 0


@pytest.mark.parametrize(
    ("device", "wanted"), [("cpu", None), ("auto", 0), ("cuda", 0), ("cuda:1", 1), ("cuda:0", 0), ("cuda:7", None)]
)
def test_copies_are_measured_to_the_gpu_that_is_meant(meter, monkeypatch, device, wanted):
    seen: list[Gpu | None] = []
    monkeypatch.setattr(
        speeds, "load_or_measure", lambda machine, threads, gpu, **_: seen.append(gpu and gpu.index) or FOUND
    )
    machine = replace(MACHINE, gpus=(CARD, replace(CARD, index=1)))
    planning.speeds_here(machine, 8, device, None)
    assert seen == [wanted]


def test_figures_of_the_card_that_is_here_say_nothing_about_an_assumed_one(here, meter, monkeypatch):
    copies = replace(FOUND, host_to_device_bytes_s=20e9, device_to_host_bytes_s=10e9, device_product_bytes_s=700e9)
    monkeypatch.setattr(speeds, "load_or_measure", lambda *_, **__: copies)
    monkeypatch.setattr(hardware, "probe", lambda: replace(MACHINE, gpus=(CARD,)))
    planning.plan_here(SMOL, Settings())
    planning.plan_here(SMOL, Settings(), assume=lambda machine: assumed(machine, "RTX 4090", None))
    nothing = {"host_to_device_bytes_s": None, "device_to_host_bytes_s": None, "device_product_bytes_s": None}
    assert here[1::2] == [copies, replace(copies, **nothing)]
