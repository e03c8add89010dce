"""The engine: a loaded model, and prefill, decode and generate over token ids. It yields events and never prints."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil
import torch

from magicpig_cli import hardware, kernels
from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.lsh import LshSampler
from magicpig_cli.cache.blocks import BlockPool
from magicpig_cli.cache.layer import LayerCache, LayerSpec
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import TORCH_DTYPE
from magicpig_cli.cache.window import WindowShape
from magicpig_cli.config import Settings
from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.engine.sampling import SamplingParams
from magicpig_cli.errors import ContextError
from magicpig_cli.events import STAGES, Event, LoadProgress, PrefillProgress, StepStats
from magicpig_cli.model import hook, loader
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner import Plan, plan

MIN_INDEXED = 256  # offloaded keys from which tables are built; below, exact attention reads less


@dataclass(frozen=True)
class Request:
    """One answer wanted. `sequence`: continue that cache, reusing the longest common prefix with `prompt_ids`."""

    key: str
    prompt_ids: list[int]
    sampling: SamplingParams
    default_seed: int | None = None  # seed of token sampling where the request names none; None = drawn
    sequence: Sequence | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one decode step: logits [B, V], what it cost, and per sequence what was sampled of what."""

    logits: torch.Tensor
    stats: StepStats
    sampled: list[int]
    offloaded: list[int]
    errors: torch.Tensor | None  # relative attention errors [sampled layers · B · H], if they were asked for


