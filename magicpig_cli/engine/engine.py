"""The engine: a loaded model, and prefill, decode and generate over token ids. It yields events and never prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from magicpig_cli import kernels
from magicpig_cli.cache.saved import SavedCache
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cache.snapshot import Snapshot, file_bytes, write
from magicpig_cli.config import MAX_DELAY_S, AttentionOptions, GenerationOptions, Settings
from magicpig_cli.engine.admission import Admission
from magicpig_cli.engine.answer import Request
from magicpig_cli.engine.conversation import ChatCodec, common_prefix
from magicpig_cli.engine.identity import identity_of, model_differences, sampler_differences, sampler_of
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.engine.sampling import resolve_sampling
from magicpig_cli.engine.scheduler import Scheduler
from magicpig_cli.errors import ContextError, MagicpigError, UsageError
from magicpig_cli.events import MEASURING, Event, LoadProgress
from magicpig_cli.model import loader
from magicpig_cli.model.frequencies import settle
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import Plan
from magicpig_cli.planner.checks import check_signatures
from magicpig_cli.planning import plan_here

__all__ = ["Engine", "Request"]


class Engine:
    """A loaded model with its plan, text codec and runner. Sequences belong to the callers."""

    def __init__(
        self, settings: Settings, loaded: loader.Loaded, device: torch.device, planned: Plan, load_s: float = 0.0
    ) -> None:
        self.settings = settings
        self.tokenizer = loaded.tokenizer
        self.generation_config = loaded.generation_config
        self.model_name = loaded.name
        self.revision = loaded.revision
        self.params = loaded.params
        self.load_s = load_s
        self.isa = kernels.isa.current()
        self.plan = self._planned = planned
        self.shape: ModelShape = planned.shape
        self.codec = ChatCodec(
            loaded.tokenizer, loaded.config, loaded.generation_config, settings.model.chat_template
        )  # fmt: skip
        self.context = self.plan.context
        self.threads = self.plan.threads
        self._device = device
        settle(loaded.model, self.context)
        self.identity = identity_of(loaded, planned)
        self.sampler = sampler_of(planned, settings.attention.hash_seed)
        self.runner = ModelRunner(loaded.model, self.shape, self.plan, device, settings.attention.hash_seed)
        self.admission = Admission(self.plan)
        self._cancelled: set[str] = set()
        torch.set_num_threads(self.threads)

    @classmethod
    def load(
        cls,
        settings: Settings,
        on_progress: Callable[[LoadProgress], None] | None = None,
        planned: Plan | None = None,
    ) -> Engine:
        """Load what `settings` name. Refuses before weights are read what cannot work or fit.

        planned: what `plan_here` has given for these settings, where somebody has asked already.
        A machine whose speeds are not known yet is measured first if on_progress can be told (stage MEASURING).
        Raises ModelError, ContextError, MemoryBudgetError or UsageError.
        """
        begin = time.perf_counter()
        device = loader.resolve_device(settings.model.device)
        config = loader.load_config(settings.model)
        loader.check_supported(config, settings.model.model)
        announce = None if on_progress is None else lambda: on_progress(LoadProgress(MEASURING))
        planned = planned or plan_here(loader.load_shape(config, settings.model), settings, announce)
        loaded = loader.load_model(settings.model, device, on_progress)
        return cls(settings, loaded, device, planned, time.perf_counter() - begin)

    @property
    def device(self) -> str:
        """`cpu`, or the name of the GPU."""
        return "cpu" if self._device.type == "cpu" else torch.cuda.get_device_name(self._device)

    @property
    def sampler_at_start(self) -> str | None:
        """Name of the sampler that the model was loaded for; None = exact attention."""
        return self._planned.sampler

    def sample_as(self, attention: AttentionOptions) -> None:
        """From now on attend exactly, or sample with another budget or target error; None = as the model was loaded.

        Sequences keep their rows and what indexes they have. Raises UsageError for what is out of range or an option of
        another sampler.
        """
        planned, sampler = self._planned, self._planned.sampler
        check_signatures(attention)
        exact = attention.mode == "exact"
        if sampler != "rabitq" and (attention.budget is not None or attention.target_error is not None):
            raise UsageError(
                f"budget and target error are options of rabitq, and attention is {sampler or 'exact'} here",
                hint="start with --attention rabitq",
            )
        self.plan = replace(
            planned, mode="exact" if exact else planned.mode, budget=attention.budget or planned.budget,
            target_error=attention.target_error or planned.target_error,
        )  # fmt: skip
        self.sampler = sampler_of(self.plan, self.settings.attention.hash_seed)
        self.runner.follow(self.plan)

    def new_sequence(self) -> Sequence:
        """An empty sequence, to be continued over several requests."""
        return self.runner.new_sequence()

    def save(self, taken: Snapshot, path: Path, **how: Any) -> int:
        """Write keys, values and index to a file; returns its size. how: see `cache.snapshot.write`, for errors too."""
        return write(taken, path, self.identity, self.sampler, **how)

    def saved_bytes(self, taken: Snapshot) -> int:
        """How large the file will be that `save` writes."""
        return file_bytes(taken, self.identity, self.sampler)

    def check_saved(self, saved: SavedCache) -> None:
        """Raise MagicpigError if a file's keys and values are not those of this model, naming what differs."""
        if different := model_differences(self.identity, saved.identity):
            raise MagicpigError(
                f"{saved.path} belongs to another model or another form of it: {'; '.join(different)}",
                hint="the same --dtype and --quantize as then if those differ, another file, or delete this one",
            )

    def restore(self, saved: SavedCache, prompt_ids: list[int]) -> tuple[Sequence, str | None]:
        """A sequence of the tokens that a file and a prompt share at their beginning, one less than the prompt at most.

        Also, in words, why the index of the file cannot be used and will be made anew: None where it is used, or where
        nothing will be sampled. Raises MagicpigError as `check_saved` does, and for a damaged file.
        """
        self.check_saved(saved)
        length = min(common_prefix(saved.ids, prompt_ids), len(prompt_ids) - 1)
        unusable = [] if self.sampler is None else sampler_differences(self.sampler, saved.sampler)
        sequence = self.runner.restore(saved, length, index=self.sampler is not None and not unusable)
        return sequence, "; ".join(unusable) if unusable and self.runner.samples(sequence) else None

    def fork(self, sequence: Sequence) -> Sequence:
        """A sequence with the same tokens, continued on its own; both share the memory of what they have in common."""
        return self.runner.fork(sequence)

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

    def request(
        self, key: str, prompt_ids: list[int], options: GenerationOptions, sequence: Sequence | None = None,
        default_seed: int | None = None, prefix: SharedPrefix | None = None,
    ) -> Request:  # fmt: skip
        """A request with sampling resolved against the model's own defaults. Raises MagicpigError."""
        if not prompt_ids:
            raise MagicpigError("the prompt has no tokens", hint="check --chat-template, or ask something")
        self.check_fits(len(prompt_ids), options.max_tokens)
        sampling = resolve_sampling(options, self.generation_config)
        return Request(key, prompt_ids, sampling, default_seed, sequence, prefix)

    def generate(
        self, requests: Iterable[Request], batch_size: int = 1, max_delay_s: float = MAX_DELAY_S
    ) -> Iterator[Event]:
        """Answer requests, up to `batch_size` decoded together; the next one joins when a slot and memory are free.

        max_delay_s: for how long running answers may wait while prompts are read; one chunk is always read.
        """
        return Scheduler(self, requests, batch_size, max_delay_s).run()

    def cancel(self, key: str) -> None:
        """End the answer with this key at the next chunk or step; it finishes as `interrupted`."""
        self._cancelled.add(key)

    def take_cancelled(self, key: str) -> bool:
        """Whether `cancel(key)` was called since the last time this was asked."""
        if key in self._cancelled:
            self._cancelled.discard(key)
            return True
        return False

    def new_notices(self) -> list[str]:
        """What had to be done differently, each said once: prompts by the codec, copies, steps without CUDA graphs."""
        runner = self.runner
        return [*self.codec.new_notices(), *runner.staging.new_notices(), *runner.segments.new_notices()]

    def memory(self) -> dict[str, int]:
        """Bytes of all living sequences' rows and indexes (shared ones once), of the process, and on the GPU."""
        return {
            "kv_bytes": self.runner.kv_bytes,
            "index_bytes": self.runner.index_bytes,
            "rss_bytes": psutil.Process().memory_info().rss,
            "vram_bytes": torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0,
        }

    def attention_summary(self) -> dict[str, object]:
        """The keys of `attention` in the JSON documents, apart from what an answer has sampled."""
        plan = self.plan
        return {
            "mode": plan.mode,
            "sampler": plan.sampler,
            **plan.sampler_options,
            "sink": plan.sink,
            "local": plan.local,
            "dense_layers": list(plan.dense_layers) if plan.sampler is not None else [],
        }
