"""Token counts as they are shown can be typed."""

from __future__ import annotations

import pytest

from magicpig_cli.units import format_tokens, parse_tokens


@pytest.mark.parametrize(("tokens", "text"), [(6144, "6k"), (32768, "32k"), (6000, "6000"), (512, "512"), (0, "0")])
def test_tokens(tokens, text):
    assert format_tokens(tokens) == text
    assert parse_tokens(text) == tokens
