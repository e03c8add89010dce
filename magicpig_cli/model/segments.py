"""Decode steps as recorded segments: what a model computes between two calls of attention, launched by one call each.

The family's own forward is run once while it is recorded (`graphs.py`), and whenever it calls attention, one segment
ends and the next begins. From then on a step replays them and calls attention in between; no Python of transformers
runs. Nothing is known of families here, and nothing computed a second time: weights, quantized layers and number types
are the model's. What was recorded is used after it has shown, on other tokens at other positions, that it gives
attention and returns what the forward does. Whatever cannot be recorded runs as before (docs/decisions/018).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from magicpig_cli.attention.base import LogitRule
from magicpig_cli.config import RECORDED_BATCHES
from magicpig_cli.model import hook
from magicpig_cli.model.graphs import CaptureRefused, GraphExecutor, NoHostReads, Replayable
from magicpig_cli.model.trial import Attended, StandIn, Trial, close

# Share of the largest value by which a replay may be off. The same operators run on the same numbers, so that nothing
# should differ; a product may be summed in another order, and a segment that was not replayed leaves NaN.
_SAME = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_POSITIONS = (3, 1234)  # of the first token that is recorded, and of the first that both ways are run on


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of attention: what it is given, in the memory of the segment before, and where the next one reads."""

    given: Attended
    out: torch.Tensor  # [B, 1, H, D]


@dataclass(slots=True)
class _Recorder(StandIn):
    """Stands for attention while a forward is recorded."""

    executor: GraphExecutor
    prefill: bool = False
    segments: list[Replayable] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)

    def attend(
        self, layer: int, window: int | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        rule: LogitRule,
    ) -> torch.Tensor:  # fmt: skip
        self.segments.append(self.executor.end())
        given = Attended(layer, window, rule, query, key, value)
        out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        self.calls.append(_Call(given, out))
        self.executor.begin()
        return out


@dataclass(frozen=True, slots=True)
class Recording:
    """A decode step of B tokens. All tensors stay where they are: replaying writes into them."""

    ids: torch.Tensor  # [B, 1]
    positions: torch.Tensor  # [B, 1]
    segments: list[Replayable]  # one more than calls
    calls: list[_Call]
    logits: torch.Tensor  # [B, V]

    def replay(self, ids: torch.Tensor, positions: torch.Tensor, forward: hook.Attends) -> torch.Tensor:
        """As `hook.run`. What attention is given is overwritten by the next step, what is returned is not."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        for segment, call in zip(self.segments, self.calls, strict=False):
            segment.replay()
            given = call.given
            call.out.copy_(forward.attend(given.layer, given.window, given.q, given.k, given.v, given.rule))
        self.segments[-1].replay()
        return self.logits.clone()

    def poison(self) -> None:
        """Fill what segments write for others with NaN, which stays where one does not write."""
        for call in self.calls:
            for tensor in (call.given.q, call.given.k, call.given.v, call.out):
                tensor.fill_(torch.nan)
        self.logits.fill_(torch.nan)


def record(model: PreTrainedModel, executor: GraphExecutor, batch: int) -> Recording:
    """Run the model's forward on made-up tokens, record it, and compare a replay with it. Raises RuntimeError."""
    with torch.inference_mode(), executor.recording():
        first, second = (_made_up(model, batch, position) for position in _POSITIONS)
        with NoHostReads():  # type: ignore[no-untyped-call]
            hook.run(model, *first, Trial())  # also warms up what is set up at the first call
        own = Trial()
        wanted = hook.run(model, *second, own)
        recording = _recorded(model, executor, *first)
        recording.poison()
        replayed = Trial()
        if not _same(recording.replay(*second, replayed), replayed, wanted, own):
            raise CaptureRefused("a replayed step differs from the model's own")
        return recording


