"""`magicpig doctor`: what this machine offers, and what magicpig makes of it."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.options import AsJson, command_options
from magicpig_cli.config import Settings
from magicpig_cli.events import MEASURING

if TYPE_CHECKING:
    from magicpig_cli.gpus import Gpu
    from magicpig_cli.hardware import Hardware, Speeds
    from magicpig_cli.profiles import Profile

_PACKAGES = ("torch", "transformers", "huggingface-hub", "safetensors", "numpy")


@command_options("model", only=("device", "profile"))
def doctor(
    settings: Settings,
    measure: Annotated[bool, typer.Option("--measure", help="Measure speeds again, instead of once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, cores, memory, GPUs, what the kernels use on this machine, and its measured speeds."""
    import torch  # noqa: F401  its libraries are part of what is examined

    from magicpig_cli import hardware
    from magicpig_cli.planning import profile_for, speeds_here
    from magicpig_cli.ui import console

    machine = hardware.probe()
    runtimes = hardware.openmp_runtimes()
    profile, why = profile_for(machine, settings)
    device = settings.model.device
    speeds = speeds_here(machine, machine.threads, device, lambda: console.say(MEASURING), anew=measure)
    machine = replace(machine, speeds=speeds)
    if as_json:
        print(json.dumps(report(machine, runtimes, profile)))
    else:
        _print_page(machine, runtimes, f"{profile.name}: {why}")


def report(machine: Hardware, runtimes: tuple[str, ...], profile: Profile) -> dict[str, Any]:
    """The object of `doctor --json` (CLI.md). A token is only ever reported as present or not."""
    return {
        "versions": _versions(),
        "cpu": {
            "model": machine.cpu_model,
            "isa": machine.isa,
            "tiers": list(machine.tiers),
            "cores_physical": machine.cores_physical,
            "cores_usable": machine.cores_usable,
            "threads": machine.threads,
        },
        "memory": {
            "total_bytes": machine.memory_total,
            "free_bytes": machine.memory_free,
            "limit_bytes": machine.memory_limit,
        },
        "gpus": [asdict(gpu) for gpu in machine.gpus],
        "openmp_runtimes": list(runtimes),
        "profile": profile.name,
        "hub": _hub(),
        "speeds": None if machine.speeds is None else asdict(machine.speeds),
    }


def _versions() -> dict[str, str | None]:
    import magicpig_cli

    own = {"magicpig": magicpig_cli.__version__, "python": platform.python_version()}
    return own | {name: _version(name) for name in _PACKAGES}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _hub() -> dict[str, Any]:
    from huggingface_hub import constants, get_token

    return {"cache": str(constants.HF_HUB_CACHE), "token": get_token() is not None}


def _print_page(machine: Hardware, runtimes: tuple[str, ...], profile: str) -> None:
    from magicpig_cli.cli.config_file import config_path
    from magicpig_cli.ui import console
    from magicpig_cli.units import format_bytes

    hub, config = _hub(), config_path()
    limit = "" if machine.memory_limit is None else f", container limit {format_bytes(machine.memory_limit)}"
    rows = [
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in _versions().items())),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}{_platform_note()}"),
        ("CPU", machine.cpu_model),
        ("kernels", _kernels(machine)),
        ("cores", f"{machine.cores_physical} physical, {machine.cores_usable} usable by this process"),
        ("threads", str(machine.threads)),
        ("NUMA nodes", str(machine.numa_nodes)),
        ("memory", f"{format_bytes(machine.memory_free)} of {format_bytes(machine.memory_total)} free{limit}"),
        *((f"GPU {gpu.index}", _gpu(gpu)) for gpu in machine.gpus),
        *([("GPU", "none that torch can use")] if not machine.gpus else []),
        *(_speeds(machine.speeds) if machine.speeds is not None else [("speeds", "no memory to measure them in")]),
        ("OpenMP", ", ".join(runtimes) + (" (more than one: they compete for cores)" if len(runtimes) > 1 else "")),
        ("profile", profile),
        ("config", f"{config}{'' if config.exists() else ' (not there)'}"),
        ("Hub cache", f"{hub['cache']}, token {'present' if hub['token'] else 'not set'}"),
    ]
    console.print_table(("", ""), rows)


def _gpu(gpu: Gpu) -> str:
    """Name, memory, and the link where the management library tells."""
    from magicpig_cli.units import format_bytes

    link = [
        *([f"PCIe {gpu.pcie_generation}"] if gpu.pcie_generation else []),
        *([f"{gpu.pcie_lanes} lanes"] if gpu.pcie_lanes else []),
    ]
    memory = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
    return ", ".join((gpu.name, memory, *link))


def _speeds(speeds: Speeds) -> Iterator[tuple[str, str]]:
    """What was measured, in rows."""
    from magicpig_cli.speeds import UNDISTURBED
    from magicpig_cli.units import format_bytes

    many = f"{speeds.threads} thread{'s' if speeds.threads > 1 else ''}"
    through = f"{format_bytes(speeds.buffer_bytes)}; caches {format_bytes(speeds.cache_bytes)}"
    yield (
        "memory speed",
        f"{_gb_s(speeds.sequential_bytes_s)} in order, {_gb_s(speeds.gather_bytes_s)} by sorted rows "
        f"({many}, through {through})",
    )
    products = ", ".join(f"{form} {_gb_s(rate)}" for form, rate in speeds.product_bytes_s.items())
    yield "weights read", f"{products}, by a product with one row ({many})"
    yield "prompts", f"{speeds.prompt_multiply_adds_s / 1e9:.0f}e9 multiply-adds per second in float32 ({many})"
    yield (
        "look-ups",
        f"{speeds.visit_ns:.1f} ns per table and {speeds.count_ns:.2f} ns per id, {speeds.scan_ns:.2f} ns per "
        f"signature and query head (1 thread); "
        f"{speeds.operator_us:.1f} µs per small torch operator",
    )
    if speeds.cpu_share < UNDISTURBED:
        yield (
            "disturbed",
            f"other programs had {1 - speeds.cpu_share:.0%} of the cores while this was measured; when they are done: "
            "magicpig doctor --measure",
        )
    if speeds.host_to_device_bytes_s and speeds.device_to_host_bytes_s:
        there, back = _gb_s(speeds.host_to_device_bytes_s), _gb_s(speeds.device_to_host_bytes_s)
        yield "GPU copies", f"{there} there, {back} back, from pinned memory"
    if speeds.device_product_bytes_s:
        yield "GPU weights", f"bfloat16 {_gb_s(speeds.device_product_bytes_s)}, by a product with one row"


def _gb_s(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.1f} GB/s"


def _kernels(machine: Hardware) -> str:
    """The tier in use and how it is tested, what else could be used, and what the CPU or the system does not allow."""
    from magicpig_cli.kernels import isa

    used = f"{machine.isa}, tested {isa.TESTED[machine.isa]}" if machine.isa in isa.TESTED else machine.isa
    idle = [tier for tier in isa.compiled() if tier not in machine.tiers]
    beyond = f"; compiled, but not for this CPU: {', '.join(idle)}" if idle else ""
    return f"{used} (can run: {', '.join(machine.tiers) or 'only the NumPy reference'}{beyond})"


def _platform_note() -> str:
    return "" if platform.system() == "Linux" else " (magicpig is tested on Linux only)"
