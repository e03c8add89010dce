"""What a CUDA device does in a second: copies between pinned memory and it, and products with one row in its memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from magicpig_cli.hardware import Speeds
from magicpig_cli.speed_probe import WIDTH, medians, seconds

COPY_BYTES = 64 << 20
DEVICE_WEIGHTS = 16  # of WIDTH × WIDTH bfloat16, 512 MiB together: several times the cache of any GPU


def added(speeds: Speeds, gpu: int) -> Speeds:
    """With what a device adds; gpu: torch's number of it."""
    device = torch.device("cuda", gpu)
    there, back = copy_speeds(device)
    return replace(
        speeds, host_to_device_bytes_s=there, device_to_host_bytes_s=back, device_product_bytes_s=product_speed(device)
    )


def copy_speeds(device: torch.device) -> tuple[float | None, float | None]:
    """Bytes per second from pinned memory to a CUDA device and back; None where there is no room for it."""
    try:
        host = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError:  # out of memory that can be pinned, or on the GPU
        return None, None

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        torch.cuda.synchronize(device)

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return COPY_BYTES / seconds(copy)

    found = medians({"up": lambda _: copied(there, host), "down": lambda _: copied(host, there)})
    return found["up"], found["down"]


def product_speed(device: torch.device) -> float | None:
    """Bytes of bfloat16 weights per second that products with one row read on a CUDA device; None without room."""
    try:
        weights = torch.ones(DEVICE_WEIGHTS, WIDTH, WIDTH, dtype=torch.bfloat16, device=device)
    except RuntimeError:
        return None
    x = torch.ones(1, WIDTH, dtype=torch.bfloat16, device=device)

    def read(_: int) -> float:
        torch.cuda.synchronize(device)

        def products() -> None:
            for weight in weights:
                nn.functional.linear(x, weight)
            torch.cuda.synchronize(device)

        return weights.nbytes / seconds(products)

    return medians({"product": read})["product"]
