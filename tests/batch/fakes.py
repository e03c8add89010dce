"""An engine that answers from a script: the part of the engine's interface that a batch uses, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.errors import ContextError
from magicpig_cli.events import Event, Failed, Finished, PrefillProgress, StepStats, Timing, TokenEvent


@dataclass(frozen=True)
class FakeRequest:
    key: str
    prompt_ids: list[int]
    options: GenerationOptions
    prefix: SharedPrefix | None = None


@dataclass
class FakeEngine:
    """The answer to a prompt is its own ids, one per step; `max_tokens` cuts it. Slots are filled in order.

    Prompts that begin with a token of `fails` yield Failed; `breaks_at` raises at that decode step. A shared prefix is
    read with the first request that names it and forgotten when its last user has ended.
    """

    context: int = 1000
    model_name: str = "fake"
    load_s: float = 0.25
    fails: frozenset[int] = frozenset()
    breaks_at: int | None = None
    pulled: list[str] = field(default_factory=list)  # keys in the order in which requests were taken
    finished: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)  # sequences of each decode step
    read: dict[SharedPrefix, list[int]] = field(default_factory=dict)  # living prefixes and their token ids
    read_tokens: int = 0  # of prompts and prefixes
    most_prefixes: int = 0  # alive at once

    def request(
        self, key: str, prompt_ids: list[int], options: GenerationOptions, prefix: SharedPrefix | None = None
    ) -> FakeRequest:
        if len(prompt_ids) >= self.context:
            raise ContextError(f"{len(prompt_ids)} prompt tokens do not fit {self.context}")
        return FakeRequest(key, prompt_ids, options, prefix)

    def generate(self, requests: Iterable[FakeRequest], batch_size: int, max_delay_s: float) -> Iterator[Event]:
        waiting = iter(requests)
        running: list[tuple[FakeRequest, list[int]]] = []
        while True:
            while len(running) < batch_size and (request := next(waiting, None)) is not None:
                self.pulled.append(request.key)
                self._read(request)
                if request.prompt_ids[0] in self.fails:
                    self._end(request)
                    yield Failed(request.key, "ModelError", "it would not")
                    continue
                yield PrefillProgress(request.key, 0, len(request.prompt_ids), 0.0)
                yield PrefillProgress(request.key, len(request.prompt_ids), len(request.prompt_ids), 0.1)
                running.append((request, [request.prompt_ids[0]]))
            if not running:
                return
            if self.breaks_at == len(self.batches):
                raise RuntimeError("the device is gone")
            self.batches.append(len(running))
            yield StepStats(len(running), 10.0, {})
            for request, tokens in running:
                tokens.append(request.prompt_ids[len(tokens)] if len(tokens) < len(request.prompt_ids) else 0)
                yield TokenEvent(request.key, tokens[-1], "t")
            for request, tokens in list(running):
                wanted = request.options.max_tokens or len(request.prompt_ids)
                if len(tokens) >= wanted:
                    running.remove((request, tokens))
                    self.finished.append(request.key)
                    self._end(request)
                    yield _finished(request, tuple(tokens))

    def _read(self, request: FakeRequest) -> None:
        chain = list(request.prefix.chain())[::-1] if request.prefix else []
        begin = 0
        for prefix in chain:
            assert prefix.users > 0
            ids = request.prompt_ids[: prefix.tokens]
            assert len(ids) == prefix.tokens < len(request.prompt_ids)
            if prefix not in self.read:
                self.read_tokens += prefix.tokens - begin
                self.read[prefix] = ids
            assert self.read[prefix] == ids
            begin = prefix.tokens
        self.read_tokens += len(request.prompt_ids) - begin
        self.most_prefixes = max(self.most_prefixes, len(self.read))

    def _end(self, request: FakeRequest) -> None:
        if request.prefix is not None:
            request.prefix.release()
            self.read = {prefix: ids for prefix, ids in self.read.items() if prefix.users > 0}


def _finished(request: FakeRequest, tokens: tuple[int, ...]) -> Finished:
    return Finished(
        key=request.key, reason="length", token_ids=tokens, text=" ".join(map(str, tokens)), tail="",
        prompt_tokens=len(request.prompt_ids), reused_tokens=request.prefix.tokens if request.prefix else 0,
        timing=Timing(0.1, 0.125, tuple(10.0 for _ in tokens[1:])), sampled=3, offloaded=12, seed=request.options.seed,
    )  # fmt: skip
