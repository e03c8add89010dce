"""What int8 rows cost on real tensors of the demo model: attention on them beside attention on bfloat16 rows."""

from __future__ import annotations

import pytest

from magicpig_cli.bench.capture import capture
from magicpig_cli.bench.row_types import int8_errors
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from tests.tolerances import INT8_OUTPUT

TOKENS, STEPS = 6144, 8


@pytest.fixture(scope="module")
def engine(demo_available) -> Engine:
    return Engine.load(Settings(ModelOptions("demo"), AttentionOptions(mode="exact", kv_dtype="bfloat16")))


@pytest.mark.slow
def test_error_against_bfloat16_rows(engine, record_property):
    """RMS over all layers, heads and steps of each kind, and over heads and steps of the worst layer."""
    layers = capture(engine, TOKENS, range(engine.shape.layers), STEPS)
    errors = int8_errors(layers, engine.threads)
    for kind, error in errors.items():
        print(f"int8 rows, {kind}: {error:.3%}")
        record_property(f"int8_{kind}", error)
        assert 0 < error <= INT8_OUTPUT
