"""An engine that answers from a script: the part of the engine's interface that a batch uses, without a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from magicpig_cli.config import GenerationOptions
from magicpig_cli.errors import ContextError
from magicpig_cli.events import Event, Failed, Finished, PrefillProgress, StepStats, Timing, TokenEvent


@dataclass(frozen=True)
class FakeRequest:
    key: str
    prompt_ids: list[int]
    options: GenerationOptions


@dataclass
class FakeEngine:
    """The answer to a prompt is its own ids, one per step; `max_tokens` cuts it. Slots are filled in order.

    Prompts that begin with a token of `fails` yield Failed; `breaks_at` raises at that decode step.
    """

    context: int = 1000
    model_name: str = "fake"
    load_s: float = 0.25
    fails: frozenset[int] = frozenset()
    breaks_at: int | None = None
    pulled: list[str] = field(default_factory=list)  # keys in the order in which requests were taken
    finished: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)  # sequences of each decode step

    def request(self, key: str, prompt_ids: list[int], options: GenerationOptions) -> FakeRequest:
        if len(prompt_ids) >= self.context:
            raise ContextError(f"{len(prompt_ids)} prompt tokens do not fit {self.context}")
        return FakeRequest(key, prompt_ids, options)

    def generate(self, requests: Iterable[FakeRequest], batch_size: int) -> Iterator[Event]:
        waiting = iter(requests)
        running: list[tuple[FakeRequest, list[int]]] = []
        while True:
            while len(running) < batch_size and (request := next(waiting, None)) is not None:
                self.pulled.append(request.key)
                if request.prompt_ids[0] in self.fails:
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
                    yield _finished(request, tuple(tokens))


def _finished(request: FakeRequest, tokens: tuple[int, ...]) -> Finished:
    return Finished(
        key=request.key, reason="length", token_ids=tokens, text=" ".join(map(str, tokens)), tail="",
        prompt_tokens=len(request.prompt_ids), reused_tokens=0,
        timing=Timing(0.1, 0.125, tuple(10.0 for _ in tokens[1:])), sampled=3, offloaded=12, seed=request.options.seed,
    )  # fmt: skip
