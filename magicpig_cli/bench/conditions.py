"""What else went on while something was timed, as far as the system tells: who took the CPUs, and what memory did.

Two readings of ever-growing counters and their difference. All files lie below one root; tests bring others.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicpig_cli.hardware import quota_stopped_s

STEAL_LIMIT = 0.02  # share of the CPUs' time that the hypervisor gave to others
QUOTA_LIMIT = 0.01  # share of the time in which a cgroup's quota held this process
OTHERS_LIMIT = 0.1  # CPUs that other programs used and that our threads wanted
SWAP_LIMIT_BYTES = 1 << 20
FAULT_LIMIT = 100  # pages read back from disk
CLOCK_LIMIT = 0.05  # fall of the clock from the first repetition to the last
_JUDGED_FROM_S = 0.5  # the system counts CPU time in steps of 10 ms: 2% of this
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading. CPU times are sums over the CPUs that this process may use."""

    wall_s: float
    busy_s: float  # of any program
    steal_s: float
    own_s: float  # of this process, all threads
    quota_s: float
    swapped_bytes: int  # in and out, whole machine
    major_faults: int  # of this process
    hot_events: int  # times that a core or package was slowed down because of heat
    mhz: float | None  # mean clock now

    @classmethod
    def read(cls, root: Path = Path("/")) -> Counters:
        """Counters as they stand; what this system does not count stays 0."""
        cpus = _usable_cpus()
        busy_s, steal_s = _cpu_times(root, cpus)
        swaps = re.findall(r"^pswp(?:in|out) (\d+)$", _read(root / "proc/vmstat"), re.MULTILINE)
        faults = _read(root / "proc/self/stat").rpartition(")")[2].split()  # fields 3… of proc(5)
        return cls(
            wall_s=time.monotonic(),
            busy_s=busy_s,
            steal_s=steal_s,
            own_s=time.process_time(),
            quota_s=quota_stopped_s(root),
            swapped_bytes=sum(map(int, swaps)) * _PAGE_BYTES,
            major_faults=int(faults[9]) if len(faults) > 9 else 0,
            hot_events=_hot_events(root, cpus),
            mhz=_mean_mhz(root, cpus),
        )


@dataclass(frozen=True, slots=True)
class Conditions:
    """What went on during several stretches of time, taken together."""

    wall_s: float
    cpus: int
    steal_s: float
    others_s: float  # CPU time of other programs on our CPUs
    quota_s: float
    swapped_bytes: int
    major_faults: int
    hot_events: int
    mhz: tuple[float, float] | None  # clock at the end of the first and of the last stretch

    @classmethod
    def between(cls, readings: Sequence[tuple[Counters, Counters]]) -> Conditions:
        """The sum over stretches, each given by the reading before it and the one after it; at least one."""
        pairs = [(before, after) for before, after in readings]
        clocks = [after.mhz for _, after in pairs]

        def spent(name: str) -> Any:
            return sum(getattr(after, name) - getattr(before, name) for before, after in pairs)

        return cls(
            wall_s=spent("wall_s"),
            cpus=len(_usable_cpus()),
            steal_s=spent("steal_s"),
            others_s=max(0.0, spent("busy_s") - spent("own_s")),
            quota_s=spent("quota_s"),
            swapped_bytes=spent("swapped_bytes"),
            major_faults=spent("major_faults"),
            hot_events=spent("hot_events"),
            mhz=None if clocks[0] is None or clocks[-1] is None else (clocks[0], clocks[-1]),
        )

    def as_json(self) -> dict[str, Any]:
        """`conditions` of a bench row: shares of the measured time, counts, bytes."""
        wall_s = max(self.wall_s, 1e-9)
        return {
            "steal": self.steal_s / (wall_s * self.cpus),
            "others_cpus": self.others_s / wall_s,
            "quota": self.quota_s / wall_s,
            "swapped_bytes": self.swapped_bytes,
            "major_faults": self.major_faults,
            "hot_events": self.hot_events,
            "mhz": None if self.mhz is None else {"first": self.mhz[0], "last": self.mhz[1]},
        }

    def complaints(self, threads: int) -> list[str]:
        """One line for each thing that took time from `threads` threads of ours; nothing that is not known."""
        found = []
        if self.wall_s >= _JUDGED_FROM_S:
            found += self._complaints_of_cpus(threads)
        if self.swapped_bytes > SWAP_LIMIT_BYTES:
            found.append(f"the machine swapped {self.swapped_bytes / 2**20:,.0f} MiB meanwhile: memory is short")
        if self.major_faults > FAULT_LIMIT:
            found.append(f"{self.major_faults:,} pages were read back from disk meanwhile")
        if self.hot_events:
            found.append(f"heat slowed the CPU down {self.hot_events:,} times")
        if self.mhz is not None and self.mhz[1] < (1 - CLOCK_LIMIT) * self.mhz[0]:
            found.append(f"the CPU's clock fell from {self.mhz[0]:,.0f} to {self.mhz[1]:,.0f} MHz")
        return found

    def _complaints_of_cpus(self, threads: int) -> list[str]:
        found = []
        if self.steal_s > STEAL_LIMIT * self.wall_s * self.cpus:
            share = self.steal_s / (self.wall_s * self.cpus)
            found.append(f"the hypervisor gave {share:.1%} of the CPU time to others (steal)")
        if self.quota_s > QUOTA_LIMIT * self.wall_s:
            found.append(f"a CPU quota (cgroup) held the program for {self.quota_s / self.wall_s:.1%} of the time")
        others = self.others_s / self.wall_s
        if others > max(0, self.cpus - threads) + OTHERS_LIMIT:
            ours = "1 thread was" if threads == 1 else f"{threads} threads were"
            found.append(f"other programs used {others:.1f} of {self.cpus} CPUs while {ours} at work here")
        return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpu_times(root: Path, cpus: set[int]) -> tuple[float, float]:
    """Seconds (busy, stolen) of these CPUs since the start of the system, from proc(5)'s /proc/stat."""
    busy = stolen = 0
    for line in _read(root / "proc/stat").splitlines():
        name, *ticks = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cpus and len(ticks) >= 8:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, ticks[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return busy / _TICKS, stolen / _TICKS


def _hot_events(root: Path, cpus: set[int]) -> int:
    """Times that these cores slowed down because they were too hot, as Intel's CPUs count them."""
    folder = root / "sys/devices/system/cpu"
    texts = [_read(folder / f"cpu{cpu}/thermal_throttle/core_throttle_count").strip() for cpu in cpus]
    return sum(int(text) for text in texts if text.isdigit())


def _mean_mhz(root: Path, cpus: set[int]) -> float | None:
    """Mean clock of these CPUs at this moment; None where it is not told, as in most virtual machines."""
    folder = root / "sys/devices/system/cpu"
    texts = [_read(folder / f"cpu{cpu}/cpufreq/scaling_cur_freq").strip() for cpu in cpus]
    clocks = [int(text) / 1000 for text in texts if text.isdigit()]
    return sum(clocks) / len(clocks) if clocks else None
