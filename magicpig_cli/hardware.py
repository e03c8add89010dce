"""What this machine lets the program use: cores, memory, GPUs, as the system reports them (CASES 19, 21, 22).

Containers and schedulers hand out less than the machine has; every figure here is the smaller of the two. All files
are read below one root, so that tests can pass trees of other systems.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from magicpig_cli.gpus import Gpu as Gpu  # named here too: part of Hardware
from magicpig_cli.gpus import probe_gpus

UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a page-rounded 2^63 for "no limit"
CACHE_UNKNOWN_BYTES = 64 << 20  # last-level cache, taken where the system does not tell


@dataclass(frozen=True, slots=True)
class Speeds:
    """What this machine was measured to do with `threads` threads; the planner predicts times from it.

    Look-ups are said for one thread, whatever `threads` is: a query head that visits T tables and counts I ids takes
    T · visit_ns + I · count_ns.
    """

    threads: int
    sequential_bytes_s: float  # rows read one after another
    gather_bytes_s: float  # ascending rows read with gaps
    count_ns: float  # one id counted in a table look-up
    product_bytes_s: Mapping[str, float]  # weights read by a product with one row, by form
    scan_ns: float  # one signature of 128 bits compared with one query head, beside the others of a group of four
    operator_us: float  # one small torch operator, called from Python
    host_to_device_bytes_s: float | None = None  # pinned copies; None = no device
    device_to_host_bytes_s: float | None = None
    device_product_bytes_s: float | None = None  # bfloat16 weights read by a product with one row on that device
    visit_ns: float = 0.0  # one table visited in a look-up, beside the ids in its bucket
    prompt_multiply_adds_s: float = 0.0  # of a float32 product with as many rows as a prompt chunk has
    buffer_bytes: int = 0  # of memory that reads and products went through, so that none found in a cache what it read
    cache_bytes: int = 0  # last-level cache of the CPUs in use
    cpu_share: float = 1.0  # of `threads` cores that this process got meanwhile; well below 1: others were busy there


@dataclass(frozen=True, slots=True)
class Hardware:
    """Cores and memory that this process may use."""

    cpu_model: str
    isa: str  # tier of the kernels in use
    tiers: tuple[str, ...]  # tiers that are compiled and that this CPU can run
    cores_physical: int  # of the machine
    cores_usable: int  # logical CPUs left by affinity and cgroup quota
    threads: int  # min(physical cores that affinity leaves, quota)
    numa_nodes: int
    memory_total: int  # bytes of the machine
    memory_free: int  # bytes: min(MemAvailable, cgroup limit − use)
    memory_limit: int | None  # bytes of the tightest cgroup limit
    process_bytes: int  # private memory that this process holds now
    gpus: tuple[Gpu, ...] = ()
    speeds: Speeds | None = None  # None = not measured

    def gpu_of(self, device: str) -> Gpu | None:
        """The GPU that `auto`, `cuda` or `cuda:N` means here; None on a CPU, or where it is missing."""
        kind, _, number = device.partition(":")
        wanted = None if kind == "cpu" else int(number or 0)
        return next((gpu for gpu in self.gpus if gpu.index == wanted), None)


def probe(root: Path = Path("/")) -> Hardware:
    """Look at this machine. GPUs are listed if torch is already imported; `probe_gpus` imports it."""
    isa, tiers = _kernel_tiers()
    cores = _core_of_cpu(root)
    allowed = _allowed_cpus(root) & set(cores) or set(cores)
    quota = _cpu_quota(root)
    usable = min(len(allowed), quota)
    total, _ = _machine_memory(root)
    limit, _ = _memory_limit(root)
    return Hardware(
        cpu_model=_cpu_model(root),
        isa=isa,
        tiers=tiers,
        cores_physical=len(set(cores.values())),
        cores_usable=usable,
        threads=min(len({cores[cpu] for cpu in allowed}), usable),
        numa_nodes=max(1, len(_numbered(root / "sys/devices/system/node", "node"))),
        memory_total=total,
        memory_free=free_memory(root),
        memory_limit=limit if limit < min(total, UNLIMITED_BYTES) else None,
        process_bytes=process_bytes(root),
        gpus=probe_gpus() if "torch" in sys.modules else (),
    )


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process could still take without swapping: what the system and its cgroups have left."""
    return min(_machine_memory(root)[1], _memory_limit(root)[1])


