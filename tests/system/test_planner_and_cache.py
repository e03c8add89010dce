"""The planner's byte counts against what a cache really holds."""

from __future__ import annotations

import pytest
import torch

from magicpig_cli import hardware
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.model.shape import shape_from_config
from magicpig_cli.planner import plan
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_bytes_of_a_sequence(family):
    model = tiny_model(family)
    shape = shape_from_config(model.config)
    chosen = plan(hardware.probe(), shape, Settings(attention=AttentionOptions(mode="lsh", K=5, L=12), threads=1))
    runner = ModelRunner(model, shape, chosen, torch.device("cpu"), hash_seed=0)
    sequence = runner.new_sequence()
    list(runner.prefill(sequence, torch.arange(1200).remainder(250).tolist()))
    runner.build_index(sequence)
    assert sequence.kv_bytes == chosen.kv_bytes(1200)
    assert sequence.index_bytes == chosen.index_bytes(1200)
