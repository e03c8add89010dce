"""LSH tables in a file of keys, values and index (`cache.saved`): what is written of them, and made of them again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicpig_cli import kernels
from magicpig_cli.cache.base import IndexReader, SavedTensor
from magicpig_cli.kernels import Segment


@dataclass(frozen=True, slots=True)
class SavedTables:
    """What an index over the first rows of a store is made of, to be written down and made again.

    Its tensors: `mean`; of each segment S `S.offsets` and `S.ids`; `tail`.
    """

    mean: np.ndarray  # float32 [Hkv, D]
    built: int  # rows behind the mean
    segments: tuple[Segment, ...]
    last_rows: int  # of the last segment only the first so many rows belong to it
    tail: np.ndarray  # uint16 [Hkv, L, n]: codes of the rows after the segments
    cut: bool  # the last segment has been cut since it was made, so that it may have to join others (`truncate`)

    def _sizes(self) -> Iterator[tuple[Segment, int]]:
        """Segments, each with the number of its rows that count."""
        yield from ((segment, segment.n) for segment in self.segments[:-1])
        if self.segments:
            yield self.segments[-1], self.last_rows

    def facts(self) -> dict[str, Any]:
        sizes = [[segment.start, n] for segment, n in self._sizes()]
        return {"built": self.built, "cut": self.cut, "segments": sizes}

    def tensors(self) -> Iterator[SavedTensor]:
        yield SavedTensor("mean", "F32", self.mean.shape, lambda: iter([self.mean]))
        for number, (segment, n) in enumerate(self._sizes()):
            made = _Shortened(segment, n)
            yield SavedTensor(f"{number}.offsets", "U16", segment.offsets.shape, made.offsets)
            yield SavedTensor(f"{number}.ids", "U16", (*segment.ids.shape[:2], n), made.ids)
        yield SavedTensor("tail", "U16", self.tail.shape, lambda: iter([self.tail]))

    @classmethod
    def read(cls, saved: IndexReader, kv_heads: int) -> SavedTables:
        """What a file has. Raises MagicpigError."""
        K, L = saved.sampler["K"], saved.sampler["L"]
        segments: list[Segment] = []
        for number, (start, n) in enumerate(saved.facts["segments"]):
            offsets, ids = saved.read(f"{number}.offsets"), saved.read(f"{number}.ids")
            shapes_fit = offsets.shape == (kv_heads, L, (1 << K) + 1) and ids.shape == (kv_heads, L, n)
            if not shapes_fit or start != (segments[-1].start + segments[-1].n if segments else 0):
                raise saved.damaged(f"segment {number} does not fit")
            segments.append(Segment(start, n, K, L, offsets, ids))
        mean, tail = saved.read("mean"), saved.read("tail")
        if tail.shape[:2] != (kv_heads, L) or mean.shape[0] != kv_heads:
            raise saved.damaged("mean and tail do not fit")
        last = segments[-1].n if segments else 0
        return cls(mean, int(saved.facts["built"]), tuple(segments), last, tail, bool(saved.facts["cut"]))


class _Shortened:
    """The first n rows of a segment: made for its offsets, and let go of with its ids."""

    def __init__(self, segment: Segment, n: int) -> None:
        self._segment, self._n = segment, n
        self._made: Segment | None = None

    def _take(self) -> Segment:
        return self._made or kernels.truncate_segment(self._segment, self._n, threads=1)

    def offsets(self) -> Iterator[np.ndarray]:
        self._made = self._take()
        yield self._made.offsets

    def ids(self) -> Iterator[np.ndarray]:
        made, self._made = self._take(), None
        yield made.ids
