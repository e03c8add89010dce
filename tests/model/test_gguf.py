"""GGUF files are converted once, whole or not at all."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import ModelError
from magicpig_cli.events import LoadProgress
from magicpig_cli.model import gguf, loader
from tests.model import tiny_gguf


def load(path: Path, events: list[LoadProgress] | None = None, **options) -> loader.Loaded:
    report = events.append if events is not None else None
    return loader.load_model(ModelOptions(str(path), **options), torch.device("cpu"), report)


def converted(cache: Path) -> list[Path]:
    return list(cache.glob("gguf/*"))


def test_first_load_converts_and_later_ones_do_not_read_the_file(cache, file, said, monkeypatch):
    tensors = tiny_gguf.write(file)
    events: list[LoadProgress] = []
    first = load(file, events)
    assert said() == []
    assert {event.stage for event in events} > {"converting the GGUF file, once", "loading weights"}
    down = first.model.model.layers[1].mlp.down_proj.weight.numpy()
    assert np.array_equal(down, tensors["blk.1.ffn_down.weight"].astype(np.float32))
    assert first.model.lm_head.weight is first.model.model.embed_tokens.weight
    assert (first.name, first.generation_config.eos_token_id) == ("tiny", 2)
    assert first.tokenizer.chat_template == tiny_gguf.TEMPLATE
    assert first.tokenizer("ab")["input_ids"] == [tiny_gguf.VOCAB - 1]
    assert (first.tokenizer.bos_token_id, first.tokenizer.eos_token_id) == (1, 2)

    monkeypatch.setattr(gguf, "readable", None)
    second = load(file)
    assert second.revision == first.revision
    assert torch.equal(second.model.lm_head.weight, first.model.lm_head.weight)


def test_config_and_tokenizer_alone_do_not_convert(cache, file):
    tiny_gguf.write(file)
    options = ModelOptions(str(file))
    assert loader.load_config(options).num_hidden_layers == tiny_gguf.LAYERS
    assert loader.load_tokenizer(options)("ab")["input_ids"] == [tiny_gguf.VOCAB - 1]
    assert not cache.exists()
    load(file)
    assert loader.load_config(options).num_hidden_layers == tiny_gguf.LAYERS
    assert loader.load_tokenizer(options)("ab")["input_ids"] == [tiny_gguf.VOCAB - 1]


def test_changed_file_is_converted_again(cache, file):
    tiny_gguf.write(file, seed=0)
    first = load(file)
    tensors = tiny_gguf.write(file, seed=1)
    second = load(file)
    assert first.revision != second.revision
    assert np.array_equal(second.model.lm_head.weight.numpy(), tensors["token_embd.weight"].astype(np.float32))


def test_another_process_may_be_faster(cache, file, monkeypatch):
    tiny_gguf.write(file)
    write = gguf._write

    target = cache / "gguf" / f"tiny-{gguf.fingerprint(file)}"

    def race(path, config, folder, report):
        target.mkdir()
        write(path, config, target, report)
        write(path, config, folder, report)

    monkeypatch.setattr(gguf, "_write", race)
    assert load(file).params > 0
    assert converted(cache) == [target]


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failed_conversion_leaves_nothing_behind(problem, cache, file, monkeypatch):
    tiny_gguf.write(file)

    def fail(state, folder):
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.save_torch_state_dict", fail)
        with pytest.raises((ModelError, KeyboardInterrupt)) as caught:
            load(file)
    if isinstance(caught.value, ModelError):
        assert "No space left on device" in caught.value.message
    assert converted(cache) == []
    assert load(file).params > 0


def test_what_a_killed_process_left_is_removed_after_a_day(cache, file):
    tiny_gguf.write(file)
    old, recent = cache / "gguf" / "a.tmp", cache / "gguf" / "b.tmp"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    load(file)
    assert not old.exists()
    assert recent.exists()


def test_full_disk_is_noticed_before_converting(cache, file, monkeypatch):
    tiny_gguf.write(file)
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
    with pytest.raises(ModelError, match=r"converting needs .* KiB .* and 1000 B are free"):
        load(file)
    assert converted(cache) == []


def test_missing_packages_are_named(file, cache, monkeypatch):
    tiny_gguf.write(file)
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(ModelError, match="needs the package accelerate") as caught:
        load(file)
    assert caught.value.hint == "pip install 'magicpig-cli[gguf]'"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-LFS pointer"),
        (b"GGUF\x03\x00\x00\x00", "cannot read"),
    ],
)
def test_files_that_are_not_whole(content, message, cache, file):
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load(file)
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_a_part_of_a_split_file_is_named(cache, tmp_path):
    second = tmp_path / "big-00002-of-00003.gguf"
    tiny_gguf.write(second)
    with pytest.raises(ModelError, match="is part 2 of 3 of a GGUF file") as caught:
        load(second)
    first, whole = tmp_path / "big-00001-of-00003.gguf", tmp_path / "big.gguf"
    assert caught.value.hint == f"llama-gguf-split --merge {first} {whole}"
    alone = second.rename(tmp_path / "small-00001-of-00001.gguf")
    assert load(alone).params > 0


def test_a_head_of_its_own(cache, file):
    tensors = tiny_gguf.write(file, tied=False)
    model = load(file).model
    assert not model.config.tie_word_embeddings
    assert np.array_equal(model.lm_head.weight.numpy(), tensors["output.weight"].astype(np.float32))
    assert np.array_equal(model.model.embed_tokens.weight.numpy(), tensors["token_embd.weight"].astype(np.float32))


def test_a_gguf_file_needs_no_network(cache, file, monkeypatch):
    tiny_gguf.write(file)
    monkeypatch.setattr("socket.socket.connect", None)
    assert load(file, offline=True).params > 0


def test_truncated_file(cache, file):
    tiny_gguf.write(file)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="cannot read"):
        load(file)
    assert converted(cache) == []
