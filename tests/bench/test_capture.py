"""Captured tensors are what the model attends with: attention recomputed from them, files, captures side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.bench.capture import capture, load, save, side_by_side
from magicpig_cli.bench.fill import fill_ids
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine

LENGTH, STEPS, LAYERS = 160, 3, (1, 29)


@pytest.fixture(scope="module")
def engine(demo_available) -> Engine:
    return Engine.load(Settings(ModelOptions("demo", dtype="float32", quantize="none"), AttentionOptions(mode="exact")))


@pytest.fixture(scope="module")
def captured(engine):
    return capture(engine, LENGTH, LAYERS, STEPS)


def test_shapes(captured):
    assert [part.layer for part in captured] == list(LAYERS)
    for part in captured:
        assert (part.q.shape, part.q.dtype) == ((STEPS, 9, 64), torch.float32)
        assert (part.rows.shape, part.rows.dtype) == ((3, LENGTH - STEPS, 2, 64), torch.bfloat16)
        assert part.scale == 64**-0.5


def test_rows_are_those_of_the_prefilled_text(engine, captured):
    """Another sequence over the same tokens holds the same rows, also when the text begins later."""
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, fill_ids(engine, LENGTH - STEPS)))
    for part in captured:
        assert torch.equal(part.rows, sequence.layers[part.layer].copy_rows())
    (later,) = capture(engine, LENGTH, LAYERS[:1], STEPS, offset=50)
    assert not torch.equal(later.rows, captured[0].rows)


def test_queries_are_those_of_the_engines_own_steps(engine, captured, monkeypatch):
    ids = fill_ids(engine, LENGTH)
    sequence = engine.new_sequence()
    list(engine.runner.prefill(sequence, ids[:-STEPS]))
    seen: dict[int, list[torch.Tensor]] = {}
    step = Attention.step_here

    def spy(self, layer, caches, sampled, q, *rest):
        seen.setdefault(layer, []).append(torch.tensor(q))
        return step(self, layer, caches, sampled, q, *rest)

    monkeypatch.setattr(Attention, "step_here", spy)
    for token in ids[-STEPS:]:
        engine.runner.decode([sequence], [token])
    for part in captured:
        assert torch.equal(part.q, torch.cat(seen[part.layer]))


def test_files_keep_everything(captured, tmp_path):
    save(
        tmp_path / "captures.safetensors",
        [captured, [replace(captured[0], q=captured[0].q.clone(), rows=captured[0].rows.clone())]],
    )
    first, second = load(tmp_path / "captures.safetensors")
    assert [part.layer for part in first] == list(LAYERS)
    assert len(second) == 1
    for part, kept in zip([*captured, captured[0]], [*first, *second], strict=True):
        assert torch.equal(part.q, kept.q)
        assert torch.equal(part.rows, kept.rows)
        assert (part.scale, part.layer) == (kept.scale, kept.layer)


def test_side_by_side(captured):
    longer = side_by_side([captured, captured])
    for part, long in zip(captured, longer, strict=True):
        assert long.n == 2 * part.n
        assert long.steps == 2 * STEPS
        assert torch.equal(long.rows[:, part.n :], part.rows)
        assert torch.equal(long.q[STEPS:], part.q)
