"""A tiny random model as a directory, for tests that start the program."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as people have them: config, weights, tokenizer."""
    from magicpig_cli.model.loader import _byte_tokenizer
    from tests.tiny import tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama", eos_token_id=None, max_position_embeddings=8192).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder
