"""Models from the Hub, played by a server on this machine: what is fetched, and what is said when it cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import ModelError
from magicpig_cli.events import LoadProgress
from magicpig_cli.model import loader
from tests.model import fake_hub
from tests.tiny import tiny_model

MODEL = "some-lab/tiny-llama"
EXTRA = ("consolidated.safetensors", "pytorch_model.bin", "original/model.safetensors", "README.md", "picture.png")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A published model with its weights in three more forms than needed."""
    folder = tmp_path_factory.mktemp("published")
    tiny_model("llama").save_pretrained(folder)
    loader._byte_tokenizer().save_pretrained(folder)
    (folder / "original").mkdir()
    for name in EXTRA:
        (folder / name).write_bytes(b"nobody needs this")
    return folder


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch) -> Iterator[fake_hub.FakeHub]:
    with fake_hub.running() as running:
        running.models[MODEL] = shutil.copytree(checkpoint, tmp_path / "model")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        use_endpoint(monkeypatch, running.url)
        yield running


def use_endpoint(monkeypatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def load(model: str = MODEL, events: list[LoadProgress] | None = None, **options) -> loader.Loaded:
    report = events.append if events is not None else None
    return loader.load_model(ModelOptions(model, **options), torch.device("cpu"), report)


def refused(model: str = MODEL, **options) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load(model, **options)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_fetches_what_is_needed_and_says_how_far_it_is(hub, said):
    events: list[LoadProgress] = []
    loaded = load(events=events)
    assert (loaded.name, loaded.revision) == (MODEL, fake_hub.COMMIT)
    assert torch.equal(loaded.model.lm_head.weight, tiny_model("llama").lm_head.weight)
    assert set(hub.sent) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
    downloads = [event for event in events if event.stage == "downloading"]
    assert max(event.done for event in downloads) > 400_000
    assert said() == []


def test_offline_afterwards_uses_what_was_fetched(hub, monkeypatch):
    load()
    hub.sent.clear()
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert load(offline=True).revision == fake_hub.COMMIT
    assert load().revision == fake_hub.COMMIT  # the network is down without anybody having said so
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load().revision == fake_hub.COMMIT
    assert hub.sent == []


def shard(hub) -> Path:
    """Have the model's weights in six files."""
    folder = hub.models[MODEL]
    (folder / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(folder, max_shard_size="100KB")
    return folder


def test_sharded_weights(hub):
    shard(hub)
    assert torch.equal(load().model.lm_head.weight, tiny_model("llama").lm_head.weight)
    assert sum(name.startswith("model-0000") for name in hub.sent) == 6


def test_a_shard_that_was_never_uploaded(hub):
    (shard(hub) / "model-00002-of-00006.safetensors").unlink()
    assert "lacks 1 of 6 weight files: model-00002-of-00006.safetensors" in refused().message


def test_a_shard_that_is_a_pointer(hub):
    (shard(hub) / "model-00002-of-00006.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "model-00002-of-00006.safetensors is a git-LFS pointer" in refused().message


def test_a_download_that_broke_off(hub):
    """Offline the missing file is named; with the network only that one is fetched."""
    shard(hub)
    folder = Path(constants.HF_HUB_CACHE) / f"models--{MODEL.replace('/', '--')}" / "snapshots" / fake_hub.COMMIT
    load()
    lost = folder / "model-00004-of-00006.safetensors"
    lost.unlink()
    assert f"lacks 1 of 6 weight files: {lost.name}" in refused(offline=True).message
    hub.sent.clear()
    assert torch.equal(load().model.lm_head.weight, tiny_model("llama").lm_head.weight)
    assert not [name for name in hub.sent if name.startswith("model-") and name != lost.name]


def test_tied_head_that_is_not_stored(hub):
    folder = hub.models[MODEL]
    (folder / "model.safetensors").unlink()
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    model = load().model
    assert model.lm_head.weight is model.model.embed_tokens.weight


OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture
def tagged(hub, tmp_path) -> fake_hub.FakeHub:
    """A hub on which v1 is an older commit with other weights."""
    folder = shutil.copytree(hub.models[MODEL], tmp_path / "older")
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(folder)
    hub.tags["v1"] = (OLDER, folder)
    return hub


@pytest.mark.parametrize("revision", ["v1", OLDER])
def test_revision_by_tag_or_commit(tagged, revision):
    loaded = load(revision=revision)
    assert loaded.revision == OLDER
    assert loaded.config.tie_word_embeddings
    assert not load().config.tie_word_embeddings  # main is another one


def test_revision_offline(tagged, monkeypatch):
    load(revision="v1")
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert load(revision="v1", offline=True).revision == OLDER
    assert load(revision=OLDER, offline=True).revision == OLDER
    assert f"{MODEL} is not on this machine" in refused(offline=True).message
    assert f"{MODEL} at revision v2 is not on this machine" in refused(revision="v2", offline=True).message


def test_weights_from_before_safetensors(hub):
    folder = hub.models[MODEL]
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    assert torch.equal(load().model.lm_head.weight, tiny_model("llama").lm_head.weight)


def test_config_alone_fetches_only_that(hub):
    options = ModelOptions(MODEL)
    assert loader.load_config(options).hidden_size == 64
    assert hub.sent == ["config.json"]
    assert len(loader.load_tokenizer(options)("four")["input_ids"]) == 4
    assert "model.safetensors" not in hub.sent


def test_random_weights_fetch_none(hub):
    assert load(load_format="dummy").params > 0
    assert "model.safetensors" not in hub.sent


def test_only_the_config_is_here_and_offline(hub):
    loader.load_config(ModelOptions(MODEL))
    assert "no weights" in refused(offline=True).message


def test_unknown_model(hub):
    assert refused("no/such-model").message == "there is no model no/such-model on the Hub, or it is private"


def test_unknown_revision(hub):
    assert "has no revision v2" in refused(revision="v2").message


def test_gated_model(hub):
    hub.gated.add(MODEL)
    problem = refused()
    assert "is gated" in problem.message
    assert f"{hub.url}/{MODEL}" in problem.hint
    assert "HF_TOKEN" in problem.hint


def test_model_without_weights(hub):
    for name in ("model.safetensors", "pytorch_model.bin"):
        (hub.models[MODEL] / name).unlink()
    assert "no weights" in refused().message


def test_model_that_is_no_transformers_model(hub):
    (hub.models[MODEL] / "config.json").unlink()
    assert refused().message == f"{MODEL} has no config.json"


def test_code_is_fetched_but_not_run_untrusted(hub):
    folder = hub.models[MODEL]
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this was run')")
    assert "needs Python code" in refused().message


def test_offline_and_not_here_says_what_is(hub):
    problem = refused("no/such-model", offline=True)
    assert "is not on this machine" in problem.message
    assert "the Hub cache is empty" in problem.hint
    load()
    assert f"the cache holds {MODEL}" in refused("no/such-model", offline=True).hint


def test_unreachable_hub(hub, monkeypatch):
    use_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert "the Hub cannot be reached" in refused().message


def test_neither_path_nor_id(hub):
    assert "neither a Hub id nor a file" in refused("what is this?").message
