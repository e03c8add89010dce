"""Prefill and decode of sequences through one model; knows token ids and rows, neither text nor requests."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from threading import Lock

import torch
from transformers import PreTrainedModel

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.rotation import rotation
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.device import Device
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.saved import SavedCache
from magicpig_cli.cache.sequence import Sequence, index_bytes
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import TORCH_DTYPE
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.config import HALVES_FROM, INDEX_FROM
from magicpig_cli.engine.builder import IndexBuilder
from magicpig_cli.engine.lanes import Lanes, dealt
from magicpig_cli.engine.samplers import make_sampler
from magicpig_cli.engine.step import Part, Step, put_together
from magicpig_cli.errors import MagicpigError
from magicpig_cli.kernels import window_type
from magicpig_cli.kernels.memory import give_back_freed
from magicpig_cli.model import hook
from magicpig_cli.model.graphs import executor_of
from magicpig_cli.model.segments import Segments
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan


class ModelRunner:
    """Runs forwards of a model over sequences it has made, as the plan says."""

    def __init__(
        self, model: PreTrainedModel, shape: ModelShape, plan: Plan, device: torch.device | Device, hash_seed: int
    ) -> None:
        self.model = model
        self.plan = plan
        self.halves: bool | None = None  # whether batches are decoded in halves; None = where it pays
        self._window = WindowShape(plan.sink, plan.local, plan.flush)
        self._specs = [LayerSpec(shape.kv_heads, shape.head_dim, window) for window in shape.layer_windows]
        self.staging = Staging(device)
        pin = None if self.staging.on_host else self.staging.pin
        self._pool = BlockPool(shape.kv_heads, shape.head_dim, plan.row_dtype, plan.block_rows, pin)
        self._lanes, self._turn = Lanes(self.staging.device), Lock()
        # On a CPU the forward keeps all cores busy, and a worker beside it gains nothing (docs/decisions/004).
        self.builds_beside_forward = not self.staging.on_host
        self.key_rotation: torch.Tensor | None = None  # [D, D]; rows hold keys multiplied by it
        if plan.row_dtype == "int8":
            self.key_rotation = self.staging.to_device(torch.from_numpy(rotation(shape.head_dim)))
        self.segments = Segments(model, executor_of(model.device) if plan.graphs else None)
        self._hash_seed = hash_seed
        self._attentions: dict[str | None, Attention] = {}  # by sampler, those that were asked for
        self._sequences: weakref.WeakSet[Sequence] = weakref.WeakSet()

    def _attention(self, mode: str | None = None) -> Attention:
        """That of a mode, in which its sampler is told what it samples."""
        sampler = self._sampler(mode)
        if sampler not in self._attentions:
            made = None if sampler is None else make_sampler(sampler, self.plan, self._hash_seed, self.staging)
            row_dtype = TORCH_DTYPE[window_type(self.plan.row_dtype)]
            self._attentions[sampler] = Attention(
                made, row_dtype, self.plan.threads, self.staging, self.key_rotation, self._turn
            )  # fmt: skip
        return self._attentions[sampler]

    def _sampler(self, mode: str | None) -> str | None:
        """Name of the sampler of a mode; None = the plan's mode, or, as a result, exact attention."""
        return self.plan.sampler_of(mode or self.plan.mode)

    def follow(self, plan: Plan) -> None:
        """Sample as this plan says from now on; apart from that it is the same."""
        self.plan = plan
        self._attentions.clear()

    def new_sequence(self) -> Sequence:
        """An empty sequence of this model."""
        layers = [LayerCache(spec, self._window, self._pool, self.staging) for spec in self._specs]
        sequence = Sequence(layers)
        self._sequences.add(sequence)
        return sequence

    def restore(self, saved: SavedCache, length: int, *, index: bool) -> Sequence:
        """A sequence of the first `length` tokens of a file; index: with its tables of the layers that are sampled.

        Raises MagicpigError if the file is damaged or of a model with other layers.
        """
        if saved.layers != len(self._specs):
            raise MagicpigError(f"{saved.path} has {saved.layers} layers, and the model {len(self._specs)}")
        sequence = self.new_sequence()
        for layer, cache in enumerate(sequence.layers):
            saved.read_layer(layer, cache, length)
            found = saved.index(layer) if index and self._indexed(layer) else None
            if found is not None:
                self._attention().adopt_index(layer, cache, found)
        sequence.commit(saved.ids[:length])
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        """A sequence with the same tokens, whose rows and indexes are shared until one of the two changes them."""
        fork = sequence.fork()
        self._sequences.add(fork)
        return fork

    @property
    def kv_bytes(self) -> int:
        """Bytes of the offloaded rows of all living sequences; what several share counts once."""
        return self._pool.nbytes

    @property
    def index_bytes(self) -> int:
        """Bytes of the indexes of all living sequences; what several share counts once."""
        return index_bytes(list(self._sequences))

    def samples(self, sequence: Sequence, mode: str | None = None) -> bool:
        """Whether the next decode step of this sequence samples. `mode` overrules the plan's (bench, eval)."""
        return self._samples_at(sequence.length, mode)

    def _samples_at(self, length: int, mode: str | None) -> bool:
        asked = (mode or self.plan.mode) != "auto" or length >= self.plan.auto_lsh_from
        return asked and self._sampler(mode) is not None and self._window.offloaded(length + 1) >= INDEX_FROM

    def _indexed(self, layer: int) -> bool:
        return layer not in self.plan.dense_layers and self._specs[layer].window is None

    def prefill(
        self, sequence: Sequence, ids: list[int], mode: str | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Process ids after what the sequence holds, exactly, in chunks; the index is complete at the end.

        `mode` overrules the plan's (bench): for exact there is no index.

        Yields after each chunk (tokens of `ids` done, logits [V] of the last of them). If it is closed or fails
        half-way, the sequence holds whole chunks.
        """
        done = 0
        try:
            while done < len(ids):
                chunk = ids[done : done + self.plan.chunk]
                last = done + len(chunk) == len(ids)
                if last and self.builds_beside_forward and self._samples_at(sequence.length + len(chunk), mode):
                    with IndexBuilder(partial(self._build_layer, mode)) as builder:
                        logits = self._chunk(sequence, chunk, builder.add)
                else:
                    logits = self._chunk(sequence, chunk)
                sequence.commit(chunk)
                done += len(chunk)
                if last:
                    self.build_index(sequence, mode)
                give_back_freed()
                yield done, logits[0].float()
        except BaseException:
            sequence.rollback()
            raise

    def _chunk(
        self, sequence: Sequence, chunk: list[int], taken: Callable[[int, LayerCache], None] | None = None
    ) -> torch.Tensor:
        """Logits [1, V] after a chunk, whose rows every layer has taken in."""
        start = sequence.length
        tokens, positions = torch.tensor([chunk]), torch.arange(start, start + len(chunk)).unsqueeze(0)
        return self.forward(tokens, positions, hook.Forward(self._attention(), [sequence], taken=taken))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, forward: hook.Forward) -> torch.Tensor:
        """Logits [B, V] on the device, of tokens and positions [B, T] on the host.

        When it returns or raises no copy is under way, so rows may be cut; the device may still compute.
        """
        try:
            with torch.inference_mode(), self.staging.sent("tokens", tokens, positions) as (ids, at):
                logits = self.segments.run(ids, at, forward)
                forward.attention.finish(forward.record)
                return logits
        finally:
            self.staging.settle()

    def _build_layer(self, mode: str | None, layer: int, cache: LayerCache) -> None:
        if self._indexed(layer):
            with self.staging.apart():
                self._attention(mode).build_index(layer, cache)

    def build_index(self, sequence: Sequence, mode: str | None = None) -> None:
        """An index for the layers that the next step will sample; nothing where it will not.

        One of another mode's sampler is replaced: a sequence has one at a time.
        """
        if self.samples(sequence, mode):
            for layer, cache in enumerate(sequence.layers):
                self._build_layer(mode, layer, cache)

    def decode(
        self, sequences: list[Sequence], tokens: list[int], mode: str | None = None, measure_error: bool = False
    ) -> Step:
        """Feed one token to each sequence in one forward, whatever their lengths.

        measure_error also computes the exact result of every sampled layer beside it (slow; for bench and eval).
        """
        begin = time.perf_counter_ns()
        sampled = [self.samples(sequence, mode) for sequence in sequences]
        attention = self._attention(mode)

        def work(lane: int, members: list[int]) -> Part:
            own = [sampled[b] for b in members]
            per_layer = [own if self._indexed(layer) else [False] * len(own) for layer in range(len(self._specs))]
            forward = hook.Forward(attention, [sequences[b] for b in members], per_layer, lane=lane)
            forward.record.errors = [] if measure_error else None
            ids = torch.tensor([[tokens[b]] for b in members])
            positions = torch.tensor([[sequences[b].length] for b in members])
            return Part(members, self.forward(ids, positions, forward).float(), forward.record)

        halves = self._halves(sequences, sampled, measure_error)
        try:
            parts = self._lanes.run([partial(work, lane, members) for lane, members in enumerate(halves)])
        except BaseException:
            for sequence in sequences:
                sequence.rollback()
            raise
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.commit([token])
        for part in parts:
            attention.learn(part.record)
        return put_together(parts, time.perf_counter_ns() - begin)

    def _halves(self, sequences: list[Sequence], sampled: list[bool], measure_error: bool) -> list[list[int]]:
        """Which sequences are decoded by a forward of their own: all by one, or half of them by each of two.

        Two where the kernels of a half have something to do while a device computes the other one. Measuring errors
        reads everything anyway.
        """
        worthwhile = any(sampled) and len(sequences) >= HALVES_FROM
        wanted = worthwhile if self.halves is None else self.halves and len(sequences) > 1
        if self.staging.on_host or measure_error or not wanted:
            return [list(range(len(sequences)))]
        return list(dealt([sequence.length if flag else 0 for sequence, flag in zip(sequences, sampled, strict=True)]))
