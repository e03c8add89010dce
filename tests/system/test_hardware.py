"""The probe on trees of other machines: hyper-threads, affinity, cgroups v1 and v2, containers (CASES 21, 22)."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicpig_cli import hardware

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(cpus: int = 8, siblings: int = 1, allowed: str | None = None, free_gib: int = 200) -> dict[str, str]:
    """A host with `cpus` logical CPUs, `siblings` of them per core: CPU n and n + cpus/siblings share one."""
    cores = cpus // siblings
    blocks = [
        f"processor\t: {n}\nmodel name\t: Some CPU @ 2 GHz [x]\nphysical id\t: 0\ncore id\t\t: {n % cores}\n"
        for n in range(cpus)
    ]
    return {
        "proc/cpuinfo": "\n".join(blocks),
        "proc/meminfo": f"MemTotal:  {GIB} kB\nMemFree: 1 kB\nMemAvailable: {free_gib << 20} kB\n",
        "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{allowed or f'0-{cpus - 1}'}\n",
        "proc/self/statm": "1000 300 100 1 0 1 0\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "sys/devices/system/node/online": "0-1\n",
    }


def test_a_plain_host(tmp_path):
    found = hardware.probe(write(tmp_path, machine(cpus=16, siblings=2)))
    assert (found.cores_physical, found.cores_usable, found.threads) == (8, 16, 8)
    assert found.cpu_model == "Some CPU @ 2 GHz [x]"
    assert found.numa_nodes == 2
    assert (found.memory_total, found.memory_free, found.memory_limit) == (1024 * GIB, 200 * GIB, None)
    assert found.process_bytes == 200 * hardware.os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("allowed", "usable", "threads"),
    [("0-3", 4, 4), ("0,8", 2, 1), ("0-7", 8, 8), ("0-1,8-9", 4, 2), ("5", 1, 1)],
)
def test_affinity_counts_cores_not_hyper_threads(tmp_path, allowed, usable, threads):
    found = hardware.probe(write(tmp_path, machine(cpus=16, siblings=2, allowed=allowed)))
    assert (found.cores_physical, found.cores_usable, found.threads) == (8, usable, threads)


def test_cores_from_sysfs_where_cpuinfo_has_none(tmp_path):
    files = machine(cpus=4)
    files["proc/cpuinfo"] = "\n".join(f"processor\t: {n}\nCPU implementer\t: 0x41\n" for n in range(4))
    for cpu in range(4):
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = "0-1\n" if cpu < 2 else "2-3\n"
    files["sys/devices/system/cpu/cpufreq/boost"] = "1\n"
    found = hardware.probe(write(tmp_path, files))
    assert (found.cores_physical, found.cores_usable, found.threads) == (2, 4, 2)


def v2(path: str, cpu_max: str = "max 100000", limit: str = "max", used: int = 0, cache: int = 0) -> dict[str, str]:
    folder = "sys/fs/cgroup" + path
    return {
        f"{folder}/cpu.max": cpu_max + "\n",
        f"{folder}/memory.max": limit + "\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
    }


def v1(path: str, quota: str = "-1", limit: int = 9223372036854771712, used: int = 0, cache: int = 0) -> dict[str, str]:
    cpu, memory = f"sys/fs/cgroup/cpu,cpuacct{path}", f"sys/fs/cgroup/memory{path}"
    return {
        f"{cpu}/cpu.cfs_quota_us": quota + "\n",
        f"{cpu}/cpu.cfs_period_us": "100000\n",
        f"{memory}/memory.limit_in_bytes": f"{limit}\n",
        f"{memory}/memory.usage_in_bytes": f"{used}\n",
        f"{memory}/memory.stat": f"cache 1\ninactive_file 3\ntotal_inactive_file {cache}\n",
    }


V1_SELF = "12:memory:{0}\n4:cpu,cpuacct:{0}\n1:name=systemd:{0}\n"


@pytest.mark.parametrize(
    ("groups", "self_cgroup", "threads", "free", "limit"),
    [
        pytest.param(v2("", "400000 100000", str(90 * GIB), 10 * GIB), "0::/\n", 4, 80, 90, id="v2-container"),
        pytest.param(v2("", "max 100000"), "0::/\n", 8, 200, None, id="v2-unlimited"),
        pytest.param(
            {**v2("/a", "250000 100000", str(64 * GIB), 4 * GIB), **v2("/a/b", "max 100000", str(90 * GIB), 1 * GIB)},
            "0::/a/b\n", 2, 60, 64, id="v2-parent-is-tighter",
        ),
        pytest.param(
            {**v2("/a", limit=str(64 * GIB), used=60 * GIB), **v2("/a/b", limit=str(32 * GIB), used=1 * GIB)},
            "0::/a/b\n", 8, 4, 32, id="v2-least-room-is-not-at-the-least-limit",
        ),
        pytest.param(
            v2("", limit=str(10 * GIB), used=9 * GIB, cache=6 * GIB), "0::/\n", 8, 7, 10, id="v2-page-cache-is-room",
        ),
        pytest.param(v2("", "50000 100000"), "0::/\n", 1, 200, None, id="v2-half-a-cpu-is-one-thread"),
        pytest.param(
            v1("/slice", "300000", 16 * GIB, 6 * GIB, 1 * GIB), V1_SELF.format("/slice"), 3, 11, 16, id="v1-own-path",
        ),
        pytest.param(
            v1("", "400000", 90 * GIB, 10 * GIB), V1_SELF.format("/docker/0123abc"), 4, 80, 90,
            id="v1-host-path-seen-from-a-container",
        ),
        pytest.param(v1(""), V1_SELF.format("/"), 8, 200, None, id="v1-unlimited"),
        pytest.param({}, "", 8, 200, None, id="no-cgroups"),
        pytest.param(v2("", limit=str(2 * GIB), used=3 * GIB), "0::/\n", 8, 0, 2, id="over-the-limit"),
    ],
)  # fmt: skip
def test_cgroups(tmp_path, groups, self_cgroup, threads, free, limit):
    found = hardware.probe(write(tmp_path, {**machine(cpus=8), **groups, "proc/self/cgroup": self_cgroup}))
    assert found.threads == threads
    assert found.memory_free == free * GIB
    assert found.memory_limit == (None if limit is None else limit * GIB)


def test_a_limit_above_the_machine_is_no_limit(tmp_path):
    files = {**machine(), **v2("", limit=str(2048 * GIB)), "proc/self/cgroup": "0::/\n"}
    assert hardware.probe(write(tmp_path, files)).memory_limit is None


def test_an_empty_tree_falls_back_to_what_python_knows(tmp_path):
    found = hardware.probe(tmp_path)
    assert found.threads >= 1
    assert 0 < found.memory_free <= found.memory_total
    assert found.process_bytes > 0


def test_this_machine():
    found = hardware.probe()
    assert 1 <= found.threads <= found.cores_physical
    assert found.threads <= found.cores_usable
    assert 0 < found.memory_free <= found.memory_total
    assert found.isa in (*found.tiers, "reference")


def test_openmp_runtimes_are_told_apart_by_file(tmp_path):
    maps = (
        "7f0-7f1 r-xp 00000000 fe:00 1 /a/torch/lib/libgomp-98b21ff3.so.1\n"
        "7f1-7f2 r--p 00000000 fe:00 1 /a/torch/lib/libgomp-98b21ff3.so.1\n"
        "7f2-7f3 r-xp 00000000 fe:00 2 /usr/lib/libgomp.so.1.0.0\n"
        "7f3-7f4 r-xp 00000000 fe:00 3 /opt/intel/libiomp5.so\n"
        "7f4-7f5 r-xp 00000000 fe:00 4 /usr/lib/libcompress.so.1\n"
        "7f5-7f6 rw-p 00000000 00:00 0\n"
    )
    found = hardware.openmp_runtimes(write(tmp_path, {"proc/self/maps": maps}))
    assert found == ("libgomp-98b21ff3.so.1", "libgomp.so.1.0.0", "libiomp5.so")
