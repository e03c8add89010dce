"""What one mode makes of a sequence that was read exactly: a fork with its index, and how much it samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.engine.step import Step


@dataclass(slots=True)
class Usage:
    """Keys that were sampled, of how many, and what their index takes."""

    index_bytes_per_token: float | None  # of one layer and KV head; None: there is no index
    sampled: int = 0
    offloaded: int = 0

    def count(self, step: Step) -> None:
        self.sampled += sum(step.sampled)
        self.offloaded += sum(step.offloaded)


@contextmanager
def indexed(runner: ModelRunner, read: Sequence, mode: str) -> Iterator[tuple[Sequence, Usage]]:
    """A fork that is ready to be decoded in this mode; the sequence itself stays as it is."""
    fork = runner.fork(read)
    try:
        runner.build_index(fork, mode)
        yield fork, Usage(_bytes_per_token(fork))
    finally:
        fork.release()


def _bytes_per_token(sequence: Sequence) -> float | None:
    layers = [layer for layer in sequence.layers if layer.index is not None]
    keys = sum(layer.spec.kv_heads * layer.store.length for layer in layers)
    return sequence.index_bytes / keys or None if keys else None
