"""The probe on trees of other machines: hyper-threads, affinity, cgroups v1 and v2, containers (CASES 21, 22)."""

from __future__ import annotations

from pathlib import Path

import pytest

from magicpig_cli import hardware
from magicpig_cli.config import AttentionOptions, ModelOptions, Settings
from magicpig_cli.errors import MemoryBudgetError
from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner import plan
from magicpig_cli.profiles import BUILT_IN

GIB = 1 << 30
SMOL = ModelShape(
    family="llama", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, vocab=49_152,
    layer_windows=(None,) * 30, context=8192, params=134_515_008,
)  # fmt: skip
SETTINGS = Settings(ModelOptions(device="cpu", dtype="float32"), AttentionOptions("lsh"))


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


def merged(*trees: dict[str, str]) -> dict[str, str]:
    return {name: text for tree in trees for name, text in tree.items()}


def below_unified(files: dict[str, str]) -> dict[str, str]:
    """The v2 tree where v1 is mounted beside it."""
    return {name.replace("sys/fs/cgroup", "sys/fs/cgroup/unified"): text for name, text in files.items()}


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
        pytest.param(
            merged(v1("/a", "200000", 64 * GIB, 4 * GIB), v1("/a/b", "600000", 90 * GIB, 1 * GIB)),
            V1_SELF.format("/a/b"), 2, 60, 64, id="v1-parent-is-tighter",
        ),
        pytest.param(
            {
                **v1("", limit=16 * GIB, used=1 * GIB),
                "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {4 * GIB}\ntotal_inactive_file 0\n",
            },
            V1_SELF.format("/pod/container"), 8, 3, 4, id="v1-limit-of-an-ancestor-that-is-not-visible",
        ),
        pytest.param(
            merged(v1("/job", "300000"), below_unified(v2("/job", limit=str(20 * GIB), used=2 * GIB))),
            "4:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job\n", 3, 18, 20, id="hybrid-cpu-in-v1-memory-in-v2",
        ),
        pytest.param(
            {**v2("/a"), "sys/fs/cgroup/a/memory.high": f"{12 * GIB}\n", "sys/fs/cgroup/a/memory.max": f"{16 * GIB}\n"},
            "0::/a\n", 8, 12, 12, id="v2-slowed-before-the-limit",
        ),
        pytest.param(
            v2("/a", "200000 100000", str(8 * GIB)), "0::/../../a\n", 2, 8, 8, id="v2-path-from-another-namespace",
        ),
        pytest.param(v2("", "300000 100000", str(6 * GIB)), "", 3, 6, 6, id="v2-own-path-is-hidden"),
        pytest.param(v1("", limit=6 * GIB), "", 8, 6, 6, id="v1-own-path-is-hidden"),
        pytest.param(
            {**v2("", "x 0"), "sys/fs/cgroup/memory.max": "many\n", "sys/fs/cgroup/memory.stat": "\n"},
            "not a line\n0::/\n", 8, 200, None, id="nonsense",
        ),
        pytest.param({}, "", 8, 200, None, id="no-cgroups"),
        pytest.param(v2("", limit=str(2 * GIB), used=3 * GIB), "0::/\n", 8, 0, 2, id="over-the-limit"),
    ],
)  # fmt: skip
def test_cgroups(tmp_path, groups, self_cgroup, threads, free, limit):
    found = hardware.probe(write(tmp_path, {**machine(cpus=8), **groups, "proc/self/cgroup": self_cgroup}))
    assert found.threads == threads
    assert found.memory_free == free * GIB
    assert found.memory_limit == (None if limit is None else limit * GIB)


def tree(root: Path, groups: dict[str, str], self_cgroup: str) -> hardware.Hardware:
    return hardware.probe(write(root, {**machine(cpus=16, siblings=2), **groups, "proc/self/cgroup": self_cgroup}))


