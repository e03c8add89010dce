"""GPUs through a torch and a management library that are made up: numbering, MIG slices, and everything that fails."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from magicpig_cli import gpus
from magicpig_cli.gpus import Gpu, probe_gpus

GIB = 1 << 30


class NVMLError(Exception):
    """As the library has one."""


def device(
    name: str = "NVIDIA L20", bus: int = 1, uuid: str = "aaaa", total: int = 48 * GIB, **more
) -> SimpleNamespace:
    """What torch tells of one device."""
    return SimpleNamespace(
        name=name, uuid=uuid, total_memory=total, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, **more
    )


@pytest.fixture
def cuda(monkeypatch):
    """Call it with the devices that torch shall see; the last GiB of each is free. An exception fails instead."""

    def see(*devices: SimpleNamespace | Exception) -> None:
        def properties(index: int) -> SimpleNamespace:
            if isinstance(devices[index], Exception):
                raise devices[index]
            return devices[index]

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (GIB, properties(index).total_memory))

    return see


class Card(SimpleNamespace):
    """A card as the management library knows it: bus, uuid, generation, lanes (an exception is raised instead)."""


def library(*cards: Card) -> ModuleType:
    """A pynvml with these cards."""
    made = ModuleType("pynvml")
    made.calls = []

    def find(name: str, text: str) -> Card:
        made.calls.append(name)
        for card in cards:
            if text in (f"00000000:{card.bus:02x}:00.0", f"GPU-{card.uuid}"):
                return card
        raise NVMLError("Not Found")

    def answer(field: str):
        def ask(card: Card) -> int:
            value = getattr(card, field)
            if isinstance(value, Exception):
                raise value
            return value

        return ask

    made.nvmlInit = lambda: made.calls.append("init")
    made.nvmlShutdown = lambda: made.calls.append("shutdown")
    made.nvmlDeviceGetHandleByPciBusId = lambda text: find("bus", text)
    made.nvmlDeviceGetHandleByUUID = lambda text: find("uuid", text)
    made.nvmlDeviceGetMaxPcieLinkGeneration = answer("generation")
    made.nvmlDeviceGetCurrPcieLinkWidth = answer("lanes")
    return made


@pytest.fixture
def nvml(monkeypatch):
    """Call it with the cards of the machine; without, or with None, the package is not installed."""

    def install(*cards: Card | None) -> ModuleType | None:
        found = None if cards == (None,) else library(*cards)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        return found

    install(None)
    return install


def test_without_the_library_torch_alone_tells(cuda, nvml):
    cuda(device())
    assert probe_gpus() == (Gpu(0, "NVIDIA L20", 48 * GIB, GIB),)


def test_no_gpu(cuda, nvml):
    cuda()
    assert probe_gpus() == ()


def test_devices_are_matched_by_address_not_by_number(cuda, nvml):
    """CUDA_VISIBLE_DEVICES=2,0: torch's device 0 is the machine's third card."""
    cards = [Card(bus=n, uuid=f"u{n}", generation=n, lanes=16 if n == 1 else 8) for n in (1, 2, 3)]
    made = nvml(*cards)
    cuda(device(bus=3, uuid="u3"), device(bus=1, uuid="u1"))
    first, second = probe_gpus()
    assert (first.index, first.pcie_generation, first.pcie_lanes) == (0, 3, 8)
    assert (second.index, second.pcie_generation, second.pcie_lanes) == (1, 1, 16)
    assert made.calls[0] == "init"
    assert made.calls[-1] == "shutdown"


def test_by_uuid_where_torch_tells_no_address(cuda, nvml):
    nvml(Card(bus=1, uuid="one", generation=3, lanes=16), Card(bus=2, uuid="two", generation=4, lanes=8))
    cuda(SimpleNamespace(name="old torch", uuid="two", total_memory=GIB))
    assert (probe_gpus()[0].pcie_generation, probe_gpus()[0].pcie_lanes) == (4, 8)


def test_a_slice_of_a_card_has_the_link_of_the_card(cuda, nvml):
    """MIG: torch sees a part of the memory and a UUID that the library does not take for a card's."""
    nvml(Card(bus=7, uuid="card", generation=5, lanes=16))
    cuda(device("NVIDIA H200 MIG 1g.18gb", bus=7, uuid="MIG-slice", total=16 * GIB))
    assert probe_gpus() == (Gpu(0, "NVIDIA H200 MIG 1g.18gb", 16 * GIB, GIB, 5, 16),)


@pytest.mark.parametrize(
    ("generation", "lanes", "wanted"),
    [
        (NVMLError("Not Supported"), 16, (None, 16)),
        (4, NVMLError("Unknown Error"), (4, None)),
        (NVMLError("GPU is lost"), NVMLError("GPU is lost"), (None, None)),
        (0, 0, (None, None)),
        (OSError("no such function"), 16, (None, 16)),
    ],
)
def test_what_the_library_does_not_answer_is_unknown(cuda, nvml, generation, lanes, wanted):
    nvml(Card(bus=1, uuid="aaaa", generation=generation, lanes=lanes))
    cuda(device())
    (found,) = probe_gpus()
    assert (found.pcie_generation, found.pcie_lanes) == wanted
    assert found.free_bytes == GIB


def test_a_card_that_the_library_does_not_know(cuda, nvml):
    nvml(Card(bus=9, uuid="other", generation=4, lanes=16))
    cuda(device())
    assert probe_gpus() == (Gpu(0, "NVIDIA L20", 48 * GIB, GIB),)


@pytest.mark.parametrize("problem", [NVMLError("Driver/library version mismatch"), OSError("libnvidia-ml.so.1")])
def test_a_library_without_a_driver(cuda, nvml, problem):
    def fail() -> None:
        raise problem

    nvml(Card(bus=1, uuid="aaaa", generation=4, lanes=16)).nvmlInit = fail
    cuda(device())
    assert probe_gpus() == (Gpu(0, "NVIDIA L20", 48 * GIB, GIB),)


def test_another_package_of_that_name(cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    cuda(device())
    assert len(probe_gpus()) == 1


def test_an_error_on_the_way_out_is_none_of_ours(cuda, nvml):
    def fail() -> None:
        raise NVMLError("Uninitialized")

    nvml(Card(bus=1, uuid="aaaa", generation=4, lanes=16)).nvmlShutdown = fail
    cuda(device())
    assert probe_gpus()[0].pcie_generation == 4


def test_a_device_that_is_taken_or_lost_is_left_out_and_keeps_the_numbers_of_others(cuda, nvml):
    cuda(RuntimeError("CUDA-capable device(s) is/are busy or unavailable"), device("second"))
    assert [(gpu.index, gpu.name) for gpu in probe_gpus()] == [(1, "second")]


def test_the_machine_names_its_gpus(cuda, nvml, tmp_path):
    from magicpig_cli import hardware

    cuda(device())
    assert hardware.probe(tmp_path).gpus == probe_gpus()
    assert gpus.probe_gpus is hardware.probe_gpus
