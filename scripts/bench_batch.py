#!/usr/bin/env python3
"""Continuous batching of the demo model in one run: tokens per second with 1, 2, 4 and 8 sequences together, and many
questions about one document with and without a shared prefix.

Prompts are read once, then the sizes take turns (1, 2, 4, 8, 1, 2, …); medians. With --json the last line of stdout is
one document; progress and the goals go to stderr. Most of the time goes to prompts: on two cores about seven minutes,
of which six to 20 questions about 6k tokens, and with --quick, which asks fewer about less, not two.
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
from magicpig_cli.events import Finished, PrefillProgress, StepStats
from magicpig_cli.ui import console
from magicpig_cli.units import parse_token_list, parse_tokens

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.engine.engine import Engine

GAIN_GOAL = 2.0  # tokens per second of 8 together over one alone
SHARED_GOAL = 0.25  # wall time with a shared prefix over without
GOAL_FROM = 20  # questions
FULL = (20, "6k")  # questions, about so many tokens
QUICK = (4, "2k")


@dataclass
class _Size:
    """What was measured with so many sequences together."""

    batch: int
    decode_tok_s: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    stages_ms: dict[str, list[float]] = field(default_factory=dict)  # of a step

    def row(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "decode_tok_s": statistics.median(self.decode_tok_s),
            "step_ms": statistics.median(self.step_ms),
            "stages_ms": {stage: statistics.median(values) for stage, values in self.stages_ms.items()},
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
    parser.add_argument("--quantize", default="int8", metavar="auto|none|int8|int4", help="weights (%(default)s)")
    parser.add_argument("--attention", default="exact", metavar="exact|lsh|auto", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]} questions about {QUICK[1]} tokens")
    parser.add_argument("--questions", type=int, metavar="N", help=f"about one document ({FULL[0]}); 0 = leave it out")
    parser.add_argument("--document", metavar="N", help=f"tokens of that document ({FULL[1]})")
    parser.add_argument("-t", "--threads", type=int, metavar="N", help="default: as planned")
    options = parser.parse_args(arguments)
    questions, document = QUICK if options.quick else FULL
    if options.questions is None:
        options.questions = questions
    options.document = options.document or document
    return options


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
    prompts = _read(engine, max(sizes), parse_tokens(options.tokens))
    measured = {size: _Size(size) for size in sizes}
    for turn in range(options.rounds):
        for size in sizes:
            _measure(engine, prompts[:size], options.gen_tokens, measured[size])
            console.say(
                f"round {turn + 1} of {options.rounds}: {size} together, {measured[size].step_ms[-1]:.1f} ms per step"
            )
    del prompts
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


def _read(engine: Engine, count: int, length: int) -> list[Sequence]:
    """`count` prompts of `length` tokens that have been read."""
    sequences = []
    for n in range(count):
        console.say(f"reading prompt {n + 1} of {count}: {length:,} tokens")
        sequences.append(engine.new_sequence())
        for _ in engine.runner.prefill(sequences[-1], _text_ids(engine, length, n)):
            pass
    return sequences


def _measure(engine: Engine, prompts: list[Sequence], gen_tokens: int, size: _Size) -> None:
    """Answer these prompts together; only steps of the full batch are timed."""
    wanted = GenerationOptions(max_tokens=gen_tokens, temperature=0.0)
    lengths = [sequence.length for sequence in prompts]
    asked = [engine.request(str(n), list(sequence.ids), wanted, sequence) for n, sequence in enumerate(prompts)]
    events = engine.generate(asked, size.batch, max_delay_s=float("inf"))
    full = [event for event in events if isinstance(event, StepStats) and event.batch == size.batch]
    for sequence, length in zip(prompts, lengths, strict=True):
        sequence.truncate(length)
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
    walls: dict[bool, float] = {}
    answers: dict[bool, dict[str, tuple[int, ...]]] = {}
    for share in (True, False):
        how = f"the document read {'once' if share else 'each time'}"
        prefix = SharedPrefix(prefix_tokens, users=options.questions) if share else None
        asked = [
            engine.request(str(n), document + _text_ids(engine, 40, n + 1), wanted, prefix=prefix)
            for n in range(options.questions)
        ]
        begin = time.perf_counter()
        answers[share] = {}
        for event in engine.generate(asked, engine.plan.max_batch):
            if isinstance(event, PrefillProgress) and event.done == event.total:
                console.say(f"{how}: question {int(event.key) + 1} of {options.questions}")
            elif isinstance(event, Finished):
                answers[share][event.key] = event.token_ids
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
        goal = f" ({SHARED_GOAL}) {_met(ratio <= SHARED_GOAL)}" if result["shared"]["questions"] >= GOAL_FROM else ""
        console.say(f"shared prefix over none: {ratio:.2f}{goal}")


def _met(yes: bool) -> str:
    return "met" if yes else "NOT MET"


def _table(result: dict[str, Any]) -> str:
    lines = ["batch  tok/s  step ms  stages ms"]
    for row in result["rows"]:
        stages = ", ".join(f"{stage} {ms:.1f}" for stage, ms in row["stages_ms"].items() if ms >= 0.05)
        lines.append(f"{row['batch']:5}  {row['decode_tok_s']:5.1f}  {row['step_ms']:7.1f}  {stages}")
    if "shared" in result:
        shared = result["shared"]
        lines.append(
            f"{shared['questions']} questions about {shared['document_tokens']:,} tokens: {shared['wall_s']:.1f} s, "
            f"{shared['wall_s_unshared']:.1f} s unshared, {shared['equal_answers']} answers equal"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
