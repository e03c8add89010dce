"""Forked sequences: bit for bit what a sequence computes that read the same tokens itself, and memory held once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.kernels.memory import touch

CHUNK, BLOCK_ROWS = 128, 64
PREFIX, STEPS = 1344, 70  # 1,276 offloaded keys: a segment where they are sampled; steps that move rows to the store
WAYS = [(mode, rows) for mode in ("exact", "lsh", "rabitq") for rows in ("float32", "bfloat16", "int8")]


def text(seed: int, count: int) -> list[int]:
    return [3 + (i * 7 + seed * 31 + i * i) % 250 for i in range(count)]


@dataclass
class Forking:
    """An engine whose blocks and chunks are small, so that little text fills many of them."""

    engine: Engine

    @property
    def runner(self) -> ModelRunner:
        return self.engine.runner

    def read(self, ids: list[int], sequence: Sequence | None = None) -> tuple[Sequence, list[torch.Tensor]]:
        """The sequence after ids, and logits [V] after each chunk of them."""
        sequence = self.runner.new_sequence() if sequence is None else sequence
        return sequence, [logits for _, logits in self.runner.prefill(sequence, ids)]

    def answer(self, sequence: Sequence, ids: list[int], steps: int = STEPS) -> list[torch.Tensor]:
        """All that reading ids and a greedy answer gives: logits of every chunk and step, and what was sampled."""
        return self.answers([sequence], [ids], steps)[0]

    def answers(
        self, sequences: list[Sequence], prompts: list[list[int]], steps: int = STEPS
    ) -> list[list[torch.Tensor]]:
        """The same of several, decoded together."""
        results = [self.read(ids, sequence)[1] for sequence, ids in zip(sequences, prompts, strict=True)]
        for _ in range(steps):
            step = self.runner.decode(sequences, [int(result[-1].argmax()) for result in results])
            for b, result in enumerate(results):
                result += [torch.tensor([step.sampled[b], step.offloaded[b]]), step.logits[b]]
        return results


@pytest.fixture
def forking(tiny_engine) -> Callable[..., Forking]:
    def load(mode: str, kv_dtype: str = "float32", family: str = "llama", **attention) -> Forking:
        engine = tiny_engine(mode, family=family, K=5, L=30, kv_dtype=kv_dtype, **attention)
        engine.plan = replace(engine.plan, chunk=CHUNK, block_rows=BLOCK_ROWS)
        engine.runner = ModelRunner(engine.runner.model, engine.shape, engine.plan, torch.device("cpu"), hash_seed=0)
        return Forking(engine)

    return load


def assert_same(results: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(results) == len(wanted)
    assert all(torch.equal(result, other) for result, other in zip(results, wanted, strict=True))


@pytest.mark.parametrize(("mode", "kv_dtype"), WAYS)
@pytest.mark.parametrize("question", [30, 150, 400], ids=["short", "chunks", "new mean"])
def test_a_fork_computes_what_a_sequence_of_its_own_computes(forking, mode, kv_dtype, question):
    made = forking(mode, kv_dtype)
    prefix, _ = made.read(text(0, PREFIX))
    own, _ = made.read(text(0, PREFIX))
    wanted = made.answer(own, text(1, question))
    for _ in range(2):
        fork = made.engine.fork(prefix)
        assert fork.ids == prefix.ids
        assert_same(made.answer(fork, text(1, question)), wanted)
        assert fork.ids == own.ids
        assert (fork.kv_bytes, fork.index_bytes) == (own.kv_bytes, own.index_bytes)
    assert prefix.length == PREFIX


@pytest.mark.parametrize("family", ["gemma2", "mistral", "qwen2"])
def test_every_family_can_be_forked(forking, family):
    """Some with layers that attend to a window of their own."""
    made = forking("lsh", family=family)
    own, _ = made.read(text(0, 700))
    prefix, _ = made.read(text(0, 700))
    assert_same(made.answer(made.engine.fork(prefix), text(1, 90)), made.answer(own, text(1, 90)))


@pytest.mark.parametrize("mode", ["exact", "lsh"])
def test_forks_decoded_together_with_their_parent_do_not_change_each_other(forking, mode):
    made = forking(mode)
    questions = [text(seed, 20 * seed + 5) for seed in range(4)]
    prefix, _ = made.read(text(0, PREFIX))
    forks = [prefix, *(made.engine.fork(prefix) for _ in questions[1:])]
    alone = [made.read(text(0, PREFIX))[0] for _ in questions]
    for result, wanted in zip(made.answers(forks, questions), made.answers(alone, questions), strict=True):
        assert_same(result, wanted)


@pytest.mark.parametrize(("mode", "kv_dtype"), WAYS)
def test_forks_of_forks_outlive_those_they_come_from(forking, mode, kv_dtype):
    made = forking(mode, kv_dtype)
    own, _ = made.read(text(0, PREFIX))
    made.read(text(1, 128), own)
    wanted = made.answer(own, text(2, 40))
    first, _ = made.read(text(0, PREFIX))
    second = made.engine.fork(first)
    first.release()
    made.read(text(1, 128), second)
    third, fourth = made.engine.fork(second), made.engine.fork(second)
    second.release()
    assert_same(made.answer(third, text(2, 40)), wanted)
    third.release()
    assert_same(made.answer(fourth, text(2, 40)), wanted)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("kept", [3, 1024 + 68, PREFIX - 1])
def test_cut_below_the_fork_it_goes_on_with_other_text(forking, kv_dtype, kept):
    made = forking("exact", kv_dtype)
    prefix, _ = made.read(text(0, PREFIX))
    own, _ = made.read(text(0, PREFIX))
    fork = made.engine.fork(prefix)
    for sequence in (own, fork):
        sequence.truncate(kept)
    assert_same(made.answer(fork, text(1, 300), steps=9), made.answer(own, text(1, 300), steps=9))
    again, _ = made.read(text(0, PREFIX))
    assert_same(
        made.answer(prefix, text(2, 40), 9), made.answer(again, text(2, 40), 9)
    )  # whose blocks were not written to


def test_a_parent_that_is_cut_and_goes_on_leaves_its_forks_alone(forking):
    made = forking("lsh")
    prefix, _ = made.read(text(0, PREFIX))
    wanted = made.answer(made.engine.fork(prefix), text(1, 40))
    fork = made.engine.fork(prefix)
    prefix.truncate(700)
    made.answer(prefix, text(2, 600))
    assert_same(made.answer(fork, text(1, 40)), wanted)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_memory_counts_once_what_is_shared(forking, kv_dtype):
    made = forking("lsh", kv_dtype)
    prefix, _ = made.read(text(0, PREFIX))
    alone = made.engine.memory()
    assert (alone["kv_bytes"], alone["index_bytes"]) == (prefix.kv_bytes, prefix.index_bytes)
    forks = [made.engine.fork(prefix) for _ in range(5)]
    with_forks = made.engine.memory()
    block = made.runner._pool.block_bytes * len(prefix.layers)
    assert prefix.kv_bytes > 15 * block
    assert with_forks["kv_bytes"] <= alone["kv_bytes"] + 5 * 2 * block  # the last block, and the next one
    tails = sum(layer.index.own_bytes for layer in prefix.layers if layer.index is not None)
    assert 0 < tails < prefix.index_bytes
    assert with_forks["index_bytes"] == alone["index_bytes"] + 5 * tails
    for fork in forks:
        assert (fork.kv_bytes, fork.index_bytes) == (prefix.kv_bytes, prefix.index_bytes)
        fork.release()
    touch().result()
    assert made.engine.memory()["kv_bytes"] == alone["kv_bytes"]
    assert made.engine.memory()["index_bytes"] == alone["index_bytes"]


def test_what_is_released_holds_nothing(forking):
    made = forking("lsh")
    prefix, _ = made.read(text(0, PREFIX))
    fork = made.engine.fork(prefix)
    layers = list(prefix.layers)
    prefix.release()
    prefix.release()
    assert prefix.length == prefix.kv_bytes == prefix.index_bytes == prefix.segments == 0
    assert all(layer.index is None and not layer.store.nbytes for layer in layers)
    fork.release()
    assert made.engine.memory()["kv_bytes"] == made.engine.memory()["index_bytes"] == 0


def test_an_interrupted_prefill_of_a_fork_leaves_it_as_it_was(forking, monkeypatch):
    made = forking("lsh")
    prefix, _ = made.read(text(0, PREFIX))
    wanted = made.answer(made.engine.fork(prefix), text(1, 150))
    fork = made.engine.fork(prefix)
    with monkeypatch.context() as broken:
        broken.setattr(made.runner.model.model.layers[1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.read(text(2, 150), fork)
    assert fork.ids == prefix.ids
    assert_same(made.answer(fork, text(1, 150)), wanted)


def interrupt(*_args, **_kwargs):
    raise KeyboardInterrupt
