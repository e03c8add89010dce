"""Fixtures that many tests share. The demo model is loaded once per run.

torch is imported where it is needed: many tests do without.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from magicpig_cli import hardware, speeds
from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import ModelError
from magicpig_cli.hardware import Speeds
from magicpig_cli.model import demo

if TYPE_CHECKING:
    from magicpig_cli.model.loader import Loaded

# How long an example takes depends on who else uses the cores; that is no property of the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts behind with Ctrl-C ignored
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests of fetching bring their own Hub
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is loaded


STEADY_SPEEDS = Speeds(
    threads=1, sequential_bytes_s=20e9, gather_bytes_s=15e9, count_ns=1.2, scan_ns=0.7, operator_us=4.0, visit_ns=25.0,
    product_bytes_s={"float32": 20e9, "bfloat16": 15e9, "int8": 15e9, "int4": 12e9}, prompt_multiply_adds_s=70e9,
    buffer_bytes=1 << 30, cache_bytes=32 << 20,
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def steady_speeds() -> Iterator[Speeds]:
    """No test measures this machine unasked or plans with what is kept of it: speeds are the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            speeds, "load_or_measure", lambda machine, threads, gpu=None, **_: replace(STEADY_SPEEDS, threads=threads)
        )
        yield STEADY_SPEEDS


def keep_steady_speeds(folder: Path) -> None:
    """Keep them in a cache directory, so that programs which a test starts with it measure nothing either."""
    machine = hardware.probe()
    for threads in {1, machine.threads}:
        about = speeds.facts(machine, threads, None)
        record = speeds.Record(replace(STEADY_SPEEDS, threads=threads), tries=speeds.MAX_TRIES)
        speeds._write(folder / "magicpig-cli" / "speeds" / f"{speeds._digest(about)}.json", about, record)


@pytest.fixture(scope="session", autouse=True)
def no_profiles_of_one_s_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine's user has tuned must not change what tests see, in this process or in others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def demo_available() -> None:
    """Skips where the demo wheel is not installed; scripts/setup.sh installs it."""
    try:
        demo.wheel_file()
    except ModelError as problem:
        pytest.skip(f"{problem.message}: {problem.hint}")


@pytest.fixture(scope="session")
def demo_model(demo_available: None) -> Loaded:
    """The demo model in float32 on the CPU. Tests must not change it."""
    import torch

    from magicpig_cli.model import loader

    return loader.load_model(ModelOptions("demo", quantize="none"), torch.device("cpu"))
