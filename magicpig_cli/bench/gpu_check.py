"""What a GPU machine with nothing downloadable can tell in eight minutes, as one JSON document.

    python -m magicpig_cli.bench.gpu_check [--dry-run]        # or scripts/gpu_check.sh, which also installs

First the same models on CPU and GPU: do they say the same? Then the shape of Llama-3.1-8B with random weights at 96k:
milliseconds of a decode step with keys and values on the GPU, in host memory read exactly, and sampled; of one sequence
also without CUDA graphs, and what launching a step takes with and without. Keys have the geometry of a language
model's (`synthetic.py`), tiled to the context; queries are those of random weights, which point anywhere, so that
fewer keys are sampled than on real text: every row says how many.

Progress goes to stderr, the document is the last line of stdout. What fails or finds no time is named in it, and what
was measured before stands. With --dry-run everything runs on the CPU at toy size: the program is tested, nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import psutil
import torch

from magicpig_cli import hardware
from magicpig_cli.bench.gpu_parity import compare_devices, compare_halves
from magicpig_cli.bench.gpu_sizes import FULL, TOY, Sizes
from magicpig_cli.bench.launch import launch_ms
from magicpig_cli.bench.on_device import DeviceRunner
from magicpig_cli.bench.overlap import measure_overlap
from magicpig_cli.bench.report import meta
from magicpig_cli.bench.synthetic import SyntheticLayer, SyntheticShape
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cards import assumed
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.errors import MagicpigError
from magicpig_cli.kernels.memory import give_back_freed
from magicpig_cli.model.loader import load_config
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner.plan import Mode, Plan
from magicpig_cli.planning import plan_here
from magicpig_cli.units import parse_bytes

SAMPLERS = ("lsh", "rabitq")
_KEPT_FREE = 4 << 30  # bytes of host memory that copies of the sequence leave alone
_RESERVE_S = 160  # what is measured after copies of the sequence are made takes so long


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


class Check:
    """One run: the document grows as things are measured."""

    def __init__(
        self, sizes: Sizes, device: torch.device, clock: Clock, memory: int | None = None, output: Path | None = None
    ) -> None:  # fmt: skip
        self.sizes, self.device, self.clock = sizes, device, clock
        self.memory, self.output = memory, output
        self.document: dict[str, Any] = {
            "meta": {}, "parity": {"tokens_equal": None, "max_logit_diff": None}, "rows": [], "overlap_percent": None,
            "without_graphs": [], "launch_ms": {}, "prefill_tok_s": None, "prefill": {}, "overlap": {}, "halves": {},
            "faster_than_offloaded": {}, "signatures": {}, "seconds": {}, "skipped": {}, "problems": [], "notices": [],
        }  # fmt: skip

    def run(self) -> None:
        with self._part("parity"):
            self._parity()
        with self._part("load"), tempfile.TemporaryDirectory() as folder:
            self.engine = self._load(Path(folder))
        if not hasattr(self, "engine"):
            return
        with self._part("prefill"):
            self._prefill()
        with self._part("launch"):
            for batch in self.sizes.batches:
                self.document["launch_ms"][str(batch)] = launch_ms(self.engine.runner, batch)
        self.tiles = list(self._tiles())
        with self._part("exact-on-gpu"):
            self._exact_on_gpu()
        offloaded = True
        for sampler in SAMPLERS:
            if sampler not in get_args(Mode):
                self._skip(sampler, "this version has no such sampler")
                continue
            with self._part(sampler):
                self._sampled(sampler, offloaded)
                offloaded = False
        self._compare()

    # What it reports

    def say(self, text: str) -> None:
        print(f"gpu_check: {self.clock.spent:5.0f} s  {text}", file=sys.stderr, flush=True)

    def _keep(self) -> None:
        """What is there so far, for the case that the run is ended from outside."""
        if self.output is not None:
            self.output.write_text(json.dumps(self.document) + "\n", encoding="utf-8")

    def _skip(self, what: str, why: str) -> None:
        self.document["skipped"][what] = why
        self.say(f"{what} left out: {why}")

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
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
            self._keep()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            give_back_freed()

    # The parts

    def _parity(self) -> None:
        parts = {}
        for name, config in self.sizes.models.items():
            for mode in ("exact", "lsh"):
                self.say(f"parity of {name}, {mode}")
                parts[f"{name}, {mode}"] = compare_devices(config, mode, self.device, self.sizes.parity)
            self.say(f"parity of {name}, lsh in halves")
            parts[f"{name}, lsh in halves"] = compare_halves(config, "lsh", self.device, self.sizes.parity)
        self.document["parity"] = {
            "tokens_equal": all(part["tokens_equal"] for part in parts.values()),
            "max_logit_diff": max(part["max_logit_diff"] for part in parts.values()),
            "parts": parts,
        }

    def _settings(self, model: str, sampler: str) -> Settings:
        options = ModelOptions(model, device=str(self.device), dtype="bfloat16", load_format="dummy", offline=True)
        return Settings(options, AttentionOptions(mode=sampler), context=self.sizes.context)

    def _load(self, folder: Path) -> Engine:
        path = folder / f"{self.sizes.name}.json"
        path.write_text(json.dumps(self.sizes.config), encoding="utf-8")
        settings = self._settings(str(path), "lsh")
        engine = Engine.load(settings, planned=self._plan(shape_from_config(load_config(settings.model)), settings))
        self.document["meta"] |= meta(engine, hardware.probe()) | _driver(self.device)
        return engine

    def _plan(self, shape: ModelShape, settings: Settings) -> Plan:
        return plan_here(shape, settings, assume=lambda machine: assumed(machine, None, self.memory))

    def _prefill(self) -> None:
        """Exact attention over a prompt from the start; tables are not part of it."""
        self._forget_peak()
        rates = []
        for _ in range(2):  # the first warms up
            sequence, ids = self.engine.new_sequence(), _ids(self.sizes.prompt)
            begin = self._now()
            for _ in self.engine.runner.prefill(sequence, ids, "exact"):
                pass
            rates.append(len(ids) / (self._now() - begin))
            sequence.release()
        self.document["prefill_tok_s"] = rates[-1]
        self.document["prefill"] |= {"tokens": self.sizes.prompt, "vram_bytes": self._peak_bytes()}

    def _tiles(self) -> Iterator[torch.Tensor]:
        """Rows [Hkv, tile, 2, D] of every layer, on the host."""
        shape = self.engine.shape
        form = SyntheticShape(shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim, self.sizes.tile, steps=1)
        for layer in range(shape.layers):
            yield SyntheticLayer(form, seed=layer).rows

    @property
    def _length(self) -> int:
        """Tokens in a sequence before the steps that are measured."""
        return self.sizes.context - 2 * self.sizes.steps - self.engine.plan.chunk

    def _filled(self, runner: ModelRunner) -> Sequence:
        sequence = runner.new_sequence()
        for layer, tile in zip(sequence.layers, self.tiles, strict=True):
            times = -(-self._length // tile.shape[1])
            layer.extend(tile.to(self.device).repeat(1, times, 1, 1)[:, : self._length])
        sequence.commit(_ids(self._length))
        give_back_freed()
        return sequence

    def _exact_on_gpu(self) -> None:
        engine = self.engine
        runner = DeviceRunner(engine.runner.model, engine.shape, engine.plan, self.device)
        sequences: list[Sequence] = []
        for batch in self.sizes.batches:
            while len(sequences) < batch:
                sequences.append(self._filled(runner))
            self._row("exact-on-gpu", runner, sequences, "exact", own=batch)

    def _sampled(self, sampler: str, offloaded: bool) -> None:
        """Rows of a sampler, and beside those of the first one exact steps over the same rows in host memory."""
        runner = self._runner(sampler)
        sequences: list[Sequence] = []
        own, filling_s = 0, 0.0
        for batch in self.sizes.batches:
            while len(sequences) < batch:
                if not sequences or self._room_for_another(runner, filling_s):
                    begin = self._now()
                    sequences.append(self._filled(runner))
                    runner.build_index(sequences[-1], sampler)
                    filling_s = self._now() - begin
                    self.say(f"{sampler}: filled and indexed in {filling_s:.1f} s")
                    own += 1
                else:
                    sequences.append(runner.fork(sequences[len(sequences) % own]))
            self._row(sampler, runner, sequences, sampler, min(own, batch))
            if sampler == "rabitq":
                self._scanned_there(runner, sequences)
            if batch > 1:
                self._whole(sampler, runner, sequences)
            if offloaded:
                self._row("exact-offloaded", runner, sequences, "exact", min(own, batch))
            if batch in (self.sizes.batches[0], self.sizes.batches[-1]):
                self._overlap(sampler, runner, sequences)
        if offloaded:
            self._prefill_at_the_end(runner, sequences[0])

    def _runner(self, sampler: str) -> ModelRunner:
        engine = self.engine
        if engine.plan.mode == sampler:
            return engine.runner
        planned = self._plan(engine.shape, self._settings(self.sizes.name, sampler))
        return ModelRunner(engine.runner.model, engine.shape, planned, self.device, hash_seed=0)

    def _room_for_another(self, runner: ModelRunner, filling_s: float) -> bool:
        need = runner.plan.sequence_bytes(self.sizes.context) + _KEPT_FREE
        free = hardware.free_memory()
        if self.memory is not None:
            free = self.memory - hardware.process_bytes()
        return free > need and self.clock.left > _RESERVE_S + 1.5 * filling_s

    def _row(self, name: str, runner: ModelRunner, sequences: list[Sequence], mode: str, own: int) -> None:
        """A row of the document, and of the smallest batch also one without CUDA graphs."""
        self._time("rows", name, runner, sequences, mode, own)
        if len(sequences) == self.sizes.batches[0]:
            with runner.segments.paused():
                self._time("without_graphs", name, runner, sequences, mode, own)

    def _time(
        self, into: str, name: str, runner: ModelRunner, sequences: list[Sequence], mode: str, own: int
    ) -> None:  # fmt: skip
        """Time steps of a batch and add them to the document; sequences are as before afterwards."""
        batch, title = len(sequences), f"{name}, batch {len(sequences)}" + ", eager" * (into != "rows")
        if self.clock.left < 0:
            self._skip(title, "no time was left")
            return
        self._forget_peak()
        replayed = runner.segments.replayed
        found = list(self._steps(runner, sequences, mode))[1:]  # the first warms up
        samples = [ms for ms, _ in found]
        steps = [stats for _, stats in found]
        stages = _means([stats.stages_ms for stats in steps])
        ratios = [stats.sampled_ratio for stats in steps if stats.sampled_ratio is not None]
        row = {
            "mode": name, "context": self.sizes.context, "batch": batch, "tpot_ms": statistics.median(samples),
            "stages_ms": stages, "vram_bytes": self._peak_bytes(), "rss_bytes": psutil.Process().memory_info().rss,
            "sampled_ratio": statistics.mean(ratios) if ratios else None, "own_memory": own, "samples_ms": samples,
            "graphs": runner.segments.replayed > replayed,
            "device_ms": _means([stats.device_ms for stats in steps]),
            "waited_ms": statistics.mean(stats.waited_ms for stats in steps),
        }  # fmt: skip
        self.document[into].append(row)
        self.document["notices"] += runner.segments.new_notices()
        self._keep()
        self.say(f"{title}: {row['tpot_ms']:.1f} ms per step")

    def _whole(self, sampler: str, runner: ModelRunner, sequences: list[Sequence]) -> None:
        """What the row that was just measured takes if its batch is one forward, not two that overlap."""
        batch, row = len(sequences), self.document["rows"][-1:]
        if self.clock.left < 0 or not row:
            self._skip(f"{sampler}, batch {batch} whole", "no time was left")
            return
        runner.halves = False
        try:
            samples = [ms for ms, _ in self._steps(runner, sequences, sampler)][1:]
        finally:
            runner.halves = None
        both = {"halves_ms": row[0]["tpot_ms"], "whole_ms": statistics.median(samples)}
        self.document["halves"].setdefault(sampler, {})[str(batch)] = both
        self.say(f"{sampler}, batch {batch} whole: {both['whole_ms']:.1f} ms per step")

    def _scanned_there(self, runner: ModelRunner, sequences: list[Sequence]) -> None:
        """The row that was just measured, but the GPU scans signatures in its memory; as many keys should come."""
        batch, plan = len(sequences), runner.plan
        rows = [row for row in self.document["rows"] if (row["mode"], row["batch"]) == ("rabitq", batch)]
        if self.clock.left < 0 or not rows:
            self._skip(f"signatures on the GPU, batch {batch}", "no time was left")
            return
        row = rows[-1]
        self._forget_peak()
        runner.follow(replace(plan, signatures_there=True))
        try:
            found = list(self._steps(runner, sequences, "rabitq"))[1:]
        finally:
            runner.follow(plan)
        steps = [stats for _, stats in found]
        self.document["signatures"][str(batch)] = both = {
            "host_ms": row["tpot_ms"], "device_ms": statistics.median(ms for ms, _ in found),
            "host_retrieve_ms": row["stages_ms"]["retrieve"],
            "retrieve_ms": statistics.mean(stats.stages_ms["retrieve"] for stats in steps),
            "scan_ms": statistics.mean(stats.device_ms.get("retrieve", 0.0) for stats in steps),
            "waited_ms": statistics.mean(stats.waited_ms for stats in steps), "host_waited_ms": row["waited_ms"],
            "sampled_ratio": statistics.mean(stats.sampled_ratio for stats in steps), "vram_bytes": self._peak_bytes(),
        }  # fmt: skip
        self.document["notices"] += runner.staging.new_notices()
        self.say(f"signatures on the GPU, batch {batch}: {both['device_ms']:.1f} ms per step")

    def _steps(self, runner: ModelRunner, sequences: list[Sequence], mode: str) -> Iterator[tuple[float, Any]]:
        """(milliseconds, stats) of steps, the first to be left out; tokens differ, so that no two queries are alike."""
        before = sequences[0].length
        draw = torch.Generator().manual_seed(0)
        spent = 0.0
        try:
            for number in range(1 + self.sizes.steps):
                tokens = torch.randint(3, self.engine.shape.vocab, (len(sequences),), generator=draw).tolist()
                begin = self._now()
                step = runner.decode(sequences, tokens, mode)
                ms = 1e3 * (self._now() - begin)
                yield ms, step.stats
                spent += ms / 1e3
                if number and spent > self.sizes.row_s:
                    break
        finally:
            for sequence in sequences:
                sequence.truncate(before)

    def _overlap(self, sampler: str, runner: ModelRunner, sequences: list[Sequence]) -> None:
        steps = self._steps(runner, sequences, sampler)

        def few() -> None:
            for _, _ in zip(range(3), steps, strict=False):
                pass

        found = measure_overlap(few)
        steps.close()  # type: ignore[attr-defined]
        batch = len(sequences)
        self.document["overlap"].setdefault(sampler, {})[str(batch)] = found.as_json()
        if self.document["overlap_percent"] is None:
            self.document["overlap_percent"] = found.percent

    def _prefill_at_the_end(self, runner: ModelRunner, sequence: Sequence) -> None:
        """One chunk that attends to everything before it, streamed from host memory."""
        ids = _ids(runner.plan.chunk)
        begin = self._now()
        for _ in runner.prefill(sequence, ids, "exact"):
            pass
        self.document["prefill"]["at_context_tok_s"] = len(ids) / (self._now() - begin)
        sequence.truncate(self._length)

    def _compare(self) -> None:
        """How many times faster samplers are than exact steps over the same rows in host memory."""
        times = {(row["mode"], row["batch"]): row["tpot_ms"] for row in self.document["rows"]}
        for sampler in SAMPLERS:
            both = {b: times["exact-offloaded", b] / ms for (mode, b), ms in times.items()
                    if mode == sampler and ("exact-offloaded", b) in times}  # fmt: skip
            if both:
                self.document["faster_than_offloaded"][sampler] = {str(batch): ratio for batch, ratio in both.items()}

    def _now(self) -> float:
        """Seconds, when the GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each entry."""
    return {name: statistics.mean(table[name] for table in tables) for name in tables[0]}


def _ids(count: int) -> list[int]:
    return [3 + number % 97 for number in range(count)]


def _driver(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"cuda": None, "gpu_bytes": None}
    return {"cuda": torch.version.cuda, "gpu_bytes": torch.cuda.mem_get_info(device)[1]}


def check(
    sizes: Sizes, device: torch.device, limit_s: float, memory: int | None = None, output: Path | None = None
) -> dict[str, Any]:  # fmt: skip
    """Run everything; the document of CLI.md's `scripts/gpu_check.sh` with more keys beside.

    memory: bytes of host memory to count on instead of what the system calls free; output: kept up to date meanwhile.
    """
    run = Check(sizes, device, Clock(limit_s), memory, output)
    run.document["meta"]["dry_run"] = sizes is TOY
    run.run()
    run.document["seconds"]["total"] = round(run.clock.spent, 1)
    run._keep()
    return run.document


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU at toy size: tests this program, no figures")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--limit", type=float, default=420.0, metavar="SECONDS", help="no row begins later")
    parser.add_argument("--memory", type=parse_bytes, metavar="SIZE",
                        help="host memory to count on, like 120GiB, where the system says less")  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep the document there while it grows")
    given = parser.parse_args(arguments)
    if not given.dry_run and not torch.cuda.is_available():
        print(f"error: torch {torch.__version__} sees no GPU here", file=sys.stderr)
        print("hint: nvidia-smi; or --dry-run", file=sys.stderr)
        return 1
    sizes, device = (TOY, torch.device("cpu")) if given.dry_run else (FULL, torch.device(given.device))
    document = check(sizes, device, given.limit, given.memory, given.output)
    print(json.dumps(document))
    return 0 if not document["problems"] and document["parity"]["tokens_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
