"""Measuring the machine before a model is loaded is told once, and only where somebody listens."""

from __future__ import annotations

import pytest

from magicpig_cli import speeds
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import MEASURING
from magicpig_cli.speeds import load_or_measure  # before the tests' own takes its place
from magicpig_cli.ui.loading import load_engine
from tests.conftest import STEADY_SPEEDS
from tests.tiny import tiny_config


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Of a tiny model, on a machine of which nothing is known yet."""
    monkeypatch.setattr(speeds, "load_or_measure", load_or_measure)
    monkeypatch.setattr(speeds, "measure", lambda *_: STEADY_SPEEDS)
    monkeypatch.setattr(speeds, "folder", lambda: tmp_path / "speeds")
    monkeypatch.setattr(speeds, "_known", {})
    tiny_config("llama", eos_token_id=None).save_pretrained(tmp_path)
    model = ModelOptions(str(tmp_path / "config.json"), device="cpu", dtype="float32", load_format="dummy")
    return Settings(model, AttentionOptions("exact"), threads=1)


def test_one_line_the_first_time(settings, capsys, monkeypatch):
    load_engine(settings, quiet=False)
    assert capsys.readouterr().err == MEASURING + "\n"
    monkeypatch.setattr(speeds, "_known", {})
    load_engine(settings, quiet=False)
    assert capsys.readouterr().err == ""


def test_quiet(settings, capsys, tmp_path):
    load_engine(settings, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert list((tmp_path / "speeds").glob("*.json"))


def test_told_once_even_if_nothing_can_be_kept(settings, tmp_path):
    (tmp_path / "speeds").write_text("not a folder")
    told: list[str] = []
    Engine.load(settings, lambda event: told.append(event.stage))
    assert told.count(MEASURING) == 1


def test_without_a_listener_nothing_is_measured(settings, tmp_path):
    Engine.load(settings)
    assert not (tmp_path / "speeds").exists()
