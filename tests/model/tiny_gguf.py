"""A tiny random Llama as a GGUF file, with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 4, 2, 261
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write(
    path: Path, seed: int = 0, *, tied: bool = True, types: Mapping[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Writes the file and returns what it holds, by GGUF's names of tensors.

    types: of matrices by the end of their names (`1.attn_v`, `ffn_down`), the first that fits; others are float16.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    add_tokenizer(writer)
    tensors = make_tensors(np.random.default_rng(seed), tied)
    for name, tensor in tensors.items():
        ends = [end for end in types or {} if name.removesuffix(".weight").endswith(end)]
        if ends:
            kind = GGMLQuantizationType[types[ends[0]]]
            packed = quants.quantize(tensor.astype(np.float32), kind)
            writer.add_tensor(name, packed, raw_dtype=kind)
            tensors[name] = quants.dequantize(packed, kind)
        else:
            half = tensor.ndim == 2
            writer.add_tensor(name, tensor, raw_dtype=GGMLQuantizationType.F16 if half else GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def add_tokenizer(writer: GGUFWriter) -> None:
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "cd", "ab"])
    writer.add_token_types([3] * len(special) + [1] * 258)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def make_tensors(rng: np.random.Generator, tied: bool) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0, 0.1, (rows, columns)).astype(np.float16)

    tensors = {"token_embd.weight": matrix(VOCAB, HIDDEN), "output_norm.weight": np.ones(HIDDEN, np.float32)}
    narrow = HIDDEN * KV_HEADS // HEADS
    for layer in range(LAYERS):
        block = {
            "attn_q": (HIDDEN, HIDDEN), "attn_k": (narrow, HIDDEN), "attn_v": (narrow, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }  # fmt: skip
        tensors |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in block.items()}
        for norm in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    if not tied:
        tensors["output.weight"] = matrix(VOCAB, HIDDEN)
    return tensors
