"""Real queries, keys and values: what the layers of a loaded model attend with and to after reading natural text."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from magicpig_cli.bench.layer_tensors import LayerTensors
from magicpig_cli.corpus import natural_text, repeat_ids
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.recording import Queries, teacher_force


def capture(
    engine: Engine, length: int, layers: SequenceOf[int], steps: int, offset: int = 0, text: str | None = None
) -> list[LayerTensors]:
    """Tensors of `layers` at a context of `length` tokens of a text that starts at its `offset`-th token.

    The text (None: natural text) but its last `steps` tokens is prefilled, these are then decoded one by one (exactly,
    teacher-forced) and give the queries. Rows are those of the prefilled tokens: [Hkv, length − steps, 2, D].
    """
    ids = engine.codec.encode_raw(natural_text() if text is None else text)
    start = offset % len(ids)
    ids = repeat_ids(ids[start:] + ids[:start], length)
    sequence = engine.new_sequence()
    for _ in engine.runner.prefill(sequence, ids[:-steps]):
        pass
    rows = {layer: sequence.layers[layer].copy_rows().to(torch.bfloat16) for layer in layers}
    queries = Queries()
    for _ in teacher_force(engine.runner, sequence, ids[-steps:], queries):
        pass
    return [LayerTensors(queries.stacked(layer), rows[layer], queries.rules[layer].scale, layer) for layer in layers]


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