def process_bytes(root: Path = Path("/")) -> int:
    """Private resident memory of this process; files that are only mapped do not count."""
    fields = _read(root / "proc/self/statm").split()
    if len(fields) > 2:
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return psutil.Process().memory_info().rss


def openmp_runtimes(root: Path = Path("/")) -> tuple[str, ...]:
    """File names of the OpenMP libraries that this process has loaded, one per file. Two mean oversubscribed cores."""
    paths = re.findall(r"\s(/\S*/lib(?:g|i)?omp5?[-.]\S*)", _read(root / "proc/self/maps"))
    return tuple(sorted(Path(path).name for path in dict.fromkeys(paths)))


def cache_bytes(root: Path = Path("/"), cpus: Collection[int] = ()) -> int:
    """Last-level cache that these CPUs (none: those of this process) reach together, each cache counted once.

    Linux writes "32768K"; where it does not tell, CACHE_UNKNOWN_BYTES.
    """
    folders = _numbered(root / "sys/devices/system/cpu", "cpu")
    wanted = cpus or _allowed_cpus(root) or folders
    caches: dict[str, int] = {}  # by the CPUs that share one
    for cpu in folders.keys() & set(wanted):
        levels = _numbered(folders[cpu] / "cache", "index")
        for _, level in sorted(levels.items(), reverse=True):
            size = re.fullmatch(r"(\d+)([KM])", _read(level / "size").strip())
            if size:
                shared = _read(level / "shared_cpu_list").strip()
                caches[shared] = int(size[1]) << {"K": 10, "M": 20}[size[2]]
                break
    return sum(caches.values()) or CACHE_UNKNOWN_BYTES


def _kernel_tiers() -> tuple[str, tuple[str, ...]]:
    """(tier in use, tiers that could be used). Imported late: kernels need NumPy, `--help` does not."""
    from magicpig_cli.kernels import isa

    return isa.current(), isa.runnable()


def _read(path: Path) -> str:
    """A system file, or nothing where this system has no such file or does not let us read it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numbered(folder: Path, prefix: str) -> dict[int, Path]:
    """Entries `<prefix><number>` of a folder."""
    if not folder.is_dir():
        return {}
    return {
        int(path.name[len(prefix) :]): path
        for path in folder.iterdir()
        if path.name.startswith(prefix) and path.name[len(prefix) :].isdigit()
    }


def _cpu_model(root: Path) -> str:
    match = re.search(
        r"^(?:model name|Model|cpu model|Hardware)\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE
    )
    return match[1].strip() if match else (os.uname().machine if hasattr(os, "uname") else "unknown")


def _core_of_cpu(root: Path) -> dict[int, object]:
    """Logical CPU → whatever identifies its physical core. Hyper-threads share one."""
    cores = _cores_from_cpuinfo(_read(root / "proc/cpuinfo"))
    for cpu, folder in _numbered(root / "sys/devices/system/cpu", "cpu").items():
        siblings = _read(folder / "topology/thread_siblings_list").strip()
        if siblings and (not cores or cpu in cores):
            cores[cpu] = siblings
    if not cores:  # neither file: not Linux
        count = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        cores = dict(enumerate(range(count)))
    return cores


def _cores_from_cpuinfo(text: str) -> dict[int, object]:
    cores: dict[int, object] = {}
    for block in text.split("\n\n"):
        fields = dict(re.findall(r"^([^:\n\t]+?)\s*:[ \t]*(.*)$", block, re.MULTILINE))
        if fields.get("processor", "").isdigit():
            cpu = int(fields["processor"])
            cores[cpu] = (fields.get("physical id"), fields["core id"]) if "core id" in fields else cpu
    return cores


def _allowed_cpus(root: Path) -> set[int]:
    """CPUs that affinity and cpuset leave to this process; empty if the system does not say."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", _read(root / "proc/self/status"), re.MULTILINE)
    return _parse_cpu_list(match[1]) if match else set()


