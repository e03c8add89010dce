"""An engine with tiny random weights and one token per byte: everything of the real one but the size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from tests.tiny import tiny_config


@pytest.fixture
def tiny_engine(tmp_path: Path) -> Callable[..., Engine]:
    """`tiny_engine(mode="exact", context=None, family="llama", **attention)`."""

    def load(mode: str = "exact", context: int | None = None, family: str = "llama", **attention) -> Engine:
        tiny_config(family, eos_token_id=None).save_pretrained(tmp_path)
        options = AttentionOptions(mode=mode, **{"kv_dtype": "float32", **attention})
        model = ModelOptions(str(tmp_path / "config.json"), device="cpu", dtype="float32", load_format="dummy")
        return Engine.load(Settings(model, options, context=context, threads=1))

    return load
