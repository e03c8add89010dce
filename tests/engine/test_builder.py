"""Indexes built by a worker beside the last chunk of a prompt, as on a GPU: same index, and nothing left half done."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.builder import IndexBuilder
from magicpig_cli.engine.runner import ModelRunner

IDS = [(7 * i) % 250 for i in range(1500)]


@pytest.fixture
def runner(tiny_engine) -> ModelRunner:
    made: ModelRunner = tiny_engine(mode="lsh", K=5, L=12, dense_layers=()).runner
    made.builds_beside_forward = True
    return made


def read(runner: ModelRunner, sequence: Sequence, ids: list[int] = IDS) -> np.ndarray:
    return list(runner.prefill(sequence, ids))[-1][1].numpy()


def assert_same(a: Sequence, b: Sequence) -> None:
    assert a.ids == b.ids
    for one, other in zip(a.layers, b.layers, strict=True):
        assert one.index is not None
        assert other.index is not None
        assert one.index.length == other.index.length == one.store.length
        assert np.array_equal(one.index.mean, other.index.mean)
        for segment, twin in zip(one.index.segments, other.index.segments, strict=True):
            assert np.array_equal(segment.ids, twin.ids)
            assert np.array_equal(segment.offsets, twin.offsets)


def test_same_index_as_built_afterwards(runner, monkeypatch):
    threads = []
    build = ModelRunner._build_layer

    def spy(self, mode, layer, cache):
        if cache.index is None:  # otherwise it only looks whether something is missing
            threads.append(threading.current_thread() is threading.main_thread())
        build(self, mode, layer, cache)

    monkeypatch.setattr(ModelRunner, "_build_layer", spy)
    beside, after = runner.new_sequence(), runner.new_sequence()
    read(runner, beside)
    assert threads == [False] * len(beside.layers)
    runner.builds_beside_forward = False
    read(runner, after)
    assert threads == [False] * len(beside.layers) + [True] * len(beside.layers)
    assert_same(beside, after)


@pytest.mark.parametrize("where", ["build", "forward"])
def test_a_failure_leaves_the_sequence_as_it_was(runner, monkeypatch, where):
    sequence, untouched = runner.new_sequence(), runner.new_sequence()
    read(runner, sequence, IDS[:400])
    read(runner, untouched, IDS[:400])
    with monkeypatch.context() as broken:
        if where == "build":
            broken.setattr(ModelRunner, "_build_layer", fail)
        else:
            last = runner.model.model.layers[-1]
            broken.setattr(last, "forward", fail)
        with pytest.raises(KeyboardInterrupt):
            read(runner, sequence, IDS[400:600])
    assert sequence.ids == IDS[:400]
    assert all(layer.length == 400 for layer in sequence.layers)
    assert all(layer.index.length <= layer.store.length for layer in sequence.layers if layer.index)
    assert np.array_equal(read(runner, sequence, IDS[400:]), read(runner, untouched, IDS[400:]))
    assert_same(sequence, untouched)


def fail(*_args, **_kwargs):
    raise KeyboardInterrupt


def test_after_a_failure_no_layer_is_begun_any_more():
    begun, hold = [], threading.Event()

    def build(layer, cache):
        begun.append(layer)
        hold.wait(10)

    def failing_forward():
        with IndexBuilder(build) as builder:
            for layer in range(5):
                builder.add(layer, None)
            threading.Timer(0.05, hold.set).start()
            raise RuntimeError("forward")

    with pytest.raises(RuntimeError, match="forward"):
        failing_forward()
    assert begun in ([], [0])
