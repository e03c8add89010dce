"""A saved sequence goes on as the one it was taken of; files that do not fit, or are damaged, say so in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from magicpig_cli import kernels
from magicpig_cli.cache.saved import SavedCache
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cache.signatures import joined
from magicpig_cli.cache.snapshot import file_bytes, require_space, snapshot
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.errors import MagicpigError
from tests.tiny import tiny_config

MODES = [("exact", "float32"), ("lsh", "float32"), ("lsh", "bfloat16"), ("lsh", "int8"),
         ("rabitq", "float32"), ("rabitq", "int8")]  # fmt: skip


@pytest.fixture
def load(tmp_path: Path):
    """`load(mode, kv_dtype, family="llama", **attention)`: an engine with tiny random weights."""

    def made(mode: str, kv_dtype: str = "float32", family: str = "llama", config=None, **attention) -> Engine:
        tiny_config(family, eos_token_id=None, **(config or {})).save_pretrained(tmp_path)
        options = AttentionOptions(mode=mode, kv_dtype=kv_dtype, **attention)
        model = ModelOptions(str(tmp_path / "config.json"), device="cpu", dtype="float32", load_format="dummy")
        return Engine.load(Settings(model, options, threads=1))

    return made


def ids_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, count).tolist()


def read(engine: Engine, ids: list[int], steps: int = 0) -> Sequence:
    """A sequence that has read ids, and decoded further ones."""
    sequence = engine.new_sequence()
    for _ in engine.runner.prefill(sequence, ids):
        pass
    for token in ids_of(steps, seed=1):
        engine.runner.decode([sequence], [token])
    return sequence


def logits_of(engine: Engine, sequence: Sequence, steps: int = 40) -> torch.Tensor:
    """Of further decode steps and, at the end, of a prompt: [steps + 1, V]."""
    rows = [engine.runner.decode([sequence], [token]).logits[0] for token in ids_of(steps, seed=2)]
    *_, (_, last) = engine.runner.prefill(sequence, ids_of(20, seed=3))
    return torch.stack([*rows, last])


def same(a: Sequence, b: Sequence) -> None:
    assert a.ids == b.ids
    for mine, other in zip(a.layers, b.layers, strict=True):
        assert (mine.length, mine.store.length, mine.window.used) == (
            other.length,
            other.store.length,
            other.window.used,
        )
        assert torch.equal(mine.window.valid, other.window.valid)
        for x, y in zip(
            mine.store.stored(0, mine.store.length), other.store.stored(0, other.store.length), strict=True
        ):
            assert np.array_equal(x, y)
        assert (mine.index is None) == (other.index is None)
        if mine.index is not None and other.index is not None:
            _SAME[mine.index.sampler](mine.index, other.index)


def same_tables(mine, other) -> None:
    assert np.array_equal(mine.mean, other.mean)
    assert mine.built == other.built
    assert [(s.start, s.n) for s in mine.segments] == [(s.start, s.n) for s in other.segments]
    for x, y in zip(mine.segments, other.segments, strict=True):
        assert np.array_equal(x.offsets, y.offsets)
        assert np.array_equal(x.ids, y.ids)
    tails = [index.sampled_rows().tail for index in (mine, other)]
    assert (tails[0] is None) == (tails[1] is None)
    if tails[0] is not None:
        assert tails[0].n == tails[1].n
        assert np.array_equal(tails[0].codes[:, :, : tails[0].n], tails[1].codes[:, :, : tails[1].n])


def same_signatures(mine, other) -> None:
    assert mine.length == other.length
    if mine.length:
        x, y = joined(mine.parts), joined(other.parts)
        assert all(np.array_equal(getattr(x, part), getattr(y, part)) for part in ("codes", "factors", "means"))


_SAME = {"lsh": same_tables, "rabitq": same_signatures}


@pytest.mark.parametrize(("mode", "kv_dtype"), MODES)
@pytest.mark.parametrize("tokens", [1, 3, 70, 1800])
def test_goes_on_as_the_one_it_was_taken_of(load, tmp_path, mode, kv_dtype, tokens):
    engine = load(mode, kv_dtype)
    sequence = read(engine, ids_of(tokens), steps=5)
    taken = snapshot(sequence, sequence.length)
    size = engine.save(taken, tmp_path / "a.cache")
    assert size == (tmp_path / "a.cache").stat().st_size == file_bytes(taken, engine.identity, engine.sampler)
    restored, why = engine.restore(SavedCache(tmp_path / "a.cache"), [*sequence.ids, 7])
    assert why is None
    same(restored, sequence)
    assert torch.equal(logits_of(engine, restored), logits_of(engine, sequence))


@pytest.mark.parametrize(("mode", "kv_dtype"), MODES)
@pytest.mark.parametrize("kept", [0, 66, 300, 1500, 1799])
def test_a_prefix_of_a_file_equals_a_cut_sequence(load, tmp_path, mode, kv_dtype, kept):
    """What was saved is longer than what the next prompt shares with it."""
    engine = load(mode, kv_dtype)
    sequence = read(engine, ids_of(1800))
    engine.save(snapshot(sequence, sequence.length), tmp_path / "a.cache")
    prompt = [*sequence.ids[:kept], 300, 301]
    restored, _ = engine.restore(SavedCache(tmp_path / "a.cache"), prompt)
    sequence.truncate(kept)
    same(restored, sequence)
    assert torch.equal(logits_of(engine, restored), logits_of(engine, sequence))


@pytest.mark.parametrize(("mode", "kv_dtype"), MODES)
def test_the_first_tokens_of_a_sequence_that_went_on(load, tmp_path, mode, kv_dtype):
    """A snapshot is of then, whatever the sequence does until it is written: it grows, and its tail moves."""
    engine = load(mode, kv_dtype)
    sequence = read(engine, ids_of(1800))
    taken = snapshot(sequence, 1500)
    for token in ids_of(300, seed=4):
        engine.runner.decode([sequence], [token])
    engine.save(taken, tmp_path / "a.cache")
    restored, _ = engine.restore(SavedCache(tmp_path / "a.cache"), [*sequence.ids[:1500], 9])
    other = read(engine, ids_of(1800))
    other.truncate(1500)
    same(restored, other)


def test_with_other_sink_and_local_the_same_rows_lie_elsewhere(load, tmp_path):
    sequence = read(engine := load("exact"), ids_of(1000))
    engine.save(snapshot(sequence, 1000), tmp_path / "a.cache")
    for options in ({"sink": 16}, {"sink": 0}, {"local": 512}, {"local": 1, "sink": 7}):
        other = load("exact", **options)
        restored, _ = other.restore(SavedCache(tmp_path / "a.cache"), [*sequence.ids, 1])
        same(restored, read(other, ids_of(1000)))


def test_a_file_is_plain_safetensors(load, tmp_path):
    engine = load("lsh", "bfloat16")
    sequence = read(engine, ids_of(1800))
    engine.save(snapshot(sequence, 1800), tmp_path / "a.cache")
    with safe_open(tmp_path / "a.cache", "pt") as file:
        assert file.get_tensor("ids").tolist() == sequence.ids
        rows = file.get_tensor("rows.1.stored")
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows, sequence.layers[1].store.read(0, sequence.layers[1].store.length))
        assert json.loads(file.metadata()["identity"])["config"]["num_hidden_layers"] == 3


def test_what_differs_is_refused_or_made_anew(load, tmp_path):
    engine = load("lsh")
    sequence = read(engine, ids_of(1800))
    engine.save(snapshot(sequence, 1800), tmp_path / "a.cache")
    prompt = [*sequence.ids, 1]

    def restore(other: Engine):
        return other.restore(SavedCache(tmp_path / "a.cache"), prompt)

    for option, words in (
        ({"K": 8}, "K 8 here, 10 in the file"), ({"L": 75}, "L 75 here, 150 in the file"),
        ({"hash_seed": 3}, "hash seed 3 here, 0 in the file"), ({"sink": 8}, "sink 8 here, 4 in the file"),
    ):  # fmt: skip
        other = load("lsh", **option)
        restored, why = restore(other)
        assert why == words
        assert all(layer.index is None for layer in restored.layers)
        for _ in other.runner.prefill(restored, [1]):
            pass
        assert restored.layers[1].index is not None
        assert restored.layers[1].index.length == restored.layers[1].store.length
    _, why = restore(load("exact"))
    assert why is None

    for make, words in (
        (lambda: load("lsh", "bfloat16"), r"number type of K/V bfloat16 here, float32 in the file"),
        (lambda: load("lsh", family="qwen2"), r"model .*weights [0-9a-f]+\) here, .* in the file"),
        (lambda: load("lsh", config={"rms_norm_eps": 1e-3}), r"rms_norm_eps 0.001 here, 1e-06 in the file"),
        (lambda: load("lsh", config={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}), "rope_theta"),
    ):
        with pytest.raises(MagicpigError, match=words) as caught:
            restore(make())
        assert caught.value.hint


def test_another_sampler_only_makes_the_index_anew(load, tmp_path):
    sequence = read(engine := load("rabitq"), ids_of(1800))
    engine.save(snapshot(sequence, 1800), tmp_path / "a.cache")
    prompt = [*sequence.ids, 1]

    def restore(other: Engine) -> tuple[Sequence, str | None]:
        return other.restore(SavedCache(tmp_path / "a.cache"), prompt)

    for other, words in (
        (load("lsh"), "sampler lsh here, rabitq in the file"),
        (load("rabitq", bits=64), "bits 64 here, 128 in the file"),
        (load("rabitq", hash_seed=3), "hash seed 3 here, 0 in the file"),
        (load("rabitq", sink=8), "sink 8 here, 4 in the file"),
    ):
        restored, why = restore(other)
        assert why == words
        assert all(layer.index is None for layer in restored.layers)
        list(other.runner.prefill(restored, [1]))
        assert restored.layers[1].index.sampler == other.plan.sampler
    for options in ({"budget": 0.5}, {"tail": 0.0}, {"target_error": 0.1}):  # of reading, not of the index
        restored, why = restore(load("rabitq", **options))
        assert why is None
        same(restored, sequence)
    read_as_tables = read(engine := load("lsh"), ids_of(1800))
    engine.save(snapshot(read_as_tables, 1800), tmp_path / "a.cache")
    assert restore(load("rabitq"))[1] == "sampler rabitq here, lsh in the file"


def test_without_an_index_it_is_built_by_the_next_prompt(load, tmp_path):
    engine = load("lsh")
    sequence = read(engine, ids_of(1800))
    small = engine.save(snapshot(sequence, 1800, index=False), tmp_path / "b.cache")
    assert small < engine.save(snapshot(sequence, 1800), tmp_path / "a.cache")
    restored, why = engine.restore(SavedCache(tmp_path / "b.cache"), [*sequence.ids, 1])
    assert why == "the file has no index"
    assert restored.layers[1].index is None


def test_damaged_and_foreign_files_say_what_is_wrong(load, tmp_path):
    engine = load("lsh")
    sequence = read(engine, ids_of(1800))
    path = tmp_path / "a.cache"
    engine.save(snapshot(sequence, 1800), path)
    whole = path.read_bytes()
    prompt = [*sequence.ids, 1]

    def refused(content: bytes, words: str) -> None:
        path.write_bytes(content)
        with pytest.raises(MagicpigError, match=words):
            engine.restore(SavedCache(path), prompt)

    begin = 8 + int.from_bytes(whole[:8], "little")
    refused(b"", "not a cache")
    refused(b"PK\x03\x04" * 100, "not a cache")
    refused(b"\0" * 4096, "not a cache")
    refused(whole[:begin][: begin // 2], "not a cache")
    refused(whole[:-1], "should have")
    refused(whole[: len(whole) // 2], "should have")
    refused(whole + b"x", "should have")
    refused(
        whole.replace(b'"version":"2"', b'"version":"3"', 1), "newer version of magicpig: format 3, this one reads 2"
    )
    refused(whole.replace(b'"format":"magicpig-cache"', b'"format":"something-else"', 1), "not a cache")
    refused(whole.replace(b'"sink":"4"', b'"sink":"5"', 1), "header does not match its checksum")
    for place in np.linspace(begin + 4 * 20, len(whole) - 1, 40).astype(int):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        refused(bytes(flipped), "do not match their checksum")
    with pytest.raises(MagicpigError, match="cannot read"):
        SavedCache(tmp_path / "nowhere")
    with pytest.raises(MagicpigError, match="cannot read"):
        SavedCache(tmp_path)


def test_a_file_that_does_not_fit_the_disk_is_refused_with_both_numbers(load, tmp_path):
    with pytest.raises(MagicpigError, match=r"would take 8\.0 EiB|would take .* TiB, and .* are free"):
        require_space(tmp_path / "a", 1 << 60)


def test_what_interrupts_the_writing_leaves_the_old_file(load, tmp_path):
    engine = load("lsh")
    sequence = read(engine, ids_of(1800))
    (tmp_path / "a.cache").write_bytes(b"old")

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.save(snapshot(sequence, 1800), tmp_path / "a.cache", go_on=stop)
    assert (tmp_path / "a.cache").read_bytes() == b"old"
    assert not list(tmp_path.glob(".magicpig*"))


def test_an_index_grown_over_turns_equals_one_built_at_once(load):
    """From the same rows with the same mean: the same keys are sampled."""
    engine = load("lsh")
    sequence = read(engine, ids_of(900))
    for turn in range(6):
        for _ in engine.runner.prefill(sequence, ids_of(40, seed=10 + turn)):
            pass
        for token in ids_of(60, seed=20 + turn):
            engine.runner.decode([sequence], [token])
    engine.runner.build_index(sequence)
    for layer, cache in enumerate(sequence.layers):
        if cache.index is None:
            continue
        grown = cache.index
        hasher = engine.runner._attention()._sampler.hasher(layer, cache.spec.head_dim)
        at_once = type(grown)(hasher, cache.store, 1, mean=grown.mean)
        at_once.extend()
        assert grown.length == at_once.length == cache.store.length
        queries = np.random.default_rng(0).integers(0, 1 << 10, size=(1, 4, 150)).astype(np.uint16)
        mine, other = (kernels.lsh_sample(queries, [index.sampled_rows()])[0] for index in (grown, at_once))
        assert sum(len(rows) for rows in mine) > 0
        assert all(np.array_equal(a, b) for a, b in zip(mine, other, strict=True))
