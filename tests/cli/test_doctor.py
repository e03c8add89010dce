"""How `magicpig doctor` describes the kernels on machines other than this one."""

from __future__ import annotations

import dataclasses

import pytest

from magicpig_cli import hardware
from magicpig_cli.cli import doctor
from magicpig_cli.kernels import isa


@pytest.mark.parametrize(
    ("used", "runnable", "compiled", "wanted"),
    [
        ("neon", ("portable", "neon"), ("portable", "neon"), "neon, tested under emulation (can run: portable, neon)"),
        (
            "avx2", ("portable", "avx2"), ("portable", "avx2", "avx512"),
            "avx2, tested natively (can run: portable, avx2; compiled, but not for this CPU: avx512)",
        ),
        ("reference", (), (), "reference (can run: only the NumPy reference)"),
    ],
)  # fmt: skip
def test_the_kernels_in_use_and_how_they_are_tested(monkeypatch, used, runnable, compiled, wanted):
    monkeypatch.setattr(isa, "compiled", lambda: compiled)
    machine = dataclasses.replace(hardware.probe(), isa=used, tiers=runnable)
    assert doctor._kernels(machine) == wanted


def test_every_tier_says_how_it_is_tested():
    assert set(isa.TESTED) == set(isa.TIERS)
