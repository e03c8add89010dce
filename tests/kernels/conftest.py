"""Every test that takes `isa` runs once per instruction set that this CPU can run, and once on the reference."""

from __future__ import annotations

import pytest

from magicpig_cli.kernels import isa as tiers


@pytest.fixture(params=(*tiers.runnable(), "reference"))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tiers, "_backend", tiers.load(request.param))
    return str(request.param)


@pytest.fixture(params=tiers.runnable())
def native_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(tiers, "_backend", tiers.load(request.param))
    return str(request.param)
