"""GPUs that one can plan for without having them: `magicpig models check --assume-gpu "RTX 4090"`.

Memory as drivers report it for these cards (less than the number on the box where error correction takes a share), the
PCIe link that the card has, and the bandwidth of its memory by NVIDIA's data sheet. What a profile recommends for them
is found by name and memory as for a real one.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from magicpig_cli.errors import UsageError
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Hardware
from magicpig_cli.profiles.choice import contains
from magicpig_cli.units import format_bytes

_MIB = 1 << 20
# name → (MiB, PCIe generation, lanes, GB/s of its memory)
_CARDS = {
    "NVIDIA GeForce RTX 3060": (12_288, 4, 16, 360),
    "NVIDIA GeForce RTX 3080": (10_240, 4, 16, 760),
    "NVIDIA GeForce RTX 3090": (24_576, 4, 16, 936),
    "NVIDIA GeForce RTX 4060 Ti": (16_380, 4, 8, 288),
    "NVIDIA GeForce RTX 4070": (12_282, 4, 16, 504),
    "NVIDIA GeForce RTX 4080": (16_376, 4, 16, 717),
    "NVIDIA GeForce RTX 4090": (24_564, 4, 16, 1008),
    "NVIDIA GeForce RTX 5090": (32_607, 5, 16, 1792),
    "NVIDIA RTX A6000": (49_140, 4, 16, 768),
    "NVIDIA A10": (23_028, 4, 16, 600),
    "NVIDIA L4": (23_034, 4, 16, 300),
    "NVIDIA L20": (46_068, 4, 16, 864),
    "NVIDIA L40S": (46_068, 4, 16, 864),
    "NVIDIA A100-PCIE-40GB": (40_960, 4, 16, 1555),
    "NVIDIA A100-SXM4-80GB": (81_920, 4, 16, 2039),
    "NVIDIA H100 80GB HBM3": (81_559, 5, 16, 3350),
    "NVIDIA H200": (143_771, 5, 16, 4800),
}


def names() -> tuple[str, ...]:
    """All cards that are known."""
    return tuple(_CARDS)


def card(text: str) -> Gpu:
    """The card whose name contains the words of `text`.

    The shortest name wins: "4060" finds the only one, "L4" not the L40S. All of its memory counts as free; what CUDA
    takes of it is in the reserve of the profiles. Raises UsageError.
    """
    found = [name for name in _CARDS if contains(name, text)]
    if not found:
        close = difflib.get_close_matches(text.lower(), [name.lower() for name in _CARDS], n=1, cutoff=0.4)
        meant = next((name for name in _CARDS if close and name.lower() == close[0]), "NVIDIA GeForce RTX 4090")
        raise UsageError(
            f"no card is known by the name {text!r}",
            hint=f'--assume-gpu "{meant}"; known are {", ".join(name.removeprefix("NVIDIA ") for name in _CARDS)}',
        )
    name = min(found, key=len)
    size, generation, lanes, bandwidth = _CARDS[name]
    return Gpu(0, name, size * _MIB, size * _MIB, generation, lanes, bandwidth * 1e9)


def described(machine: Hardware) -> Hardware:
    """The same machine, with what data sheets say of the cards in it that are known by name."""
    known = {name: facts[3] * 1e9 for name, facts in _CARDS.items()}
    return replace(machine, gpus=tuple(replace(gpu, memory_bytes_s=known.get(gpu.name)) for gpu in machine.gpus))


def assumed(machine: Hardware, gpu: str | None, memory: int | None) -> Hardware:
    """This machine with another GPU, and with `memory` bytes of host memory free. Raises UsageError."""
    if gpu is not None:
        machine = replace(machine, gpus=(card(gpu),))
    if memory is None:
        return machine
    if memory < 1:
        raise UsageError(f"a machine with {format_bytes(memory)} of memory", hint="write it like --assume-memory 64GiB")
    return replace(
        machine, memory_total=max(memory, machine.memory_total), memory_free=memory, memory_limit=None, process_bytes=0
    )
