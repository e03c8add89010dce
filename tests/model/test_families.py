"""Every promised family: exact tokens equal transformers', sampling is sane, and the committed table says so."""

from __future__ import annotations

import pytest

from magicpig_cli.model.shape import VERIFIED_FAMILIES, unsupported_reason
from scripts import family_table
from tests.families import CASES, examine, own_code
from tests.model.test_parity import expected, greedy, make_runner, prompts
from tests.tiny import tiny_model

NAMES = [case.name for case in CASES]


def test_every_verified_family_is_among_them():
    assert {case.family for case in CASES} == VERIFIED_FAMILIES
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_generate(name):
    assert examine(name).exact_equal


@pytest.mark.parametrize("name", NAMES)
def test_with_every_key_sampled_tokens_equal_exact_attention(name):
    """K = 1 with many tables hits every key twice with probability 1 − 2⁻²⁹⁰: the estimate is the exact result."""
    found = examine(name)
    assert found.everything_equal is (None if found.windowed == found.layers else True)


@pytest.mark.parametrize("name", NAMES)
def test_as_many_keys_are_sampled_as_the_closed_form_says(name):
    found = examine(name)
    assert (found.ratio is None) == (found.windowed == found.layers)
    assert found.ratio_expected, found.ratio


@pytest.mark.parametrize("name", NAMES)
def test_default_tables_give_finite_logits_and_windowed_layers_have_none(name):
    found = examine(name)
    assert (found.finite, found.held_back) == (True, True)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_blocks_by_kernels_change_no_token(case):
    found = examine(case.name)
    assert found.blocks_equal
    assert (found.blocks == found.layers) != own_code(case)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("afmoe", {"sliding_window": 48}), ("cohere", {}), ("glm4", {}), ("olmo3", {"sliding_window": 48})],
)
def test_families_that_should_work_do(family, overrides):
    """Not promised, but `models check` lets them pass."""
    model = tiny_model(family, **overrides)
    assert unsupported_reason(model.config) is None
    batch = prompts(model.config.vocab_size, (90, 5))
    wanted = [expected(model, prompt) for prompt in batch]
    assert greedy(make_runner(model), batch) == wanted


def test_the_committed_table_is_what_was_found():
    committed = family_table.TARGET.read_text(encoding="utf-8")
    assert family_table.document(committed) == committed
    assert "NO" not in family_table.table().split()