class Engine:
    """Owns the weights, the plan and the samplers. Sequences belong to the callers."""

    def __init__(self, settings: Settings, loaded: loader.Loaded, device: torch.device, load_s: float = 0.0) -> None:
        self.settings = settings
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.generation_config = loaded.generation_config
        self.model_name = loaded.name
        self.params = loaded.params
        self.load_s = load_s
        self.isa = kernels.isa
        self.shape: ModelShape = shape_from_config(loaded.config)
        self.plan: Plan = plan(hardware.probe(), self.shape, settings)
        self.codec = ChatCodec(
            loaded.tokenizer, loaded.config, loaded.generation_config, settings.model.chat_template
        )  # fmt: skip
        self.context = self.plan.context
        self.threads = self.plan.threads
        self._device = device
        self._window = WindowShape(self.plan.sink, self.plan.local, self.plan.flush)
        self._specs = [LayerSpec(self.shape.kv_heads, self.shape.head_dim, w) for w in self.shape.layer_windows]
        self._pool = BlockPool(self.shape.kv_heads, self.shape.head_dim, self.plan.row_dtype, self.plan.block_rows)
        staging = Staging(device)
        sampler = None
        if self.plan.mode != "exact":
            sampler = LshSampler(self.plan.K, self.plan.L, settings.attention.hash_seed, self.threads, staging)
        self._attention = Attention(sampler, TORCH_DTYPE[self.plan.row_dtype], self.threads, staging)
        self._sequences: weakref.WeakSet[Sequence] = weakref.WeakSet()
        self._cancelled: set[str] = set()
        torch.set_num_threads(self.threads)

    @classmethod
    def load(cls, settings: Settings, on_progress: Callable[[LoadProgress], None] | None = None) -> Engine:
        """Load what `settings` name. Refuses before weights are read what cannot work or fit.

        Raises ModelError, ContextError, MemoryBudgetError or UsageError.
        """
        begin = time.perf_counter()
        device = loader.resolve_device(settings.model.device)
        config = loader.load_config(settings.model)
        plan(hardware.probe(), shape_from_config(config), settings)
        loaded = loader.load_model(settings.model, device, on_progress)
        return cls(settings, loaded, device, time.perf_counter() - begin)

    @property
    def device(self) -> str:
        """`cpu`, or the name of the GPU."""
        return "cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device)

    def new_sequence(self) -> Sequence:
        """An empty sequence of this model."""
        layers = [LayerCache(spec, self._window, self._pool, self._device) for spec in self._specs]
        sequence = Sequence(layers)
        self._sequences.add(sequence)
        return sequence

    def check_fits(self, prompt_tokens: int, max_tokens: int | None) -> None:
        """Raise ContextError if the prompt, with the answer tokens asked for, exceeds the context.

        max_tokens None: the answer takes what room there is, at least one token.
        """
        wanted = prompt_tokens + (max_tokens or 1)
        if wanted <= self.context:
            return
        asked = f" + {max_tokens:,} answer tokens" if max_tokens else ""
        raise ContextError(
            f"{prompt_tokens:,} prompt tokens{asked} do not fit the context of {self.context:,} tokens",
            hint="shorten the prompt, lower --max-tokens, or give a larger -c "
            f"(the model's own limit is {self.shape.context:,}; beyond it needs --allow-extrapolation)",
        )

    def samples(self, sequence: Sequence, mode: str | None = None) -> bool:
        """Whether the next decode step of this sequence samples. `mode` overrules the plan's (bench, eval)."""
        mode = mode or self.plan.mode
        long_enough = self._window.offloaded(sequence.length + 1) >= MIN_INDEXED
        return long_enough and (mode == "lsh" or (mode == "auto" and sequence.length >= self.plan.auto_lsh_from))

    def _indexed(self, layer: int) -> bool:
        return layer not in self.plan.dense_layers and self._specs[layer].window is None

    def prefill(self, sequence: Sequence, ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Process ids after what the sequence holds, exactly, in chunks; builds the index at the end.

        Yields after each chunk (tokens of `ids` done, logits [V] of the last of them). If it is closed or fails
        half-way, the sequence holds whole chunks.
        """
        done = 0
        try:
            while done < len(ids):
                chunk = ids[done : done + self.plan.chunk]
                start = sequence.length
                tokens = torch.tensor([chunk], device=self._device)
                positions = torch.arange(start, start + len(chunk), device=self._device).unsqueeze(0)
                with torch.inference_mode():
                    logits = hook.run(self.model, tokens, positions, hook.Forward(self._attention, [sequence]))
                sequence.commit(chunk)
                done += len(chunk)
                if done == len(ids):
                    self.build_index(sequence)
                yield done, logits[0].float()
        except BaseException:
            sequence.rollback()
            raise

    def build_index(self, sequence: Sequence, mode: str | None = None) -> None:
        """Tables for the layers that the next step will sample; nothing where it will not."""
        if self.samples(sequence, mode):
            for layer, cache in enumerate(sequence.layers):
                if self._indexed(layer):
                    self._attention.index(layer, cache)

    def decode(
        self, sequences: list[Sequence], tokens: list[int], mode: str | None = None, measure_error: bool = False
    ) -> Step:
        """Feed one token to each sequence in one forward, whatever their lengths.

        measure_error also computes the exact result of every sampled layer beside it (slow; for bench and eval).
        """
        begin = time.perf_counter_ns()
        sampled = [self.samples(sequence, mode) for sequence in sequences]
        never = [False] * len(sequences)
        per_layer = [sampled if self._indexed(layer) else never for layer in range(len(self._specs))]
        forward = hook.Forward(self._attention, sequences, per_layer)
        forward.record.errors = [] if measure_error else None
        ids = torch.tensor([[token] for token in tokens], device=self._device)
        positions = torch.tensor([[sequence.length] for sequence in sequences], device=self._device)
        try:
            with torch.inference_mode():
                logits = hook.run(self.model, ids, positions, forward).float()
        except BaseException:
            for sequence in sequences:
                sequence.rollback()
            raise
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.commit([token])
        return self._step(logits, forward, time.perf_counter_ns() - begin)

    def _step(self, logits: torch.Tensor, forward: hook.Forward, wall_ns: int) -> Step:
        record, count = forward.record, len(forward.sequences)
        stages = {stage: record.ns.get(stage, 0) / 1e6 for stage in STAGES}
        stages["other"] = max(0.0, wall_ns / 1e6 - sum(stages.values()))
        stats = StepStats(
            batch=count,
            wall_ms=wall_ns / 1e6,
            stages_ms=stages,
            sampled={layer: sum(counts) for layer, counts in record.sampled.items()},
            offloaded={layer: sum(counts) for layer, counts in record.offloaded.items()},
        )
        per_sequence = [
            [sum(counts[b] for counts in table.values()) for b in range(count)]
            for table in (record.sampled, record.offloaded)
        ]
        errors = torch.cat([e.flatten() for e in record.errors]) if record.errors else None
        return Step(logits, stats, per_sequence[0], per_sequence[1], errors)

    def generate(self, requests: Iterable[Request], batch_size: int = 1) -> Iterator[Event]:
        """Answer requests, up to `batch_size` decoded together; the next one is prefilled when a slot is free."""
        from magicpig_cli.engine.scheduler import Scheduler

        return Scheduler(self, requests, batch_size).run()

    def cancel(self, key: str) -> None:
        """End the answer with this key at the next chunk or step; it finishes as `interrupted`."""
        self._cancelled.add(key)

    def take_cancelled(self, key: str) -> bool:
        """Whether `cancel(key)` was called since the last time this was asked."""
        if key in self._cancelled:
            self._cancelled.discard(key)
            return True
        return False

    def memory(self) -> dict[str, int]:
        """Bytes of all living sequences' rows and indexes, of the process, and on the GPU."""
        living = list(self._sequences)
        return {
            "kv_bytes": sum(sequence.kv_bytes for sequence in living),
            "index_bytes": sum(sequence.index_bytes for sequence in living),
            "rss_bytes": psutil.Process().memory_info().rss,
            "vram_bytes": torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0,
        }

    def attention_summary(self) -> dict[str, object]:
        """The keys of `attention` in the JSON documents, sampled ratio aside."""
        sampling = self.plan.mode != "exact"
        return {
            "mode": self.plan.mode,
            "K": self.plan.K if sampling else None,
            "L": self.plan.L if sampling else None,
            "sink": self.plan.sink,
            "local": self.plan.local,
            "dense_layers": list(self.plan.dense_layers) if sampling else [],
        }