@pytest.mark.parametrize(
    ("groups", "self_cgroup"),
    [
        pytest.param(v2("/job", "300000 100000", str(6 * GIB), 1 * GIB), "0::/job\n", id="v2"),
        pytest.param(
            merged(v2("/a", "300000 100000", str(6 * GIB), 1 * GIB), v2("/a/b", limit=str(90 * GIB))), "0::/a/b\n",
            id="v2-nested",
        ),
        pytest.param(v1("/job", "300000", 6 * GIB, 1 * GIB), V1_SELF.format("/job"), id="v1"),
        pytest.param(
            merged(v1("/a", "300000", 6 * GIB, 1 * GIB), v1("/a/b", limit=90 * GIB)), V1_SELF.format("/a/b"),
            id="v1-nested",
        ),
        pytest.param(
            merged(v1("/job", "300000"), below_unified(v2("/job", limit=str(6 * GIB), used=1 * GIB))),
            "4:cpu,cpuacct:/job\n0::/job\n", id="hybrid",
        ),
    ],
)  # fmt: skip
def test_the_plan_follows_the_cgroup(tmp_path, groups, self_cgroup):
    """5 GiB are left, 1 GiB of them for the program and 0.5 for weights: a smaller batch, on fewer threads."""
    free = plan(tree(tmp_path / "free", {}, "0::/\n"), SMOL, SETTINGS)
    held = plan(tree(tmp_path / "held", groups, self_cgroup), SMOL, SETTINGS)
    assert (free.threads, held.threads) == (8, 3)
    assert free.batch_size == free.max_batch
    own = 200 * hardware.os.sysconf("SC_PAGE_SIZE")  # of this process, which may be used again
    assert held.budget_bytes == 5 * GIB + own - max(held.weights_bytes + BUILT_IN.host_reserve, own)
    assert held.batch_size == held.budget_bytes // held.sequence_bytes(held.context) < free.batch_size


def test_the_plan_follows_the_cgroup_down_to_a_refusal(tmp_path):
    short = tree(tmp_path, v2("", limit=str(3 * GIB), used=2 * GIB), "0::/\n")
    with pytest.raises(MemoryBudgetError, match=r"1\.0 GiB"):
        plan(short, SMOL, SETTINGS)


def caches(sizes: dict[int, tuple[str, str]], level: int = 3) -> dict[str, str]:
    """CPU → (size, CPUs that share it)."""
    files = {}
    for cpu, (size, shared) in sizes.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}"
        files |= {f"{folder}/size": size + "\n", f"{folder}/shared_cpu_list": shared + "\n"}
        files |= {f"sys/devices/system/cpu/cpu{cpu}/cache/index0/size": "32K\n"}
    return files


TWO_CHIPLETS = caches({cpu: ("32M", "0-3" if cpu < 4 else "4-7") for cpu in range(8)})


@pytest.mark.parametrize(
    ("files", "allowed", "wanted"),
    [
        pytest.param(TWO_CHIPLETS, "0-7", 64 << 20, id="two-chiplets"),
        pytest.param(TWO_CHIPLETS, "5-6", 32 << 20, id="one-of-two-chiplets"),
        pytest.param(caches({0: ("266240K", "0-1"), 1: ("266240K", "0-1")}), "0-1", 260 << 20, id="one-for-all"),
        pytest.param(caches({0: ("1024K", "0"), 1: ("1024K", "1")}, level=2), "0-1", 2 << 20, id="no-third-level"),
        pytest.param({}, "0-7", hardware.CACHE_UNKNOWN_BYTES, id="not-told"),
        pytest.param(caches({0: ("huge", "0")}, level=3), "0", 32 << 10, id="nonsense"),
    ],
)
def test_last_level_cache_of_the_cpus_in_use(tmp_path, files, allowed, wanted):
    assert hardware.cache_bytes(write(tmp_path, {**machine(allowed=allowed), **files})) == wanted


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
