"""Filling a context to a wanted length: prefilled text, or prefilled text whose rows are repeated.

A real fill of a very long context takes hours on a CPU. A tiled one prefills what fits in a time limit and repeats
those keys and values at fresh rotary positions, which keeps the geometry that sampling depends on. What a model
generates after a tiled fill means nothing; only speed, sampled ratio and memory do.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.corpus import natural_text, repeat_ids
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import Working
from magicpig_cli.kernels.memory import give_back_freed
from magicpig_cli.model.rotary import RotaryShift

FILL_LIMIT_S = 60.0  # a tiled fill prefills for at most this long; `auto` is real where that is enough
_COPIED_ROWS = 1024  # at a time: a copy of a whole layer would be its size in memory beside it


@dataclass(frozen=True, slots=True)
class Fill:
    """How a context came to its length."""

    kind: str  # real | tiled
    prefilled: int  # tokens
    prefill_s: float
    fresh_positions: bool  # tiled rows were rotated to the positions where they stand
    # By mode, building its index afterwards; 0 where that went on beside the last chunk (on a GPU).
    index_s: dict[str, float] = field(default_factory=dict)

    @property
    def prefill_tok_s(self) -> float:
        return self.prefilled / self.prefill_s

    def ttft_s(self, mode: str) -> float | None:
        """Seconds from the prompt of one sequence to its first token; None where not all of it was prefilled."""
        if self.kind != "real":
            return None
        return self.prefill_s + self.index_s.get(mode, 0.0)


def fill_ids(engine: Engine, length: int) -> list[int]:
    """`length` token ids of natural text, from the start again where it ends."""
    return repeat_ids(engine.codec.encode_raw(natural_text()), length)


def fill(engine: Engine, sequence: Sequence, length: int, kind: str) -> Generator[Working, None, Fill]:
    """Bring an empty sequence to `length` tokens, the index of the plan's mode included, yielding progress.

    kind: real, tiled or auto.
    """
    ids = fill_ids(engine, length)
    begin = time.perf_counter()
    yield from _prefill(engine, sequence, ids, kind)
    prefilled, prefill_s = sequence.length, time.perf_counter() - begin
    fresh = True
    if prefilled < length:
        shift = RotaryShift(engine.runner.model, engine.runner.key_rotation)
        yield from repeat_rows(sequence, length, shift)
        fresh = shift.possible
    filled = Fill("real" if prefilled == length else "tiled", prefilled, prefill_s, fresh)
    build_index(engine, sequence, engine.plan.mode, filled)
    return filled


def build_index(engine: Engine, sequence: Sequence, mode: str, filled: Fill) -> None:
    """Make the index of a mode; the first time it is noted how long that takes."""
    begin = time.perf_counter()
    engine.runner.build_index(sequence, mode)
    filled.index_s.setdefault(mode, time.perf_counter() - begin)


def _prefill(engine: Engine, sequence: Sequence, ids: list[int], kind: str) -> Iterator[Working]:
    """Prefill all of ids; for the other kinds than `real` only until the time limit or the model's own context."""
    most = len(ids) if kind == "real" else min(len(ids), engine.shape.context)
    # Tables are built, and timed, apart from the prompt where nothing would be built beside the forward.
    mode = None if engine.runner.builds_beside_forward else "exact"
    begin = time.perf_counter()
    for done, _ in engine.runner.prefill(sequence, ids[:most], mode):
        yield Working("prefilling", done, len(ids))
        spent = time.perf_counter() - begin
        predicted = spent / done * len(ids)  # too low, as attention grows; the limit still holds
        if (kind == "tiled" and spent > FILL_LIMIT_S) or (kind == "auto" and max(spent, predicted) > FILL_LIMIT_S):
            return


def repeat_rows(sequence: Sequence, length: int, shift: RotaryShift) -> Iterator[Working]:
    """Extend every layer to `length` rows by repeating the rows it has, rotated to where they will stand."""
    base = sequence.length
    for number, layer in enumerate(sequence.layers):
        while layer.length < length:
            turn, offset = divmod(layer.length, base)
            rows = layer.read(offset, min(base, offset + _COPIED_ROWS, offset + length - layer.length))
            keys = shift.shift(rows[:, :, 0], by=turn * base)
            layer.extend(torch.stack([keys, rows[:, :, 1]], dim=2))
        give_back_freed()
        yield Working("repeating rows", number + 1, len(sequence.layers))
    sequence.commit((sequence.ids * -(-length // base))[base:length])


def duplicate(engine: Engine, sequence: Sequence) -> Sequence:
    """A second sequence with the same tokens in memory of its own."""
    copy = engine.new_sequence()
    for source, target in zip(sequence.layers, copy.layers, strict=True):
        for start in range(0, source.length, _COPIED_ROWS):
            target.extend(source.read(start, min(source.length, start + _COPIED_ROWS)))
        give_back_freed()
    copy.commit(list(sequence.ids))
    engine.runner.build_index(copy)
    give_back_freed()
    return copy
