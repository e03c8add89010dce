#!/usr/bin/env python3
"""Continuous batching of the demo model in one run: tokens per second with 1, 2, 4 and 8 sequences together, and many
questions about one document with and without a shared prefix.

The sizes take turns (1, 2, 4, 8, 1, 2, …); medians. With --json the last line of stdout is one document; progress and
the goals go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

# Before torch loads libgomp, as the command does (docs/decisions/002).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.errors import UsageError
from magicpig_cli.events import Finished, StepStats
from magicpig_cli.ui import console
from magicpig_cli.units import parse_token_list, parse_tokens

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine, Request

GAIN_GOAL = 2.0  # tokens per second of 8 together over one alone
SHARED_GOAL = 0.25  # wall time with a shared prefix over without


@dataclass
class _Size:
    """What was measured with so many sequences together."""

    batch: int
    decode_tok_s: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    stages_ms: dict[str, list[float]] = field(default_factory=dict)  # of a step
    wall_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        wall, decode = statistics.median(self.wall_s), statistics.median(self.decode_s)
        return {
            "batch": self.batch,
            "decode_tok_s": statistics.median(self.decode_tok_s),
            "step_ms": statistics.median(self.step_ms),
            "stages_ms": {stage: statistics.median(values) for stage, values in self.stages_ms.items()},
            "wall_s": wall,
            "decode_share": decode / wall,
        }


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)

    def work() -> None:
        result = _run(options)
        _say_goals(result)
        print(json.dumps(result) if options.json else _table(result))

    return console.exit_status(work)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--sizes", default="1,2,4,8", metavar="N,N…", help="sequences together (%(default)s)")
    parser.add_argument("--tokens", default="2k", metavar="N", help="of a prompt (%(default)s)")
    parser.add_argument("--gen-tokens", type=int, default=32, metavar="N", help="of an answer (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of which the median counts (%(default)s)")
    parser.add_argument("--quantize", default="int8", metavar="none|int8|int4", help="weights (%(default)s)")
    parser.add_argument("--attention", default="exact", metavar="exact|lsh|auto", help="(%(default)s)")
    parser.add_argument("--questions", type=int, default=20, metavar="N", help="about one document; 0 = leave it out")
    parser.add_argument("--document", default="6k", metavar="N", help="tokens of that document (%(default)s)")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="default: as planned")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    from magicpig_cli import hardware
    from magicpig_cli.bench import report
    from magicpig_cli.engine.engine import Engine

    sizes = parse_token_list(options.sizes)
    if min(sizes) < 1 or options.gen_tokens < 2 or options.rounds < 1:
        raise UsageError("sizes and rounds are at least 1, an answer has at least 2 tokens: its first takes no step")
    settings = Settings(
        ModelOptions("demo", quantize=options.quantize), AttentionOptions(mode=options.attention),
        threads=options.threads,
    )  # fmt: skip
    engine = Engine.load(settings)
    measured = {size: _Size(size) for size in sizes}
    for turn in range(options.rounds):
        for size in sizes:
            console.say(f"round {turn + 1} of {options.rounds}: {size} together")
            _measure(engine, options, measured[size], max(sizes))
    result: dict[str, Any] = {
        "meta": {**report.meta(engine, hardware.probe()), "quantize": options.quantize,
                 "prompt_tokens": parse_tokens(options.tokens), "gen_tokens": options.gen_tokens},
        "rows": [measured[size].row() for size in sizes],
    }  # fmt: skip
    if options.questions:
        result["shared"] = _shared(engine, options)
    return result


def _text_ids(engine: Engine, length: int, skip: int) -> list[int]:
    """`length` ids of natural text, from another place for each `skip`."""
    from magicpig_cli.corpus import natural_text, repeat_ids

    ids = engine.codec.encode_raw(natural_text())
    start = skip * 997 % len(ids)
    return repeat_ids(ids[start:] + ids[:start], length)


def _requests(engine: Engine, options: argparse.Namespace, count: int) -> list[Request]:
    length = parse_tokens(options.tokens)
    wanted = GenerationOptions(max_tokens=options.gen_tokens, temperature=0.0)
    return [engine.request(str(n), _text_ids(engine, length, n), wanted) for n in range(count)]


def _measure(engine: Engine, options: argparse.Namespace, size: _Size, count: int) -> None:
    """Answer `count` prompts; only steps of a full batch are timed, the time of the run is that of all."""
    begin = time.perf_counter()
    events = engine.generate(_requests(engine, options, count), size.batch, max_delay_s=float("inf"))
    steps = [event for event in events if isinstance(event, StepStats)]
    size.wall_s.append(time.perf_counter() - begin)
    size.decode_s.append(sum(step.wall_ms for step in steps) / 1000)
    full = [step for step in steps if step.batch == size.batch]
    size.step_ms.append(statistics.median(step.wall_ms for step in full))
    size.decode_tok_s.append(1000 * size.batch / size.step_ms[-1])
    for stage in full[0].stages_ms:
        size.stages_ms.setdefault(stage, []).append(statistics.median(step.stages_ms[stage] for step in full))


def _shared(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Wall time of many questions about one document, read once or once per question."""
    from magicpig_cli.engine.prefix import SharedPrefix

    document, chunk = _text_ids(engine, parse_tokens(options.document), 0), engine.plan.chunk
    prefix_tokens = len(document) // chunk * chunk
    wanted = GenerationOptions(max_tokens=options.gen_tokens, temperature=0.0)
    walls, answers = {}, {}
    for share in (True, False):
        console.say(f"{options.questions} questions, the document read {'once' if share else 'each time'}")
        prefix = SharedPrefix(prefix_tokens, users=options.questions) if share else None
        asked = [
            engine.request(str(n), document + _text_ids(engine, 40, n + 1), wanted, prefix=prefix)
            for n in range(options.questions)
        ]
        begin = time.perf_counter()
        events = engine.generate(asked, engine.plan.max_batch)
        answers[share] = {event.key: event.token_ids for event in events if isinstance(event, Finished)}
        walls[share] = time.perf_counter() - begin
    return {
        "questions": options.questions,
        "document_tokens": len(document),
        "wall_s": walls[True],
        "wall_s_unshared": walls[False],
        "ratio": walls[True] / walls[False],
        "equal_answers": sum(answers[True][key] == answers[False][key] for key in answers[False]),
    }