def _parse_cpu_list(text: str) -> set[int]:
    """`0-3,8` → {0, 1, 2, 3, 8}. What is no number is left out."""
    cpus: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _own_cgroups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's cgroup for one controller and of all its ancestors, v1 and v2, that exist.

    A container may show its own cgroup as the mount's root while /proc/self/cgroup still names the host's path, or
    nothing; the root is therefore always among them.
    """
    mount = root / "sys/fs/cgroup"
    folders = [mount, mount / controller]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / controllers, mount / controller]
        else:
            continue
        own = Path(*(part for part in path.split("/") if part not in ("", "..")))  # `/../x`: above what we can see
        folders += [top / part for top in tops for part in (own, *own.parents)]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _cpu_quota(root: Path) -> int:
    """Whole CPUs that the tightest cgroup quota pays for, at least 1."""
    shares: list[float] = []
    for folder in _own_cgroups(root, "cpu"):
        limits = _read(folder / "cpu.max").split()  # v2: "400000 100000", "max 100000"
        if not limits:  # v1; -1 = no quota
            limits = (_read(folder / "cpu.cfs_quota_us") + " " + _read(folder / "cpu.cfs_period_us")).split()
        if len(limits) == 2 and limits[0].isdigit() and limits[1].isdigit() and int(limits[1]) > 0:
            shares.append(int(limits[0]) / int(limits[1]))
    return max(1, math.floor(min(shares))) if shares else sys.maxsize


def _machine_memory(root: Path) -> tuple[int, int]:
    """(total, available without swapping) in bytes."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE))
    if "MemTotal" in fields and "MemAvailable" in fields:
        return int(fields["MemTotal"]) * 1024, int(fields["MemAvailable"]) * 1024
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _memory_limit(root: Path) -> tuple[int, int]:
    """(tightest limit, least room under any limit) in bytes; UNLIMITED_BYTES where there is none."""
    limit = room = UNLIMITED_BYTES
    for folder in _own_cgroups(root, "memory"):
        statistics = {
            name: int(value) for name, value in re.findall(r"(?m)^(\w+) (\d+)$", _read(folder / "memory.stat"))
        }
        used = _memory_used(folder, statistics)
        for bound in _memory_bounds(folder, statistics):
            limit = min(limit, bound)
            room = min(room, max(0, bound - used))
    return limit, room


def _memory_bounds(folder: Path, statistics: Mapping[str, int]) -> list[int]:
    """Limits of one cgroup in bytes. Above memory.high a process is not killed but slowed until it stands still.

    v1 also says the tightest limit of all ancestors, which a container may not see itself.
    """
    texts = [_read(folder / name).strip() for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    bounds = [int(text) for text in texts if text.isdigit()]
    bounds.append(statistics.get("hierarchical_memory_limit", UNLIMITED_BYTES))
    return [bound for bound in bounds if bound < UNLIMITED_BYTES]


def _memory_used(folder: Path, statistics: Mapping[str, int]) -> int:
    """Bytes in use without page cache that can be dropped: files once read fill a container to its limit."""
    for usage, cache in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        text = _read(folder / usage).strip()
        if text.isdigit():
            return max(0, int(text) - statistics.get(cache, 0))
    return 0


def quota_stopped_s(root: Path = Path("/")) -> float:
    """Seconds for which CPU quotas have held the cgroups of this process so far: the one that was held longest."""
    held = [0.0]
    for folder in _own_cgroups(root, "cpu"):
        fields = dict(line.split() for line in _read(folder / "cpu.stat").splitlines() if len(line.split()) == 2)
        held.append(int(fields.get("throttled_usec", 0)) / 1e6)  # v2
        held.append(int(fields.get("throttled_time", 0)) / 1e9)  # v1
    return max(held)
