"""A user's profile directory of its own for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicpig_cli import profiles


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path) -> Path:
    """The user's folder of profiles, not there yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return profiles.user_folder()