def _say_goals(result: dict[str, Any]) -> None:
    rows = {row["batch"]: row["decode_tok_s"] for row in result["rows"]}
    if 1 in rows and 8 in rows:
        gain = rows[8] / rows[1]
        console.say(f"8 together over one alone: {gain:.2f} ({GAIN_GOAL}) {_met(gain >= GAIN_GOAL)}")
    if "shared" in result:
        ratio = result["shared"]["ratio"]
        console.say(f"shared prefix over none: {ratio:.2f} ({SHARED_GOAL}) {_met(ratio <= SHARED_GOAL)}")


def _met(yes: bool) -> str:
    return "met" if yes else "NOT MET"


def _table(result: dict[str, Any]) -> str:
    lines = ["batch  tok/s  step ms  decode share  stages ms"]
    for row in result["rows"]:
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in row["stages_ms"].items() if ms >= 0.05)
        figures = f"{row['batch']:5}  {row['decode_tok_s']:5.1f}  {row['step_ms']:7.1f}  {row['decode_share']:12.0%}"
        lines.append(f"{figures}  {stages}")
    if "shared" in result:
        shared = result["shared"]
        lines.append(
            f"{shared['questions']} questions about {shared['document_tokens']:,} tokens: {shared['wall_s']:.1f} s, "
            f"{shared['wall_s_unshared']:.1f} s unshared, {shared['equal_answers']} answers equal"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
