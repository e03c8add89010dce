"""Repetitions that disagree are told, with the cause only where the system tells one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from magicpig_cli.bench import conditions
from magicpig_cli.bench.conditions import Conditions, Counters
from magicpig_cli.bench.noise import complaints, drift, repetition_means, variation
from magicpig_cli.hardware import quota_stopped_s


def test_variation_is_over_repetitions():
    means = repetition_means([[9.0, 11.0], [10.0, 14.0]])
    assert means.tolist() == [10.0, 12.0]
    assert variation(means) == pytest.approx(np.sqrt(2) / 11)
    assert variation(means[:1]) is None


@pytest.mark.parametrize(
    ("means", "wanted"),
    [
        ([10, 10, 12, 12], 0.2),
        ([10, 10, 99, 12, 12], 0.2),  # the middle one belongs to neither half
        ([12, 12, 10, 10], 10 / 12 - 1),
        ([10, 12, 11, 13], 0.0),  # halves overlap: scatter
        ([10, 11, 12], None),
    ],
)
def test_drift(means, wanted):
    assert drift(np.array(means, dtype=float)) == (None if wanted is None else pytest.approx(wanted))


def test_the_control_tells_whether_it_was_the_machine():
    slower, steady = np.array([10.0, 10.1, 12.0, 12.1]), np.array([20.0, 20.2, 20.1, 20.0])
    assert complaints(steady, steady) == []
    spread, moved = complaints(slower, 2 * slower)
    assert "coefficient of variation" in spread
    assert "10.0 to 12.1 ms" in spread
    assert moved.startswith("later repetitions are 20% slower")
    assert moved.endswith("the machine changed, not the mode")
    assert "which took turns with them, are not (+0%)" in complaints(slower, steady)[1]
    assert complaints(slower, None)[1] == "later repetitions are 20% slower than earlier ones"
    assert "faster" in complaints(slower[::-1], None)[1]


QUIET = Counters(0, 0, 0, 0, 0, 0, 0, 0, 3000.0)


def over(seconds: float, **changes: float) -> Conditions:
    """Two stretches of that many seconds on two CPUs; in the second one `changes` came on top."""
    first = replace(QUIET, wall_s=seconds)
    return Conditions.between([(QUIET, first), (first, replace(first, wall_s=2 * seconds, **changes))])


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch):
    monkeypatch.setattr(conditions, "_usable_cpus", lambda: {0, 1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"busy_s": 18.0, "own_s": 18.0}, None),
        ({"busy_s": 20.0, "own_s": 18.0}, "other programs used 0.2 of 2 CPUs while 2 threads were at work here"),
        ({"busy_s": 18.9, "own_s": 18.0}, None),
        ({"steal_s": 2.0}, "the hypervisor gave 10.0% of the CPU time to others"),
        ({"steal_s": 0.3}, None),
        ({"quota_s": 1.0}, "held the program for 10.0% of the time"),
        ({"swapped_bytes": 3 << 20}, "swapped 3 MiB"),
        ({"swapped_bytes": 1 << 20}, None),
        ({"major_faults": 1234}, "1,234 pages were read back"),
        ({"hot_events": 2}, "heat slowed the CPU down 2 times"),
        ({"mhz": 2000.0}, "clock fell from 3,000 to 2,000 MHz"),
        ({"mhz": 2900.0}, None),
        ({"mhz": None}, None),
    ],
)
def test_causes(changes, said):
    found = over(5.0, **changes).complaints(threads=2)
    if said is None:
        assert found == []
    else:
        (text,) = found
        assert said in text


def test_a_free_cpu_may_be_used_by_others():
    assert over(5.0, busy_s=19.0, own_s=9.5).complaints(threads=1) == []
    (text,) = over(5.0, busy_s=24.0, own_s=9.5).complaints(threads=1)
    assert "other programs used 1.4 of 2 CPUs while 1 thread was at work here" in text


def test_what_is_shorter_than_the_clock_of_the_system_is_not_judged():
    assert over(0.1, busy_s=0.4, own_s=0.1, steal_s=0.1).complaints(threads=2) == []


def test_json_has_shares():
    found = over(5.0, busy_s=14.0, own_s=10.0, steal_s=1.0, quota_s=0.5).as_json()
    assert found == {
        "steal": pytest.approx(0.05), "others_cpus": pytest.approx(0.4), "quota": pytest.approx(0.05),
        "swapped_bytes": 0, "major_faults": 0, "hot_events": 0, "mhz": {"first": 3000.0, "last": 3000.0},
    }  # fmt: skip


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_counters_are_read_from_the_system(tmp_path):
    """CPU 2 is not ours. Fields as in proc(5)."""
    ticks = os.sysconf("SC_CLK_TCK")
    stat = "".join(
        f"cpu{cpu} " + " ".join(str(n * ticks) for n in (1, 2, 3, 100, 50, 4, 5, steal, 7, 7)) + "\n"
        for cpu, steal in ((0, 6), (1, 10), (2, 1000))
    )
    root = write(
        tmp_path,
        {
            "proc/stat": f"cpu  9 9 9 9 9 9 9 9 9 9\n{stat}intr 5\n",
            "proc/vmstat": "pgfault 5\npswpin 3\npswpout 4\n",
            "proc/self/stat": "7 (a ) b) R " + " ".join(map(str, range(4, 30))),
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "2000000\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3000000\n",
            "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count": "8\n",
            "sys/devices/system/cpu/cpu2/thermal_throttle/core_throttle_count": "800\n",
        },
    )
    found = Counters.read(root)
    assert (found.busy_s, found.steal_s) == (30.0, 16.0)
    assert found.swapped_bytes == 7 * os.sysconf("SC_PAGE_SIZE")
    assert found.major_faults == 12  # field 12
    assert (found.hot_events, found.mhz) == (8, 2500.0)


def test_a_system_that_tells_nothing(tmp_path):
    found = Counters.read(tmp_path)
    assert (found.busy_s, found.steal_s, found.swapped_bytes, found.major_faults, found.mhz) == (0, 0, 0, 0, None)
    assert Conditions.between([(found, Counters.read(tmp_path))]).complaints(threads=2) == []


@pytest.mark.parametrize(
    ("cgroup", "files", "wanted"),
    [
        (
            "0::/a/b\n",
            {"a/cpu.stat": "nr_periods 5\nthrottled_usec 1500000\n", "a/b/cpu.stat": "throttled_usec 500000\n"},
            1.5,
        ),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.stat": "nr_throttled 2\nthrottled_time 2500000000\n"}, 2.5),
        ("0::/a\n", {}, 0.0),
    ],
)
def test_time_held_by_a_quota(tmp_path, cgroup, files, wanted):
    write(tmp_path, {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})
    assert quota_stopped_s(tmp_path) == wanted
