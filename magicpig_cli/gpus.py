"""CUDA devices as torch sees them, and what NVIDIA's management library adds where nvidia-ml-py is installed (extra
`gpu`): the PCIe link, of which torch says nothing.

torch numbers devices within CUDA_VISIBLE_DEVICES, the library numbers all of the machine; they are matched by PCI
address or UUID. Whatever the library answers or fails to answer, the devices are listed (MIG slices, MPS, old drivers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device, or a slice of one."""

    index: int  # torch's
    name: str
    total_bytes: int
    free_bytes: int
    pcie_generation: int | None = None  # of the link that device and machine can have; None = unknown
    pcie_lanes: int | None = None  # of the link as it is
    memory_bytes_s: float | None = None  # bandwidth of its memory by the data sheet; None = not known (`cards`)


def probe_gpus() -> tuple[Gpu, ...]:
    """Devices that work; none with a CPU-only torch or without a driver. One that is lost or taken is left out."""
    import torch

    if not torch.cuda.is_available():
        return ()
    with _management_library() as library:
        found = [_probe(torch.cuda, index, library) for index in range(torch.cuda.device_count())]
    return tuple(gpu for gpu in found if gpu is not None)


def _probe(cuda: Any, index: int, library: Any) -> Gpu | None:
    """cuda: torch's module of that name; library: pynvml, or None."""
    try:
        properties = cuda.get_device_properties(index)
        free, total = cuda.mem_get_info(index)
    except (RuntimeError, AssertionError):  # fallen off the bus; or another process has it to itself
        return None
    handle = None if library is None else _handle(library, properties)
    if handle is None:
        return Gpu(index, properties.name, total, free)
    # An idle link goes down in generation, not in width: so what it can reach, and how wide it is.
    generation = _answer(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = _answer(library, "nvmlDeviceGetCurrPcieLinkWidth", handle)
    return Gpu(index, properties.name, total, free, generation or None, lanes or None)


@contextlib.contextmanager
def _management_library() -> Iterator[Any]:
    """pynvml between its start and its end, or None where it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # a missing package, a missing or mismatched driver: each has errors of its own
        yield None
        return
    try:
        yield pynvml
    finally:
        _answer(pynvml, "nvmlShutdown")


def _handle(library: Any, properties: Any) -> Any:
    """The library's handle of a device with these properties of torch's, or None.

    The PCI address comes first: it is that of the whole card also where CUDA shows a MIG slice of it.
    """
    address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if all(isinstance(part, int) for part in address):
        domain, bus, device = address
        handle = _answer(library, "nvmlDeviceGetHandleByPciBusId", f"{domain:08x}:{bus:02x}:{device:02x}.0")
        if handle is not None:
            return handle
    uuid = getattr(properties, "uuid", None)
    return None if uuid is None else _answer(library, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")


def _answer(library: Any, function: str, *arguments: Any) -> Any:
    """What a function of the library returns, or None if it is missing, not supported here or fails otherwise."""
    try:
        call: Callable[..., Any] = getattr(library, function)
        return call(*arguments)
    except Exception:  # NVMLError, AttributeError in older releases, ctypes' own
        return None
