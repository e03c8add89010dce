"""Keys moved by `RotaryShift` equal keys that the model itself rotates at the later position."""

from __future__ import annotations

import sys

import pytest
import torch

from magicpig_cli.attention.rotation import rotation
from magicpig_cli.model.rotary import RotaryShift
from tests.tiny import tiny_model
from tests.tolerances import DOT, U

SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128, "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0},
}  # fmt: skip


def rotated(model, keys: torch.Tensor, first: int) -> torch.Tensor:
    """keys [1, heads, n, D] rotated by the model's own code as if the first stood at position `first`."""
    positions = torch.arange(first, first + keys.shape[2])[None]
    cos, sin = model.model.rotary_emb(keys, positions)
    apply = sys.modules[type(model).__module__].apply_rotary_pos_emb
    return apply(keys, keys, cos, sin)[1]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("by", [1, 1000, 100_000])
def test_shift_composes_with_the_models_rotation(scaling, by):
    model = tiny_model("llama", rope_parameters=SCALINGS[scaling], max_position_embeddings=512)
    shift = RotaryShift(model)
    assert shift.possible
    dim = model.config.hidden_size // model.config.num_attention_heads
    keys = torch.randn(1, 2, 9, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moved = shift.shift(rotated(model, keys, 3), by)
    # The model multiplies float32 angles; at position p their rounding is up to p·2⁻²⁴.
    bound = 2.0**-22 * (by + 12) * float(keys.abs().max())
    assert (moved - rotated(model, keys, 3 + by)).abs().max() <= bound


@pytest.mark.parametrize("by", [1, 1000])
def test_shift_in_another_basis(by):
    """Rows under int8 stores hold rotated keys."""
    model = tiny_model("llama")
    dim = model.config.hidden_size // model.config.num_attention_heads
    basis = torch.from_numpy(rotation(dim))
    keys = torch.randn(2, 9, dim, generator=torch.Generator().manual_seed(0))
    moved = RotaryShift(model, basis).shift(keys @ basis, by)
    wanted = RotaryShift(model).shift(keys, by) @ basis
    assert ((moved - wanted).abs() <= 3 * DOT * U * keys.norm(dim=-1, keepdim=True)).all()


def test_models_whose_frequencies_depend_on_length_are_left_alone():
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=dynamic)
    shift = RotaryShift(model)
    assert not shift.possible
    keys = torch.randn(1, 2, 3, 8)
    assert shift.shift(keys, 5) is keys
