"""Tensors of a GGUF file by its header alone."""

from __future__ import annotations

import struct

import pytest
from gguf import GGMLQuantizationType

from magicpig_cli.errors import ModelError
from magicpig_cli.model import gguf_header
from tests.model import tiny_gguf


def test_a_header_names_all_tensors_with_sizes_and_types(file):
    tensors = tiny_gguf.write(file, types={"1.attn_v": "Q8_0", "attn_v": "Q4_0"})
    found = {tensor.name: tensor for tensor in gguf_header.tensors(file)}
    assert {name: tensor.sizes for name, tensor in found.items()} == {
        name: value.shape[::-1] for name, value in tensors.items()
    }
    assert found["token_embd.weight"].type == "F16"
    assert found["output_norm.weight"].type == "F32"
    assert found["blk.0.attn_v.weight"].type == "Q4_0"
    assert found["blk.1.attn_v.weight"].type == "Q8_0"


def test_types_are_called_as_the_format_calls_them():
    for number, name in gguf_header._TYPES.items():
        assert GGMLQuantizationType[name] == number


@pytest.mark.parametrize("cut", [0, 3, 20, 24, 30, 3000])
def test_a_header_that_ends_early_is_refused(file, cut):
    tiny_gguf.write(file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ModelError, match="has no GGUF header, or a damaged one"):
        gguf_header.tensors(file)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<4sIQQ", b"GGML", 3, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),  # lengths had 32 bits
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<QI", 0, 99),  # no such type
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 62, 0) + struct.pack("<Q", (1 << 64) - 1),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<QI", 0, 9) + struct.pack("<IQ", 9, 1) * 9999,
    ],
)
def test_what_no_header_can_hold_is_refused(file, content):
    file.write_bytes(content)
    with pytest.raises(ModelError, match="has no GGUF header, or a damaged one"):
        gguf_header.tensors(file)
