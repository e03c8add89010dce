"""Which native module is picked, what caps it, and which OpenMP runtime it shares with torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.kernels import isa


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; its error output where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_the_highest_tier_that_runs_is_chosen():
    assert isa.runnable()
    assert isa.choose(None) == isa.runnable()[-1]
    assert isa.runnable()[0] == "portable"
    assert set(isa.runnable()) <= set(isa.compiled()) <= set(isa.TIERS)


def test_a_cap_is_an_upper_bound(monkeypatch):
    assert isa.choose("portable") == "portable"
    assert isa.choose("reference") == "reference"
    monkeypatch.setattr(isa, "runnable", lambda: ("portable", "avx2"))
    assert isa.choose("avx512") == "avx2"
    assert isa.choose("neon") == "portable"


def test_an_unknown_cap_names_what_is_allowed():
    with pytest.raises(UsageError, match="MAGICPIG_ISA=sse9 is not an instruction set") as caught:
        isa.choose("sse9")
    assert caught.value.hint == "set it to one of reference, portable, neon, avx2, avx512, or leave it unset"


def test_a_tier_that_the_cpu_cannot_run_is_never_imported(monkeypatch):
    """Case 19: the modules of higher tiers may contain such instructions in their very initialisation."""
    asked = []
    real = isa.importlib.import_module

    def masked(name: str):
        asked.append(name)
        module = real("magicpig_cli.kernels._native_portable")

        class Masked:
            supported = staticmethod(lambda: ["portable"])
            TIER = module.TIER

        return Masked

    monkeypatch.setattr(isa.importlib, "import_module", masked)
    assert isa.choose(None) == "portable"
    assert asked == ["magicpig_cli.kernels._native_portable"]


def test_an_installation_without_native_kernels_says_what_to_do(monkeypatch):
    monkeypatch.setattr(isa, "compiled", tuple)
    with pytest.raises(MagicpigError, match="native kernels are missing") as caught:
        isa.choose(None)
    assert "MAGICPIG_ISA=reference" in (caught.value.hint or "")
    assert isa.choose("reference") == "reference"


@pytest.mark.parametrize("tier", [*isa.runnable(), "reference"])
def test_the_environment_caps_a_fresh_process(tier):
    shown = python("from magicpig_cli import kernels; print(kernels.isa.current())", MAGICPIG_ISA=tier)
    assert shown == tier


def test_a_bad_environment_is_a_usage_error():
    shown = python("from magicpig_cli import kernels", MAGICPIG_ISA="sse9")
    assert "UsageError: MAGICPIG_ISA=sse9 is not an instruction set" in shown


@pytest.mark.parametrize(
    "first", ["import torch; import magicpig_cli.kernels", "import magicpig_cli.kernels; import torch"]
)
def test_one_openmp_runtime_beside_torch(first):
    """Two runtimes would start two sets of threads that fight for the cores."""
    code = f"""{first}
import threadpoolctl
print(len([pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "openmp"]))"""
    assert python(code) == "1"


def test_kernels_do_not_import_torch():
    assert python("import sys, magicpig_cli.kernels; print('torch' in sys.modules)") == "False"
