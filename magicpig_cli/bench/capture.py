"""Real queries, keys and values: what the layers of a loaded model attend with and to after reading natural text."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, StepRecorder
from magicpig_cli.bench.fill import natural_text
from magicpig_cli.bench.layer_tensors import LayerTensors
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.staging import Staging
from magicpig_cli.engine.engine import Engine
from magicpig_cli.model import hook


class _Recording(Attention):
    """Exact attention that keeps the queries of decode steps, by layer: float32 [B, H, D] each."""

    def __init__(self, row_dtype: torch.dtype, threads: int, device: torch.device) -> None:
        super().__init__(None, row_dtype, threads, Staging(device))
        self.queries: dict[int, list[torch.Tensor]] = {}
        self.scales: dict[int, float] = {}

    def step(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> torch.Tensor:  # fmt: skip
        self.queries.setdefault(layer, []).append(q[:, :, 0].float().cpu())
        self.scales[layer] = rule.scale
        return super().step(layer, caches, sampled, q, key, value, rule, record)


def capture(engine: Engine, length: int, layers: SequenceOf[int], steps: int, offset: int = 0) -> list[LayerTensors]:
    """Tensors of `layers` at a context of `length` tokens of natural text that starts at its `offset`-th token.

    The text but its last `steps` tokens is prefilled, these are then decoded one by one (exactly, teacher-forced) and
    give the queries. Rows are those of the prefilled tokens, all of them: [Hkv, length − steps, 2, D].
    """
    ids = engine.codec.encode_raw(natural_text())
    ids = (ids[offset % len(ids) :] + ids * -(-length // len(ids)))[:length]
    sequence = engine.new_sequence()
    for _ in engine.runner.prefill(sequence, ids[:-steps]):
        pass
    rows = {layer: sequence.layers[layer].copy_rows().to(torch.bfloat16) for layer in layers}
    device = engine.runner.model.device
    recording = _Recording(sequence.layers[0].window.rows.dtype, engine.threads, device)
    for token in ids[-steps:]:
        forward = hook.Forward(recording, [sequence], [[False]] * len(sequence.layers))
        with torch.inference_mode():
            position = torch.tensor([[sequence.length]], device=device)
            hook.run(engine.runner.model, torch.tensor([[token]], device=device), position, forward)
        sequence.commit([token])
    return [
        LayerTensors(torch.cat(recording.queries[layer]), rows[layer], recording.scales[layer], layer)
        for layer in layers
    ]


def side_by_side(captures: SequenceOf[SequenceOf[LayerTensors]]) -> list[LayerTensors]:
    """A longer context made of several captures of the same layers: rows one after another, queries of all of them.

    Keys keep the rotary positions of their own capture, so a query finds keys like its own in each of them.
    """
    return [
        replace(parts[0], q=torch.cat([part.q for part in parts]), rows=torch.cat([part.rows for part in parts], dim=1))
        for parts in zip(*captures, strict=True)
    ]


def save(path: Path, captures: SequenceOf[SequenceOf[LayerTensors]]) -> None:
    """Keep captures in one safetensors file, for `load`."""
    tensors, about = {}, {}
    for number, capture_ in enumerate(captures):
        for part in capture_:
            name = f"{number}.{part.layer}"
            tensors[f"{name}.q"], tensors[f"{name}.rows"] = part.q.contiguous(), part.rows.contiguous()
            about[name] = repr(part.scale)
    save_file(tensors, path, metadata=about)


def load(path: Path) -> list[list[LayerTensors]]:
    """The captures that `save` wrote, in its order."""
    captures: dict[int, list[LayerTensors]] = {}
    with safe_open(path, framework="pt") as file:
        for name, scale in sorted(file.metadata().items(), key=lambda item: [int(x) for x in item[0].split(".")]):
            number, layer = (int(x) for x in name.split("."))
            part = LayerTensors(file.get_tensor(f"{name}.q"), file.get_tensor(f"{name}.rows"), float(scale), layer)
            captures.setdefault(number, []).append(part)
    return list(captures.values())