def _made_up(model: PreTrainedModel, batch: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions [B, 1] of a step."""
    count = torch.arange(batch, device=model.device).unsqueeze(1)
    return (count * 7 + position) % model.config.get_text_config().vocab_size, count * 5 + position


def _recorded(model: PreTrainedModel, executor: GraphExecutor, ids: torch.Tensor, positions: torch.Tensor) -> Recording:
    recorder = _Recorder(executor)
    try:
        executor.begin()
        logits = hook.run(model, ids, positions, recorder)
        recorder.segments.append(executor.end())
    except BaseException as problem:
        if not executor.abandon() and isinstance(problem, RuntimeError):
            raise CaptureRefused(str(problem)) from problem
        raise
    return Recording(ids, positions, recorder.segments, recorder.calls, logits)


def _same(got: torch.Tensor, replayed: Trial, wanted: torch.Tensor, own: Trial) -> bool:
    """Whether attention is called with the same in both ways, and the same comes out."""
    calls = [[(call.layer, call.window, call.rule) for call in trial.seen] for trial in (replayed, own)]
    if calls[0] != calls[1]:
        return False
    pairs = [(got, wanted)]
    for a, b in zip(replayed.seen, own.seen, strict=True):
        pairs += [(a.q, b.q), (a.k, b.k), (a.v, b.v)]
    return all(close(a, b, _SAME[b.dtype]) for a, b in pairs)


class Segments:
    """Decode steps of a model: recorded where that can be done, else by its own forward.

    Recordings belong to a batch size and a lane, which nobody else may use at the same time. Each lane keeps those of
    the batch sizes that it decoded last, RECORDED_BATCHES at most. Where modules of the model are replaced, or weights
    moved, afterwards, recordings still do what was recorded.
    """

    def __init__(self, model: PreTrainedModel, make: Callable[[], GraphExecutor] | None) -> None:
        """make: called once for each lane; None: everything runs by the model's own forward."""
        self._model = model
        self._make = make
        self._lanes: dict[int, _Lane] = {}
        self._lock = threading.Lock()  # of what lanes share: they may decode in threads of their own
        self._notices: list[str] = []
        self._unrecorded: set[int] = set()  # batch sizes for which there was no memory, or the like
        self._paused = make is None
        self.replayed = 0  # steps so far
        self.why_never: str | None = None  # if no step is recorded: what the model or CUDA has against it

    def run(self, ids: torch.Tensor, positions: torch.Tensor, forward: hook.Forward) -> torch.Tensor:
        """As `hook.run`: ids and positions [B, T] → logits [B, V]."""
        recording = None if forward.prefill or ids.shape[1] != 1 else self.prepare(ids.shape[0], forward.lane)
        if recording is None:
            return hook.run(self._model, ids, positions, forward)
        self.replayed += 1
        return recording.replay(ids, positions, forward)

    def prepare(self, batch: int, lane: int = 0) -> Recording | None:
        """What steps of so many tokens replay, recorded if this is the first of them; None where they are not."""
        if self._paused or self.why_never is not None or batch in self._unrecorded:
            return None
        with self._lock:
            own = self._lanes.get(lane)
            if own is None:
                assert self._make is not None
                own = self._lanes[lane] = _Lane(self._make())
        if (kept := own.take(batch)) is not None:
            return kept
        try:
            own.make_room()
            own.kept[batch] = record(self._model, own.executor, batch)
        except RuntimeError as problem:
            self._give_up(batch, problem)
            return None
        return own.kept[batch]

    def _give_up(self, batch: int, problem: RuntimeError) -> None:
        """From now on such steps run by the model's own forward."""
        reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        with self._lock:
            if isinstance(problem, CaptureRefused):
                if self.why_never is None:
                    self._notices.append(f"decode steps run without CUDA graphs, which is slower: {reason}")
                self.why_never = reason
            elif batch not in self._unrecorded:
                self._unrecorded.add(batch)
                self._notices.append(f"decode steps of {batch} run without CUDA graphs, which is slower: {reason}")

    def new_notices(self) -> list[str]:
        """What could not be recorded, each said once."""
        with self._lock:
            told, self._notices = self._notices, []
        return told

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every step runs by the model's own forward."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


@dataclass(slots=True)
class _Lane:
    """What one lane has recorded, by batch size; the one used last stands at the end."""

    executor: GraphExecutor
    kept: OrderedDict[int, Recording] = field(default_factory=OrderedDict)

    def take(self, batch: int) -> Recording | None:
        if batch in self.kept:
            self.kept.move_to_end(batch)
        return self.kept.get(batch)

    def make_room(self) -> None:
        """For one more recording."""
        while len(self.kept) >= RECORDED_BATCHES:
            self.kept.popitem(last=False)
