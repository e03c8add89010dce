#!/usr/bin/env python3
"""Decode attention at kernel level beside its opponents, in one run: the figures that the kernels have to show.

All variants take turns (A B C D A B C D …) with cold caches, on one thread unless a figure is about two. With --json
the last line of stdout is one document; the table of goals goes to stderr then.

With --isa (or MAGICPIG_ISA) torch is held to the same instruction set: that shows what a CPU of that kind would do.
A full run takes about ten minutes; Ctrl-C ends it and shows what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from magicpig_cli.bench.kernel_run import KernelBench

# Before torch loads libgomp, as the command does (docs/decisions/002).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# How torch, oneDNN and MKL are held to the instruction set of a tier; each reads its variable when it is loaded.
TORCH_ISA = {
    "portable": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


@dataclass(frozen=True)
class Goal:
    """What a figure must be: at least, or at most, `wanted`."""

    text: str
    wanted: float
    at_least: bool
    read: Callable[[dict[str, Any]], float]  # KeyError, TypeError: not measured

    def value(self, document: dict[str, Any]) -> float | None:
        try:
            return self.read(document)
        except (KeyError, TypeError):
            return None

    def met(self, value: float) -> bool:
        return value >= self.wanted if self.at_least else value <= self.wanted


def speedup(case: str, variant: str, wanted: float) -> Goal:
    """Goal of lsh over another variant."""

    def read(document: dict[str, Any]) -> float:
        return {row["case"]: row for row in document["cases"]}[case]["speedup"][variant]

    return Goal(f"{case}: lsh over {variant}", wanted, True, read)


def stage_ratio(case: str, stage: str, other: str, wanted: float) -> Goal:
    """Goal of one stage over another, at most."""

    def read(document: dict[str, Any]) -> float:
        stages = {row["case"]: row for row in document["cases"]}[case]["stage_us"]
        return stages[stage] / stages[other]

    return Goal(f"{case}: {stage} over {other}", wanted, False, read)


def ns_per_key(document: dict[str, Any]) -> float:
    """Of the scan at the longest case, per key and query head."""
    case = {row["case"]: row for row in document["cases"]}["d128_n96k_2pct"]
    return case["stage_us"]["scan"] * 1e3 / case["n"]


GOALS = (
    speedup("d128_n96k_2pct", "exact", 6),
    speedup("d128_n96k_2pct", "sdpa_bf16", 12),
    speedup("d128_n96k_2pct", "sdpa_f32", 18),
    speedup("d128_n16k_2pct", "exact", 5),
    speedup("d64_n8k_real", "exact", 1.4),
    speedup("d64_n24k_real", "exact", 2),
    replace(speedup("d128_n96k_2pct", "rabitq", 1), text="d128_n96k_2pct: time of rabitq over lsh", at_least=False),
    stage_ratio("d128_n96k_2pct", "scan", "retrieve", 1.3),
    Goal("rabitq: ns of the scan per key and query head", 0.8, False, ns_per_key),
    Goal("rabitq: index bytes per token and KV head", 20, False, lambda d: d["build"]["rabitq_bytes_per_token"]),
    Goal("rabitq: building over that of the tables", 5, True, lambda d: d["build"]["rabitq_speedup"]),
    Goal("exact: share of the sequential bandwidth", 0.65, True, lambda d: d["bandwidth"]["exact_fraction"]),
    Goal("gather: share of a sorted-row read", 0.65, True, lambda d: d["bandwidth"]["gather_fraction"]),
    Goal("one layer, 2 threads over 1", 1.6, True, lambda d: d["scaling_2_threads"]),
    Goal("index: bytes per token, KV head and table", 2.2, False,
         lambda d: d["build"]["index_bytes_per_token"] / d["meta"]["L"]),
    Goal("index: counting sort over torch.sort", 8, True, lambda d: d["build"]["sort_speedup"]),
    Goal("index: seconds to build it, one KV head", 0.6, False, lambda d: d["build"]["index_s"]),
    Goal("append: last steps over an index built at once", 1.5, False, lambda d: d["append"]["step_ratio"]),
    Goal("append: worst step over those around it", 2, False, lambda d: d["append"]["worst_over_median"]),
    Goal("int8 rows: layer call over bfloat16", 1.15, True, lambda d: d["int8"]["speedup"]),
    Goal("int8 rows: relative error", 0.01, False, lambda d: d["int8"]["rel_error"]),
)  # fmt: skip


def table(document: dict[str, Any]) -> str:
    """Cases, then goal beside value, for people."""
    lines = []
    for case in document["cases"]:
        times = ", ".join(f"{name} {us:.1f}" for name, us in case["us_per_head"].items())
        stages = ", ".join(f"{name} {us:.1f}" for name, us in case["stage_us"].items())
        lines.append(f"{case['case']}: N {case['n']:,}, {case['kv_heads']} x {case['g']} heads of {case['d']}, "
                     f"sampled {case['sampled']:.2%}, by signatures {case['rabitq_sampled']:.2%}")  # fmt: skip
        lines += [f"  us per head: {times}", f"  of lsh: {stages}"]
    lines.append(f"{'':48}{'goal':>8}  {'value':>8}")
    for goal in GOALS:
        value = goal.value(document)
        sign = ">=" if goal.at_least else "<="
        shown = "-" if value is None else f"{value:.3g}"
        verdict = "not measured" if value is None else "met" if goal.met(value) else "NOT MET"
        lines.append(f"{goal.text:48}{sign} {goal.wanted:5.3g}  {shown:>8}  {verdict}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one document on the last line of stdout")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the document there too")
    parser.add_argument("--case", action="append", metavar="NAME", help="measure only this case or part; repeatable")
    parser.add_argument("--isa", help="instruction set of the kernels and of torch; the same as MAGICPIG_ISA")
    parser.add_argument("--reps", type=int, metavar="N", help="timed rounds of each case")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, says nothing of speed")
    captures = "take the demo model's tensors from there; if it is not there, keep them there"
    parser.add_argument("--captures", type=Path, metavar="FILE", help=captures)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is not met")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> tuple[KernelBench, Sequence[str]]:
    """The run that was asked for, and its parts. Raises MagicpigError."""
    from magicpig_cli.bench.kernel_sizes import PARTS, QUICK, Sizes
    from magicpig_cli.errors import UsageError
    from magicpig_cli.kernels import isa  # noqa: F401 - refuses an unknown instruction set before torch is loaded

    parts = args.case or PARTS
    if unknown := [part for part in parts if part not in PARTS]:
        raise UsageError(f"--case {unknown[0]} is unknown", hint=f"use some of {', '.join(PARTS)}")
    if args.reps is not None and args.reps < 1:
        raise UsageError(f"--reps {args.reps} measures nothing", hint="--reps 15")
    sizes = QUICK if args.quick else Sizes()
    if args.reps is not None:
        sizes = replace(sizes, reps=args.reps)
    from magicpig_cli.bench.kernel_run import KernelBench

    return KernelBench(sizes, args.captures, say=lambda text: print(text, file=sys.stderr, flush=True)), parts


def show(document: dict[str, Any], args: argparse.Namespace) -> None:
    """Write the document where it was asked for, and the table of its goals."""
    line = json.dumps(document)
    if args.output is not None:
        args.output.write_text(line + "\n", encoding="utf-8")
    print(table(document), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(line)


def main() -> int:
    args = arguments()
    if args.isa:
        os.environ["MAGICPIG_ISA"] = args.isa
    os.environ.update(TORCH_ISA.get(os.environ.get("MAGICPIG_ISA", ""), {}))
    from magicpig_cli.ui import console

    missed = False

    def work() -> None:
        nonlocal missed
        bench, parts = prepare(args)
        try:
            bench.run(parts)
        finally:  # what was measured is worth showing however the run ends
            if bench.document and bench.document["meta"]["parts"]:
                show(bench.document, args)
        values = [(goal, goal.value(bench.document)) for goal in GOALS]
        missed = any(value is not None and not goal.met(value) for goal, value in values)

    return console.exit_status(work) or int(args.check and missed)


if __name__ == "__main__":
    sys.exit(main())
