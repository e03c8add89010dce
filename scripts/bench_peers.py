#!/usr/bin/env python3
"""Decode and prefill of the demo model beside llama.cpp's, in one run: milliseconds per token and tokens per second.

llama.cpp runs the demo's GGUF file as it is (Q4_1) with f16 keys and values, the faster of flash attention on and off
at each context; ours runs as a user gets it, once per kind of weights. The tools take turns. With --json the last line
of stdout is one document (CLI.md); progress and the goals go to stderr. A full run takes up to ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

# Before torch loads libgomp, as the command does (docs/decisions/002).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Nothing here may load torch: llama.cpp's process starts by importing this file.
from magicpig_cli.bench import llama_cpp
from magicpig_cli.bench.peers import GOALS, PREFILL_GOAL, Measured, Ours, PeersRequest, document, measure
from magicpig_cli.config import ModelOptions, Settings
from magicpig_cli.errors import UsageError
from magicpig_cli.model import demo
from magicpig_cli.ui import console
from magicpig_cli.units import format_tokens, parse_token_list

# From the largest to the smallest; the last is the nearest to llama.cpp's 4 bits and gives `ratio`.
WEIGHTS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}, "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}  # fmt: skip
_POINTS = (1024, 2048, 4096, 6144, 8192)  # where llama.cpp's line is measured


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)

    def work() -> None:
        result = _run(options)
        _say_goals(result)
        if options.json:
            print(json.dumps(result))
        else:
            _print_table(result)

    return console.exit_status(work)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    parser.add_argument("--quick", action="store_true", help="int4 weights only, 2 rounds of 8 tokens")
    parser.add_argument("--contexts", default="2k,6k,16k,32k", metavar="N,N…", help="of ours (%(default)s)")
    parser.add_argument("--points", metavar="N,N…", help="of llama.cpp's line (1k,2k,4k,6k,8k)")
    parser.add_argument("--prefill", default="6k", metavar="N", help="context whose prompt is timed (%(default)s)")
    parser.add_argument("--weights", metavar="KIND,KIND…", help=f"of ours ({','.join(WEIGHTS)})")
    parser.add_argument("--gen-tokens", type=int, metavar="N", help="per round and tool; in the context (24, quick 8)")
    parser.add_argument("--rounds", type=int, metavar="N", help="of which the median counts (5, quick 2)")
    parser.add_argument("-t", "--threads", type=int, default=2, metavar="N", help="of both programs (%(default)s)")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    version = llama_cpp.require()
    model = demo.wheel_file()
    kinds = _weights(options)
    from magicpig_cli import hardware
    from magicpig_cli.bench import report
    from magicpig_cli.bench.fill import fill_ids, natural_text
    from magicpig_cli.engine.engine import Engine

    contexts = tuple(parse_token_list(options.contexts))
    ours = []
    for kind in kinds:
        _say(f"loading magicpig {kind}")
        settings = Settings(
            ModelOptions("demo", **WEIGHTS[kind]), context=max(contexts), allow_extrapolation=True,
            threads=options.threads,
        )  # fmt: skip
        ours.append(Ours(Engine.load(settings), kind))
    engine = ours[0].engine
    request = _request(options, contexts, engine.shape.context)
    peers: list[llama_cpp.LlamaCpp] = []
    try:
        for flash in (True, False):
            _say(f"loading llama.cpp with flash attention {'on' if flash else 'off'}")
            peers.append(llama_cpp.LlamaCpp(model, flash=flash, threads=options.threads, context=request.real))
        sample = natural_text()[:4000]
        meta = {
            **report.meta(engine, hardware.probe()), "dtype": None, "llama_cpp": version,
            "llama_cpp_system": peers[0].system,
            "same_token_count": len(engine.codec.encode_raw(sample)) == peers[0].count(sample),
        }  # fmt: skip
        ids = fill_ids(engine, request.real)
        measured: list[Measured] = []
        for update in measure(ours, peers, ids, request):
            if isinstance(update, str):
                _say(update)
            else:
                measured = update
        return document(meta, ours, peers, measured, request)
    finally:
        for peer in peers:
            peer.close()


def _weights(options: argparse.Namespace) -> list[str]:
    if options.weights is None:
        return list(WEIGHTS)[-1:] if options.quick else list(WEIGHTS)
    asked = options.weights.split(",")
    for kind in asked:
        if kind not in WEIGHTS:
            raise UsageError(f"--weights {kind} is unknown", hint=f"use some of {','.join(WEIGHTS)}")
    return [kind for kind in WEIGHTS if kind in asked]


def _request(options: argparse.Namespace, contexts: tuple[int, ...], real: int) -> PeersRequest:
    points = tuple(parse_token_list(options.points)) if options.points else _POINTS
    (prefill,) = parse_token_list(options.prefill)
    request = PeersRequest(
        contexts, points, real, prefill,
        gen_tokens=options.gen_tokens or (8 if options.quick else 24),
        rounds=options.rounds or (2 if options.quick else 5),
    )  # fmt: skip
    if max(*points, prefill) > real or len({*points}) < 2:
        raise UsageError(
            f"--points and --prefill are at most the model's context of {real:,} tokens, and two points make a line",
            hint="--points 1k,2k,4k,6k,8k --prefill 6k",
        )
    if request.prompt(min(*contexts, *points, prefill)) < 1:
        raise UsageError(
            f"a context has no room for {request.gen_tokens} generated tokens and a prompt",
            hint="lower --gen-tokens",
        )
    return request


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_goals(result: dict[str, Any]) -> None:
    kind = result["meta"]["ratio_weights"]
    for key, ratio in result["ratio"].items():
        if ratio is not None:
            goal = GOALS.get(key)
            wanted = f" (goal ≥ {goal}×: {'met' if ratio >= goal else 'missed'})" if goal else ""
            _say(f"decode at {key}, {kind}: {ratio:.2f}× as fast as llama.cpp{wanted}")
    for kind, ratio in result["prefill"]["ratio"].items():
        verdict = "met" if ratio >= PREFILL_GOAL else "missed"
        _say(f"prefill, {kind}: {ratio:.2f}× as fast as llama.cpp (goal ≥ {PREFILL_GOAL}×: {verdict})")


def _print_table(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        note = " (from the line)" if row["fitted"] else ""
        context = format_tokens(row["context"])
        print(f"{row['tool']:10} {row['weights']:5} {context:>6} {row['tpot_ms']:8.1f} ms/token{note}")
    for row in result["prefill"]["rows"]:
        variant = f" {row['variant']}" if row["variant"] else ""
        print(f"{row['tool']:10} {row['weights']:5} prefill {row['tok_s']:6.0f} tok/s{variant}")


if __name__ == "__main__":
    sys.exit(main())
