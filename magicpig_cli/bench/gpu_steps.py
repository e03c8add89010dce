"""Decode steps of a batch for `gpu_check`: as they are, without graphs, whole, scanned by the GPU, and profiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch

from magicpig_cli.bench.gpu_report import Report
from magicpig_cli.bench.gpu_sizes import Sizes
from magicpig_cli.bench.overlap import measure_overlap
from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.engine.runner import ModelRunner
from magicpig_cli.planner.memory import with_signature_copies


class Card:
    """Clock and memory of a device; a CPU's memory is not looked at."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Seconds, when the GPU has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def forget_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0


class Steps:
    """Times steps, and adds what they took to a report. vocab: tokens are drawn from so many."""

    def __init__(self, report: Report, card: Card, sizes: Sizes, vocab: int) -> None:
        self._report, self._card, self._sizes, self._vocab = report, card, sizes, vocab
        self._document = report.document

    def row(self, name: str, runner: ModelRunner, sequences: list[Sequence], mode: str, own: int) -> None:
        """A row of the document, and of the smallest batch also one without CUDA graphs."""
        self._time("rows", name, runner, sequences, mode, own)
        if len(sequences) == self._sizes.batches[0]:
            with runner.segments.paused():
                self._time("without_graphs", name, runner, sequences, mode, own)

    def _time(
        self, into: str, name: str, runner: ModelRunner, sequences: list[Sequence], mode: str, own: int
    ) -> None:  # fmt: skip
        """Time steps of a batch and add them to the document; sequences are as before afterwards."""
        batch, title = len(sequences), f"{name}, batch {len(sequences)}" + ", eager" * (into != "rows")
        if self._report.clock.left < 0:
            self._report.skip(title, "no time was left")
            return
        self._card.forget_peak()
        replayed = runner.segments.replayed
        found = list(self._steps(runner, sequences, mode))[1:]  # the first warms up
        samples = [ms for ms, _ in found]
        steps = [stats for _, stats in found]
        stages = _means([stats.stages_ms for stats in steps])
        ratios = [stats.sampled_ratio for stats in steps if stats.sampled_ratio is not None]
        row = {
            "mode": name, "context": self._sizes.context, "batch": batch, "tpot_ms": statistics.median(samples),
            "stages_ms": stages, "vram_bytes": self._card.peak_bytes(), "rss_bytes": psutil.Process().memory_info().rss,
            "sampled_ratio": statistics.mean(ratios) if ratios else None, "own_memory": own, "samples_ms": samples,
            "graphs": runner.segments.replayed > replayed,
            "device_ms": _means([stats.device_ms for stats in steps]),
            "waited_ms": statistics.mean(stats.waited_ms for stats in steps),
        }  # fmt: skip
        self._document[into].append(row)
        self._document["notices"] += runner.segments.new_notices()
        self._report.keep()
        self._report.say(f"{title}: {row['tpot_ms']:.1f} ms per step")

    def whole(self, sampler: str, runner: ModelRunner, sequences: list[Sequence]) -> None:
        """What the row that was just measured takes if its batch is one forward, not two that overlap."""
        batch, row = len(sequences), self._document["rows"][-1:]
        if self._report.clock.left < 0 or not row:
            self._report.skip(f"{sampler}, batch {batch} whole", "no time was left")
            return
        runner.halves = False
        try:
            samples = [ms for ms, _ in self._steps(runner, sequences, sampler)][1:]
        finally:
            runner.halves = None
        both = {"halves_ms": row[0]["tpot_ms"], "whole_ms": statistics.median(samples)}
        self._document["halves"].setdefault(sampler, {})[str(batch)] = both
        self._report.say(f"{sampler}, batch {batch} whole: {both['whole_ms']:.1f} ms per step")

    def scanned_there(self, runner: ModelRunner, sequences: list[Sequence]) -> None:
        """The row that was just measured, but the GPU scans copies of signatures: the same keys should come."""
        batch, plan = len(sequences), runner.plan
        rows = [row for row in self._document["rows"] if (row["mode"], row["batch"]) == ("rabitq", batch)]
        copied, title = with_signature_copies(plan), f"signatures on the GPU, batch {batch}"
        if self._report.clock.left < 0 or not rows:
            self._report.skip(title, "no time was left")
            return
        if plan.gpu is not None and not copied.scans_there:
            self._report.skip(title, "it has no room for a copy")
            return
        row = rows[-1]
        self._card.forget_peak()
        runner.follow(copied)
        try:
            found = list(self._steps(runner, sequences, "rabitq"))[1:]
        finally:
            runner.follow(plan)
        steps = [stats for _, stats in found]
        if notices := runner.staging.new_notices():  # the CPU has scanned some
            self._document["notices"] += notices
            self._report.skip(title, notices[0])
            return
        self._document["signatures"][str(batch)] = both = {
            "host_ms": row["tpot_ms"], "device_ms": statistics.median(ms for ms, _ in found),
            "host_retrieve_ms": row["stages_ms"]["retrieve"],
            "retrieve_ms": statistics.mean(stats.stages_ms["retrieve"] for stats in steps),
            "scan_ms": statistics.mean(stats.device_ms.get("retrieve", 0.0) for stats in steps),
            "waited_ms": statistics.mean(stats.waited_ms for stats in steps), "host_waited_ms": row["waited_ms"],
            "sampled_ratio": statistics.mean(stats.sampled_ratio for stats in steps),
            "vram_bytes": self._card.peak_bytes(),
        }  # fmt: skip
        self._report.say(f"{title}: {both['device_ms']:.1f} ms per step")

    def _steps(self, runner: ModelRunner, sequences: list[Sequence], mode: str) -> Iterator[tuple[float, Any]]:
        """(milliseconds, stats) of steps, the first to be left out; tokens differ, so that no two queries are alike."""
        before = sequences[0].length
        draw = torch.Generator().manual_seed(0)
        spent = 0.0
        try:
            for number in range(1 + self._sizes.steps):
                tokens = torch.randint(3, self._vocab, (len(sequences),), generator=draw).tolist()
                begin = self._card.now()
                step = runner.decode(sequences, tokens, mode)
                ms = 1e3 * (self._card.now() - begin)
                yield ms, step.stats
                spent += ms / 1e3
                if number and spent > self._sizes.row_s:
                    break
        finally:
            for sequence in sequences:
                sequence.truncate(before)

    def overlap(self, sampler: str, runner: ModelRunner, sequences: list[Sequence]) -> None:
        steps = self._steps(runner, sequences, sampler)

        def few() -> None:
            for _, _ in zip(range(3), steps, strict=False):
                pass

        found = measure_overlap(few)
        steps.close()  # type: ignore[attr-defined]
        batch = len(sequences)
        self._document["overlap"].setdefault(sampler, {})[str(batch)] = found.as_json()
        if self._document["overlap_percent"] is None:
            self._document["overlap_percent"] = found.percent


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each entry."""
    return {name: statistics.mean(table[name] for table in tables) for name in tables[0]}
