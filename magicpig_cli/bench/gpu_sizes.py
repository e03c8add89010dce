"""What `gpu_check` measures: the shape of Llama-3.1-8B at 96k, or toys that run anywhere; and models for parity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicpig_cli.bench.gpu_parity import Tokens


@dataclass(frozen=True)
class Sizes:
    """What is measured, and how long a row may take."""

    name: str  # of the large model
    config: dict[str, Any]  # of it
    context: int
    batches: tuple[int, ...]
    prompt: int  # tokens that are prefilled, timed
    steps: int  # measured per row, at most
    row_s: float  # after which a row takes no further step
    tile: int  # rows drawn per layer, then repeated
    models: dict[str, dict[str, Any]]  # configs that run on both devices
    parity: Tokens


_TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192, "initializer_range": 0.2,
}  # fmt: skip
_DEMO = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 1e5,
    "tie_word_embeddings": True, "initializer_range": 0.05,
}  # fmt: skip
_LLAMA_8B = {
    "model_type": "llama", "dtype": "bfloat16", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
FULL = Sizes(
    name="Llama-3.1-8B", config=_LLAMA_8B, context=98_304, batches=(1, 2, 4, 8), prompt=8192, steps=16, row_s=6.0,
    tile=16_384, models={"tiny": _TINY, "demo size": _DEMO}, parity=Tokens(prompt=1500, steps=16),
)  # fmt: skip
TOY = Sizes(
    name="toy", config={**_TINY, "dtype": "bfloat16", "num_hidden_layers": 4}, context=2048, batches=(1, 2),
    prompt=300, steps=4, row_s=1.0, tile=512,
    models={"tiny": _TINY, "demo size": {**_DEMO, "num_hidden_layers": 2, "vocab_size": 512}},
    parity=Tokens(prompt=400, steps=4),
)  # fmt: skip
