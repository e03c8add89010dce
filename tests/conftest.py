"""Fixtures that many tests share. The demo model is loaded once per run."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests of fetching bring their own Hub

import pytest
import torch

from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import ModelError
from magicpig_cli.model import demo, loader


@pytest.fixture(scope="session")
def demo_available() -> None:
    """Skips where the demo wheel is not installed; scripts/setup.sh installs it."""
    try:
        demo.wheel_file()
    except ModelError as problem:
        pytest.skip(f"{problem.message}: {problem.hint}")


@pytest.fixture(scope="session")
def demo_model(demo_available: None) -> loader.Loaded:
    """The demo model in float32 on the CPU. Tests must not change it."""
    return loader.load_model(ModelOptions("demo"), torch.device("cpu"))
