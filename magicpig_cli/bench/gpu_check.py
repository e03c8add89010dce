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
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from magicpig_cli import hardware
from magicpig_cli.bench.gpu_parity import compare_devices, compare_halves
from magicpig_cli.bench.gpu_report import Clock, Report
from magicpig_cli.bench.gpu_sizes import FULL, TOY, Sizes
from magicpig_cli.bench.gpu_steps import Card, Steps
from magicpig_cli.bench.launch import launch_ms
from magicpig_cli.bench.on_device import DeviceRunner
from magicpig_cli.bench.report import meta
from magicpig_cli.bench.synthetic import SyntheticLayer, SyntheticShape
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.cards import assumed
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.kernels.memory import give_back_freed
from magicpig_cli.model.loader import load_config
from magicpig_cli.model.shape import ModelShape, shape_from_config
from magicpig_cli.planner.plan import Mode, Plan
from magicpig_cli.planning import plan_here
from magicpig_cli.units import parse_bytes

SAMPLERS = ("lsh", "rabitq")
_KEPT_FREE = 4 << 30  # bytes of host memory that copies of the sequence leave alone
_RESERVE_S = 160  # what is measured after copies of the sequence are made takes so long


class Check:
    """One run: the document grows as things are measured."""

    def __init__(
        self, sizes: Sizes, device: torch.device, clock: Clock, memory: int | None = None, output: Path | None = None
    ) -> None:  # fmt: skip
        self.sizes, self.device, self.memory = sizes, device, memory
        self.report, self.card = Report(device, clock, output), Card(device)

    def run(self) -> None:
        with self.report.part("parity"):
            self._parity()
        with self.report.part("load"), tempfile.TemporaryDirectory() as folder:
            self.engine = self._load(Path(folder))
        if not hasattr(self, "engine"):
            return
        self.steps = Steps(self.report, self.card, self.sizes, self.engine.shape.vocab)
        with self.report.part("prefill"):
            self._prefill()
        with self.report.part("launch"):
            for batch in self.sizes.batches:
                self.report.document["launch_ms"][str(batch)] = launch_ms(self.engine.runner, batch)
        self.tiles = list(self._tiles())
        with self.report.part("exact-on-gpu"):
            self._exact_on_gpu()
        offloaded = True
        for sampler in SAMPLERS:
            if sampler not in get_args(Mode):
                self.report.skip(sampler, "this version has no such sampler")
                continue
            with self.report.part(sampler):
                self._sampled(sampler, offloaded)
                offloaded = False
        self._compare()

    def _parity(self) -> None:
        parts = {}
        for name, config in self.sizes.models.items():
            for mode in ("exact", "lsh"):
                self.report.say(f"parity of {name}, {mode}")
                parts[f"{name}, {mode}"] = compare_devices(config, mode, self.device, self.sizes.parity)
            self.report.say(f"parity of {name}, lsh in halves")
            parts[f"{name}, lsh in halves"] = compare_halves(config, "lsh", self.device, self.sizes.parity)
        self.report.document["parity"] = {
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
        self.report.document["meta"] |= meta(engine, hardware.probe()) | _driver(self.device)
        return engine

    def _plan(self, shape: ModelShape, settings: Settings) -> Plan:
        return plan_here(shape, settings, assume=lambda machine: assumed(machine, None, self.memory))

    def _prefill(self) -> None:
        """Exact attention over a prompt from the start; tables are not part of it."""
        self.card.forget_peak()
        rates = []
        for _ in range(2):  # the first warms up
            sequence, ids = self.engine.new_sequence(), _ids(self.sizes.prompt)
            begin = self.card.now()
            for _ in self.engine.runner.prefill(sequence, ids, "exact"):
                pass
            rates.append(len(ids) / (self.card.now() - begin))
            sequence.release()
        self.report.document["prefill_tok_s"] = rates[-1]
        self.report.document["prefill"] |= {"tokens": self.sizes.prompt, "vram_bytes": self.card.peak_bytes()}

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
            self.steps.row("exact-on-gpu", runner, sequences, "exact", own=batch)

    def _sampled(self, sampler: str, offloaded: bool) -> None:
        """Rows of a sampler, and beside those of the first one exact steps over the same rows in host memory."""
        runner = self._runner(sampler)
        sequences: list[Sequence] = []
        own, filling_s = 0, 0.0
        for batch in self.sizes.batches:
            while len(sequences) < batch:
                if not sequences or self._room_for_another(runner, filling_s):
                    begin = self.card.now()
                    sequences.append(self._filled(runner))
                    runner.build_index(sequences[-1], sampler)
                    filling_s = self.card.now() - begin
                    self.report.say(f"{sampler}: filled and indexed in {filling_s:.1f} s")
                    own += 1
                else:
                    sequences.append(runner.fork(sequences[len(sequences) % own]))
            self.steps.row(sampler, runner, sequences, sampler, min(own, batch))
            if batch > 1:
                self.steps.whole(sampler, runner, sequences)
            if offloaded:
                self.steps.row("exact-offloaded", runner, sequences, "exact", min(own, batch))
            if batch in (self.sizes.batches[0], self.sizes.batches[-1]):
                self.steps.overlap(sampler, runner, sequences)
            if sampler == "rabitq":
                with self.report.part(f"signatures on the GPU, batch {batch}"):
                    self.steps.scanned_there(runner, sequences)
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
        return free > need and self.report.clock.left > _RESERVE_S + 1.5 * filling_s

    def _prefill_at_the_end(self, runner: ModelRunner, sequence: Sequence) -> None:
        """One chunk that attends to everything before it, streamed from host memory."""
        ids = _ids(runner.plan.chunk)
        begin = self.card.now()
        for _ in runner.prefill(sequence, ids, "exact"):
            pass
        self.report.document["prefill"]["at_context_tok_s"] = len(ids) / (self.card.now() - begin)
        sequence.truncate(self._length)

    def _compare(self) -> None:
        """How many times faster samplers are than exact steps over the same rows in host memory."""
        times = {(row["mode"], row["batch"]): row["tpot_ms"] for row in self.report.document["rows"]}
        for sampler in SAMPLERS:
            both = {b: times["exact-offloaded", b] / ms for (mode, b), ms in times.items()
                    if mode == sampler and ("exact-offloaded", b) in times}  # fmt: skip
            if both:
                self.report.document["faster_than_offloaded"][sampler] = {
                    str(batch): ratio for batch, ratio in both.items()
                }


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
    run.report.document["meta"]["dry_run"] = sizes is TOY
    run.run()
    run.report.document["seconds"]["total"] = round(run.report.clock.spent, 1)
    run.report.keep()
    return run.report.document


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
