"""`--quantize auto` in a batch: its manifest and its lines know what that meant, and a later run is held to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from magicpig_cli.cli import app
from magicpig_cli.model import loader, source
from tests.model import tiny_gguf
from tests.model.test_as_stored import FOUR_BITS
from tests.tiny import tiny_model

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path, monkeypatch) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(source, "cache_folder", lambda: tmp_path / "cache")
    Path("in.jsonl").write_text('{"prompt": "ab", "max_tokens": 2}\n')
    return lambda model, *options: app.run(["batch", "in.jsonl", "-m", model, "--raw", *options])


def manifest() -> dict:
    return json.loads(Path("in.out.meta.json").read_text())


def test_a_4_bit_file_by_itself_or_as_asked_is_the_same_run(run, capsys):
    tiny_gguf.write(Path("tiny.gguf"), types=FOUR_BITS)
    assert run("tiny.gguf") == 0
    assert manifest()["parameters"]["model"]["quantize"] == manifest()["chosen"]["weights"] == "int4"
    before = Path("in.out.jsonl").read_bytes()
    assert run("tiny.gguf", "--resume", "--quantize", "int4") == 0
    assert Path("in.out.jsonl").read_bytes() == before
    capsys.readouterr()
    assert run("tiny.gguf", "--resume", "--quantize", "none") == 2
    assert '--quantize was "int4" and is "none"' in capsys.readouterr().err
    assert run("tiny.gguf", "--resume", "--quantize", "none", "--force") == 0
    assert manifest()["chosen"]["weights"] == "float32"
    assert Path("in.out.jsonl").read_bytes() != before  # answered again


def test_an_output_of_a_directory_goes_on_whether_none_was_typed_or_not(run, tmp_path):
    """As did all before there was `auto`."""
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    loader._byte_tokenizer().save_pretrained(tmp_path / "tiny")
    assert run("./tiny", "--quantize", "none") == 0
    before, parameters = Path("in.out.jsonl").read_bytes(), manifest()["parameters"]
    assert run("./tiny", "--resume") == 0
    assert Path("in.out.jsonl").read_bytes() == before
    assert manifest()["parameters"] == parameters
