"""Cards that are planned for without being there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicpig_cli.cards import assumed, card, described, names
from magicpig_cli.errors import UsageError
from magicpig_cli.gpus import Gpu
from magicpig_cli.profiles import choose
from tests.system.test_planner import DESKTOP

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("4090", "NVIDIA GeForce RTX 4090"),
        ("nvidia geforce rtx 3090", "NVIDIA GeForce RTX 3090"),
        ("L4", "NVIDIA L4"),
        ("l20", "NVIDIA L20"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("H200", "NVIDIA H200"),
    ],
)
def test_a_card_by_name_or_part_of_it(text, name):
    found = card(text)
    assert found.name == name
    assert found.free_bytes == found.total_bytes > 8 * GIB
    assert found.pcie_lanes is not None
    assert found.memory_bytes_s > 100e9


@pytest.mark.parametrize("text", ["", "   ", "RTX 9999", "GTX", "409", "[/b]"])
def test_an_unknown_card_is_answered_with_the_known_ones(text):
    with pytest.raises(UsageError) as caught:
        card(text)
    assert repr(text) in caught.value.message
    assert "RTX 4090" in caught.value.hint


def test_every_card_has_a_profile_of_its_own_size():
    for name in names():
        gpu = card(name)
        assert gpu.name == name, "no name may hide another"
        profile, _ = choose(replace(DESKTOP, gpus=(gpu,)), True, own=())
        assert profile.match.device == "gpu"
        assert (profile.match.gpu_memory_min or 0) <= gpu.total_bytes < (profile.match.gpu_memory_max or 1 << 60)


def test_an_assumed_machine_has_what_was_said_and_the_rest_of_this_one():
    machine = assumed(DESKTOP, "L20", 64 * GIB)
    assert machine.gpus == (card("L20"),)
    assert (machine.memory_free, machine.process_bytes) == (64 * GIB, 0)
    assert machine.cores_physical == DESKTOP.cores_physical
    assert assumed(DESKTOP, None, None) == DESKTOP
    with pytest.raises(UsageError, match="0 B"):
        assumed(DESKTOP, None, 0)


def test_data_sheets_are_known_by_the_names_that_drivers_give():
    found = described(replace(DESKTOP, gpus=(replace(card("4090"), memory_bytes_s=None), Gpu(1, "Other", GIB, GIB))))
    assert [gpu.memory_bytes_s for gpu in found.gpus] == [1008e9, None]
