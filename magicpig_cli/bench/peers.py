"""Our decode and prefill beside llama.cpp's on the same prompt: the tools take turns, the faster way of each counts.

A context includes the generated tokens. Up to the model's own context both read real text. Beyond it ours attends to
repeated rows (bench/fill.py) and llama.cpp, which cannot, is read off the line through its measured points: its time
per token grows linearly with the context, as every step reads all keys.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from magicpig_cli.units import format_tokens

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence as TokenSequence
    from magicpig_cli.engine.engine import Engine

Row = dict[str, Any]
GOALS = {"2k": None, "6k": 1.3, "32k": 4.0}  # of decode, llama.cpp's time over ours; the contract's keys of `ratio`
WARMUP_TOKENS = 128  # read before a prompt is timed: the first products of a process pay for page faults and set-up
PREFILL_GOAL = 1.5  # tokens per second of ours over llama.cpp's


class Tool(Protocol):
    """A program with a model in it. It keeps the prompt that it has read, and may be asked about parts of it."""

    name: str
    weights: str

    def prefill(self, ids: list[int]) -> float:
        """Seconds to read a prompt of which nothing is held."""

    def decode(self, ids: list[int], count: int) -> float:
        """Mean milliseconds per token of `count` greedy steps after `ids`."""


@dataclass(frozen=True, slots=True)
class PeersRequest:
    """What to measure. contexts: of ours; those longer than `real` are extrapolated for the peer, from `points`."""

    contexts: tuple[int, ...]
    points: tuple[int, ...]  # contexts where the peer alone is measured for the line
    real: int  # tokens that the model was made for
    prefill: int  # context whose prompt is the one that is timed
    gen_tokens: int
    rounds: int

    def prompt(self, context: int) -> int:
        """Tokens before the first generated one, which comes out of the prompt and is not timed."""
        return context - self.gen_tokens - 1

    def order(self) -> list[int]:
        """Repeated rows first, growing; then real text, cut back further and further: nothing is read twice."""
        everything = sorted({*self.contexts, *self.points})
        return [c for c in everything if c > self.real] + [c for c in reversed(everything) if c <= self.real]


@dataclass
class Measured:
    """Of one tool."""

    prefill_s: float = float("nan")
    samples_ms: dict[int, list[float]] = field(default_factory=dict)  # context → one mean per round

    def tpot_ms(self, context: int) -> float:
        return median(self.samples_ms[context])


@dataclass(frozen=True, slots=True)
class Line:
    """ms per token = base_ms + ms_per_token · context."""

    base_ms: float
    ms_per_token: float

    @classmethod
    def through(cls, points: dict[int, float]) -> Line:
        """Least squares; points: context → ms."""
        slope, base = np.polyfit(list(points), list(points.values()), 1)
        return cls(float(base), float(slope))

    def at(self, context: int) -> float:
        return self.base_ms + self.ms_per_token * context


def measure(
    ours: Sequence[Tool], peers: Sequence[Tool], ids: list[int], request: PeersRequest
) -> Iterator[str | list[Measured]]:
    """Runs everything. Yields a line of progress before each part, and at the end what was measured, ours first.

    ids: the text, at least as many tokens as the longest context up to `request.real`.
    """
    from magicpig_cli.corpus import repeat_ids

    tools = [*ours, *peers]
    measured = [Measured() for _ in tools]
    for tool, result in zip(tools, measured, strict=True):
        yield f"prefill of {request.prompt(request.prefill):,} tokens: {describe(tool)}"
        prompt = ids[: request.prompt(request.prefill)]
        tool.prefill(prompt[:WARMUP_TOKENS])
        result.prefill_s = tool.prefill(prompt)
    for context in request.order():
        taking_part = [
            (tool, result)
            for number, (tool, result) in enumerate(zip(tools, measured, strict=True))
            if (context in request.contexts if number < len(ours) else context <= request.real)
        ]
        yield f"decode at {context:,} tokens"
        prompt = repeat_ids(ids, request.prompt(context))
        for tool, _ in taking_part:
            tool.decode(prompt, min(2, request.gen_tokens))  # warm, and holding the prompt
        for _ in range(request.rounds):
            for tool, result in taking_part:
                result.samples_ms.setdefault(context, []).append(tool.decode(prompt, request.gen_tokens))
    yield measured


def document(
    meta: Row, ours: Sequence[Tool], peers: Sequence[Tool], measured: Sequence[Measured], request: PeersRequest
) -> Row:
    """CLI.md's JSON of bench_peers. peers: variants of one peer, of which the faster one counts at each context."""
    mine, theirs = measured[: len(ours)], measured[len(ours) :]
    peer_rows = _peer_rows(peers, theirs, request)
    peer_ms = {row["context"]: row["tpot_ms"] for row in peer_rows}
    ratios = {
        tool.weights: {format_tokens(c): peer_ms[c] / result.tpot_ms(c) for c in request.contexts}
        for tool, result in zip(ours, mine, strict=True)
    }
    smallest = ours[-1].weights  # the nearest to the peer's 4 bits
    return {
        "meta": {**meta, "gen_tokens": request.gen_tokens, "rounds": request.rounds, "ratio_weights": smallest},
        "rows": [*_our_rows(ours, mine, request), *peer_rows],
        "ratio": {key: ratios[smallest].get(key) for key in dict.fromkeys([*GOALS, *ratios[smallest]])},
        "ratios": ratios,
        "prefill": _prefill(ours, peers, mine, theirs, request.prompt(request.prefill)),
    }


