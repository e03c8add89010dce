"""A tiny random model, one token per byte, and everything that an evaluation of it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.corpus import natural_text
from magicpig_cli.engine.engine import Engine
from magicpig_cli.evals.modes import Mode, modes
from magicpig_cli.evals.run import Evaluation, Request
from magicpig_cli.evals.texts import Text
from magicpig_cli.evals.units import Kept, open_kept
from magicpig_cli.planning import plan_here
from tests.tiny import tiny_config

CONTEXT = 1024


@pytest.fixture(scope="session")
def make_engine(tmp_path_factory) -> Callable[..., Engine]:
    """`make_engine("gemma2")`: random weights in float32, exact attention."""

    def make(family: str = "llama", **attention: Any) -> Engine:
        folder = tmp_path_factory.mktemp(family)
        tiny_config(family, eos_token_id=None, max_position_embeddings=8192).save_pretrained(folder)
        model = ModelOptions(str(folder / "config.json"), device="cpu", dtype="float32", load_format="dummy")
        options = AttentionOptions(**{"mode": "exact", "K": 5, "L": 40, "kv_dtype": "float32", **attention})
        return Engine.load(Settings(model, options, context=4096, threads=1))

    return make


@pytest.fixture(scope="session")
def engine(make_engine) -> Engine:
    return make_engine()


@pytest.fixture(scope="session")
def topics() -> Text:
    return Text("topics", natural_text()[:60_000])


@pytest.fixture
def kept(tmp_path) -> Iterator[Kept]:
    with open_kept(tmp_path / "units.jsonl") as found:
        yield found


def request(engine: Engine, text: Text, names: str = "lsh", budgets: tuple[float, ...] = (0.05,), **changes) -> Request:
    """Short work of a few modes."""
    chosen = tuple(modes(names.split(","), list(budgets)))
    lsh = replace(engine.settings, attention=replace(engine.settings.attention, mode="lsh"))
    plans = {Mode("lsh"): plan_here(engine.shape, lsh)}
    known: dict[str, Any] = {
        "tasks": ("kl",), "texts": (text,), "contexts": (CONTEXT,), "modes": chosen, "plans": plans, "samples": 1,
        "positions": 20,
    }  # fmt: skip
    return Request(**{**known, **changes})


def evaluated(engine: Engine, wanted: Request, kept: Kept) -> Evaluation:
    """An evaluation that has run to its end."""
    evaluation = Evaluation(engine, wanted, kept)
    for _ in evaluation.run():
        pass
    return evaluation
