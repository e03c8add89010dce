"""Fixtures for tests of loading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from magicpig_cli.model import source


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Where converted models are kept."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(source, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def file(tmp_path) -> Path:
    """Where a GGUF file is to be."""
    return tmp_path / "tiny.gguf"


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], list[str]]]:
    """What has been printed, and logged by the libraries, since the test began.

    Their loggers write to the stderr of the time of import, which capfd does not see.
    """
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    handler = Handler()
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "torch")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lambda: [*records, *(text for text in capfd.readouterr() if text)]
    for logger in loggers:
        logger.removeHandler(handler)