def _our_rows(ours: Iterable[Tool], measured: Iterable[Measured], request: PeersRequest) -> list[Row]:
    return [
        {
            "tool": tool.name, "weights": tool.weights, "context": context, "tpot_ms": result.tpot_ms(context),
            "fitted": False, "fill": "real" if context <= request.real else "tiled",
            "samples_ms": result.samples_ms[context],
        }
        for tool, result in zip(ours, measured, strict=True)
        for context in sorted(request.contexts)
    ]  # fmt: skip


def _peer_rows(peers: Sequence[Tool], measured: Sequence[Measured], request: PeersRequest) -> list[Row]:
    """One row per context: the faster variant, and what each of them took."""
    lines = [Line.through({c: result.tpot_ms(c) for c in result.samples_ms}) for result in measured]
    rows = []
    for context in sorted({*request.contexts, *request.points}):
        fitted = context > request.real
        each = [
            line.at(context) if fitted else result.tpot_ms(context)
            for line, result in zip(lines, measured, strict=True)
        ]
        rows.append(
            {
                "tool": peers[0].name, "weights": peers[0].weights, "context": context, "tpot_ms": min(each),
                "fitted": fitted, "variants_ms": {_variant(p): ms for p, ms in zip(peers, each, strict=True)},
            }
        )  # fmt: skip
    return rows


def _prefill(
    ours: Sequence[Tool], peers: Sequence[Tool], mine: Sequence[Measured], theirs: Sequence[Measured], tokens: int
) -> Row:
    rows = [
        {"tool": tool.name, "weights": tool.weights, "variant": _variant(tool), "tok_s": tokens / result.prefill_s}
        for tool, result in zip([*ours, *peers], [*mine, *theirs], strict=True)
    ]
    best = max(tokens / result.prefill_s for result in theirs)
    ratio = {tool.weights: tokens / result.prefill_s / best for tool, result in zip(ours, mine, strict=True)}
    return {"tokens": tokens, "rows": rows, "ratio": ratio}


def _variant(tool: Tool) -> str | None:
    flash = getattr(tool, "flash", None)
    return None if flash is None else f"flash_{'on' if flash else 'off'}"


def describe(tool: Tool) -> str:
    """`llama.cpp Q4_1 flash_on`."""
    return " ".join(filter(None, (tool.name, tool.weights, _variant(tool))))


class Ours:
    """This program as a user gets it, all settings but the weights left to themselves."""

    name = "magicpig"

    def __init__(self, engine: Engine, weights: str) -> None:
        self.engine = engine
        self.weights = weights
        self._real = engine.new_sequence()
        self._tiled: TokenSequence | None = None

    def prefill(self, ids: list[int]) -> float:
        self._real, self._tiled = self.engine.new_sequence(), None
        begin = time.perf_counter()
        self._read(ids)
        return time.perf_counter() - begin

    def _read(self, ids: list[int]) -> None:
        for _ in self.engine.runner.prefill(self._real, ids):
            pass

    def decode(self, ids: list[int], count: int) -> float:
        sequence, runner = self._holding(ids), self.engine.runner
        runner.build_index(sequence)  # part of reading the prompt
        token = ids[-1]
        begin = time.perf_counter()
        for _ in range(count):
            token = int(runner.decode([sequence], [token]).logits.argmax())
        spent = time.perf_counter() - begin
        sequence.truncate(len(ids))
        return spent * 1000 / count

    def _holding(self, ids: list[int]) -> TokenSequence:
        """A sequence as long as ids: real text, cut back or read on, or beyond the model's context its rows again."""
        if len(ids) <= self.engine.shape.context:
            self._tiled = None
            self._real.truncate(len(ids))
            self._read(ids[self._real.length :])
            return self._real
        from magicpig_cli.bench.fill import duplicate, repeat_rows
        from magicpig_cli.model.rotary import RotaryShift

        if self._tiled is None:
            self._tiled = duplicate(self.engine, self._real)
        self._tiled.truncate(len(ids))
        if self._tiled.length < len(ids):
            runner = self.engine.runner
            for _ in repeat_rows(self._tiled, len(ids), RotaryShift(runner.model, runner.key_rotation)):
                pass
        return self._tiled
