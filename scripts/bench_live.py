"""What the live view costs: answers of the demo model with and without it, in turns, on a pseudo-terminal.

    python scripts/bench_live.py --json

`share` is the time spent in the view of all decode time, `share_without` what writing the text alone takes of it.
`after_draw` is what drawing does to caches: the time of a step after a frame was drawn, over that of its neighbours,
beside the same ratio of the other steps; `indirect_share` is the difference as a part of all decode time. `ratio` is
decode time with over without, the median over pairs of answers: on a machine that is not idle, mostly noise. With
--json one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass

COLUMNS, LINES = 100, 30
DRAWN_S = 0.0005  # what takes longer was a frame: text and events take a tenth of that
NEIGHBOURS = 3  # steps on either side that a step is compared with


@dataclass
class Answer:
    """Decode time of one answer, first token to end, how much of it was spent in the view, and its steps."""

    decode_s: float
    view_s: float
    tokens: int
    steps: list[tuple[float, bool]]  # milliseconds, and whether a frame was drawn just before


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """stdout and stderr are a pseudo-terminal that another process reads, as a terminal emulator does."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    with (
        subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader,
        open(theirs, "w", encoding="utf-8") as out,
        open(os.dup(theirs), "w", encoding="utf-8") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.close(ours)
        try:
            yield
        finally:
            reader.kill()


def answer(engine, request, *, live: bool) -> Answer:
    """Run one request as `chat` does."""
    from magicpig_cli.events import Finished, StepStats, TokenEvent
    from magicpig_cli.ui.live import open_view

    began, view_s, tokens = 0.0, 0.0, 0
    steps: list[tuple[float, bool]] = []
    between_s = 0.0  # in the view, since the step before
    view = open_view(engine, wanted=live, quiet=False, what="reading the prompt", unit="tok", text_shown=True)
    with view:
        for event in engine.generate([request]):
            before = time.perf_counter()
            view.show(event)
            if isinstance(event, TokenEvent):
                view.write(event.text)
                tokens += 1
            elif isinstance(event, Finished):
                view.write(event.tail + "\n")
            elif isinstance(event, StepStats):
                steps.append((event.wall_ms, between_s > DRAWN_S))
                between_s = 0.0
            after = time.perf_counter()
            between_s += after - before
            if began:
                view_s += after - before
            elif tokens:
                began = after
    return Answer(time.perf_counter() - began, view_s, tokens, steps)


def after_draw(answers: list[Answer]) -> dict[str, float]:
    """Time of steps over the median of their neighbours, averaged: those after a frame, and the others."""
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for done in answers:
        for place, (ms, drawn) in enumerate(done.steps[NEIGHBOURS:-NEIGHBOURS]):
            around = done.steps[place : place + 2 * NEIGHBOURS + 1]
            ratios[drawn].append(ms / statistics.median(near for near, _ in around))
    return {
        "drawn": statistics.mean(ratios[True]),
        "others": statistics.mean(ratios[False]),
        "frames": len(ratios[True]),
    }


def measure(context: int, tokens: int, pairs: int, attention: str) -> dict[str, object]:
    from magicpig_cli.bench.fill import fill_ids
    from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
    from magicpig_cli.engine.engine import Engine

    settings = Settings(ModelOptions("demo"), AttentionOptions(attention), context=context + tokens)
    engine = Engine.load(settings)
    sequence, ids = engine.new_sequence(), fill_ids(engine, context)
    options = GenerationOptions(max_tokens=tokens, temperature=1.0, seed=1)
    answers: dict[bool, list[Answer]] = {True: [], False: []}
    with terminal():
        for pair in range(pairs + 1):  # the first one warms up
            for live in (True, False) if pair % 2 else (False, True):
                done = answer(engine, engine.request("a", ids, options, sequence), live=live)
                if pair:
                    answers[live].append(done)
    around = after_draw(answers[True])
    steps, frames = sum(len(a.steps) for a in answers[True]), sum(drawn for a in answers[True] for _, drawn in a.steps)
    ms = {live: [1000 * a.decode_s / (a.tokens - 1) for a in answers[live]] for live in answers}
    return {
        "context": context,
        "attention": attention,
        "tokens": sum(a.tokens for a in answers[True]),
        "ms_per_token": {"with": statistics.median(ms[True]), "without": statistics.median(ms[False])},
        "ratio": statistics.median(a / b for a, b in zip(ms[True], ms[False], strict=True)),
        "after_draw": around,
        "indirect_share": (around["drawn"] - around["others"]) * frames / steps,
        "share": sum(a.view_s for a in answers[True]) / sum(a.decode_s for a in answers[True]),
        "share_without": sum(a.view_s for a in answers[False]) / sum(a.decode_s for a in answers[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--pairs", type=int, default=10, help="answers with and without")
    parser.add_argument("--attention", default="lsh", choices=("lsh", "exact"))
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    options = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the command sets it, before torch is loaded
    figures = measure(options.context, options.tokens, options.pairs, options.attention)
    if options.json:
        print(json.dumps(figures))
        return
    per_token = figures["ms_per_token"]
    print(f"with the live view {per_token['with']:.2f} ms per token, without {per_token['without']:.2f} ms")  # type: ignore[index]
    print(
        f"time in the view {figures['share']:.2%} of decoding ({figures['share_without']:.2%} for the text alone), "
        f"slower steps after a frame {figures['indirect_share']:.2%}; ratio {figures['ratio']:.4f}"
    )


if __name__ == "__main__":
    sys.exit(main())
