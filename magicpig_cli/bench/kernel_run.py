"""The run behind `scripts/bench_kernels.py`: layers to measure, what is measured of them, one document."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import magicpig_cli
from magicpig_cli import hardware, kernels
from magicpig_cli.bench import capture
from magicpig_cli.bench.appending import LAST_STEPS, START_ROWS, measure_growth
from magicpig_cli.bench.attend_case import AttendTimes, measure_attend, measure_scaling
from magicpig_cli.bench.bandwidth import measure_bandwidth
from magicpig_cli.bench.build import measure_build
from magicpig_cli.bench.kernel_sizes import CASES, LONG, MIDDLE, PARTS, REAL_LONG, Sizes
from magicpig_cli.bench.layer_tensors import IndexedLayer, LayerTensors
from magicpig_cli.bench.report import commit
from magicpig_cli.bench.row_types import int8_errors, int8_speedup
from magicpig_cli.bench.synthetic import SyntheticShape, calibrated
from magicpig_cli.bench.timing import ColdCache, l3_bytes
from magicpig_cli.config import DEFAULT_K, DEFAULT_L, AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine

RATIO = 0.02  # of the synthetic cases
CAPTURES = 3  # side by side in the longest real case


@dataclass
class KernelBench:
    """Measures the asked-for parts. `say` is told what is being done; layers are made when first needed."""

    sizes: Sizes
    captures_file: Path | None = None  # where captured tensors are taken from, or kept
    say: Callable[[str], None] = lambda _: None
    threads: int = field(default_factory=lambda: hardware.probe().threads)  # for what is not timed
    document: dict[str, Any] = field(default_factory=dict)  # what `run` has measured so far

    def run(self, parts: Iterable[str] = PARTS) -> dict[str, Any]:
        """The document of CLI.md; what was not asked for, or not yet measured, is null, and not in `meta.parts`."""
        asked = set(parts)
        figures = {
            "bandwidth": ("bandwidth", self._bandwidth), "scaling": ("scaling_2_threads", self._scaling),
            "build": ("build", self._build), "append": ("append", self._append), "int8": ("int8", self._int8),
        }  # fmt: skip
        self.document = {"meta": self._meta(), "cases": [], **{key: None for key, _ in figures.values()}}
        measured = self.document["meta"]["parts"]
        for name in (part for part in PARTS if part in asked):
            self.say(f"measuring {name}")
            if name in CASES:
                self.document["cases"].append(self._case(name))
            else:
                key, measure = figures[name]
                self.document[key] = measure()
            measured.append(name)
        return self.document

    # Layers

    def _synthetic(self, n: int) -> IndexedLayer:
        self.say(f"making {n:,} keys and their tables")
        shape = SyntheticShape(self.sizes.kv_heads, self.sizes.group, 128, n, self.sizes.steps)
        return calibrated(shape, RATIO, threads=self.threads)

    @cached_property
    def _long(self) -> IndexedLayer:
        return self._synthetic(self.sizes.long)

    @cached_property
    def _captures(self) -> list[list[LayerTensors]]:
        file = self.captures_file
        if file is not None and file.exists():
            return capture.load(file)
        options = AttentionOptions(mode="exact", kv_dtype="bfloat16")
        engine = Engine.load(Settings(ModelOptions("demo", dtype="float32"), options))
        captures = []
        for number in range(CAPTURES):
            self.say(f"reading {self.sizes.real:,} tokens with the demo model, {number + 1} of {CAPTURES}")
            # Different text in each; the help topics are about 120,000 tokens long.
            offset = number * self.sizes.real
            captures.append(
                capture.capture(engine, self.sizes.real, self.sizes.real_layers, self.sizes.steps, offset)
            )  # fmt: skip
        if file is not None:
            capture.save(file, captures)
        return captures

    def _layers(self, name: str) -> Iterable[IndexedLayer]:
        """The layers of a case, one after another."""
        if name == LONG:
            yield self._long
        elif name == MIDDLE:
            yield self._synthetic(self.sizes.middle)
        else:
            several = self._captures if name == REAL_LONG else self._captures[:1]
            for tensors in capture.side_by_side(several):
                yield IndexedLayer(tensors, threads=self.threads)

    # Parts

    @cached_property
    def _cold(self) -> ColdCache:
        torch.set_num_threads(1)  # from here on; loading and capturing a model used all
        return ColdCache(self.sizes.cold_bytes)

    def _case(self, name: str) -> dict[str, Any]:
        times = []
        for layer in self._layers(name):
            torch.set_num_threads(1)
            times.append(measure_attend(layer, self._cold, self.sizes.reps))
            about = layer.tensors
        return {
            "case": name,
            "d": about.head_dim,
            "n": about.n,
            "g": about.heads // about.kv_heads,
            "kv_heads": about.kv_heads,
            "layers": len(times),
            **summary(times),
        }

    def _bandwidth(self) -> dict[str, float]:
        return measure_bandwidth(self._long, self._cold, self.sizes.reps)

    def _scaling(self) -> float:
        return measure_scaling(self._long, self._cold, self.sizes.reps)

    def _build(self) -> dict[str, float]:
        torch.set_num_threads(1)
        return measure_build(self._long.tensors, self._cold, max(2, self.sizes.reps // 3))

    def _append(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        layer = self._synthetic(START_ROWS + self.sizes.appended + LAST_STEPS)
        return asdict(measure_growth(layer.tensors, self.sizes.appended))

    def _int8(self) -> dict[str, float]:
        return {
            "speedup": int8_speedup(self._long, self._cold, self.sizes.reps),
            **int8_errors(self._captures[0], self.threads),
        }

    def _meta(self) -> dict[str, Any]:
        return {
            "version": magicpig_cli.__version__,
            "commit": commit(),
            "cpu": hardware.probe().cpu_model,
            "isa": kernels.isa.current(),
            "torch_isa": torch.backends.cpu.get_cpu_capability(),
            "threads": 1,
            "l3_bytes": l3_bytes(),
            "K": DEFAULT_K,
            "L": DEFAULT_L,
            "sizes": asdict(self.sizes),
            "parts": [],
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }


def summary(times: list[AttendTimes]) -> dict[str, Any]:
    """Medians over layers; `speedup` of lsh over each other variant is taken within a layer first."""
    others = [name for name in times[0].us_per_head if name != "lsh"]
    return {
        "sampled": float(np.mean([layer.sampled for layer in times])),
        "rabitq_sampled": float(np.mean([layer.rabitq_sampled for layer in times])),
        "us_per_head": _medians([layer.us_per_head for layer in times]),
        "stage_us": _medians([layer.stage_us for layer in times]),
        "speedup": _medians([
            {name: layer.us_per_head[name] / layer.us_per_head["lsh"] for name in others} for layer in times
        ]),
    }  # fmt: skip


def _medians(figures: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([figure[name] for figure in figures])) for name in figures[0]}
