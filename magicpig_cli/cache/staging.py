"""The one place where tensors cross between host and device.

On a CPU run both sides are the same memory and nothing is copied.
"""

from __future__ import annotations

import torch


class Staging:
    """Copies between host memory and `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu")
