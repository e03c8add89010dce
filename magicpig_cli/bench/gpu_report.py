"""The document of `gpu_check` while it grows: what was measured, what failed, what found no time."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from magicpig_cli.errors import MagicpigError
from magicpig_cli.kernels.memory import give_back_freed


@dataclass
class Clock:
    """Seconds since the start, and how many are left."""

    limit_s: float
    begin: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begin

    @property
    def left(self) -> float:
        return self.limit_s - self.spent


class Report:
    """output: a file that is kept up to date; device: whose free memory is given back after each part."""

    def __init__(self, device: torch.device, clock: Clock, output: Path | None = None) -> None:
        self.device, self.clock, self.output = device, clock, output
        self.document: dict[str, Any] = {
            "meta": {}, "parity": {"tokens_equal": None, "max_logit_diff": None}, "rows": [], "overlap_percent": None,
            "without_graphs": [], "launch_ms": {}, "prefill_tok_s": None, "prefill": {}, "overlap": {}, "halves": {},
            "faster_than_offloaded": {}, "signatures": {}, "seconds": {}, "skipped": {}, "problems": [], "notices": [],
        }  # fmt: skip

    def say(self, text: str) -> None:
        print(f"gpu_check: {self.clock.spent:5.0f} s  {text}", file=sys.stderr, flush=True)

    def keep(self) -> None:
        """What is there so far, for the case that the run is ended from outside."""
        if self.output is not None:
            self.output.write_text(json.dumps(self.document) + "\n", encoding="utf-8")

    def skip(self, what: str, why: str) -> None:
        self.document["skipped"][what] = why
        self.say(f"{what} left out: {why}")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What fails inside is noted, and the run goes on."""
        self.say(name)
        begin = time.monotonic()
        try:
            yield
        except (MagicpigError, RuntimeError, MemoryError, ValueError) as problem:  # torch's are RuntimeErrors
            text = f"{name}: {type(problem).__name__}: {problem}".splitlines()[0]
            self.document["problems"].append(text)
            self.say(text)
        finally:
            self.document["seconds"][name] = round(time.monotonic() - begin, 1)
            self.keep()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            give_back_freed()
