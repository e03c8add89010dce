"""A tiny random model that has read a text: real queries, keys and values in a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.corpus import natural_text
from magicpig_cli.engine.engine import Engine
from magicpig_cli.tuning.capture import Capture, capture
from magicpig_cli.tuning.text import split_text
from tests.tiny import tiny_config

CONTEXT = 1024


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory) -> Callable[..., Engine]:
    """`make_engine("llama", kv_dtype=…)`: exact attention over random weights, one token per byte."""

    def make(family: str = "llama", context: int = CONTEXT, **attention: Any) -> Engine:
        folder = tmp_path_factory.mktemp(family)
        tiny_config(family, eos_token_id=None, max_position_embeddings=4096).save_pretrained(folder)
        model = ModelOptions(str(folder / "config.json"), device="cpu", dtype="float32", load_format="dummy")
        return Engine.load(Settings(model, AttentionOptions(mode="exact", **attention), context=context, threads=1))

    return make


@pytest.fixture(scope="session")
def engine(make_engine) -> Engine:
    return make_engine(kv_dtype="float32")


def outcome(generator) -> Any:
    """What a generator returns."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


@pytest.fixture(scope="session")
def captured(engine) -> Capture:
    """Four depths of four steps."""
    texts = split_text(engine.codec, natural_text(), "topics", CONTEXT)
    return outcome(capture(engine, texts.tuning, steps=4))
