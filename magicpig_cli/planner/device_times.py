"""What a decode step takes where a GPU holds the weights: its products, what the host gives it, and the way there.

Of two things that happen at the same time in a layer the longer one counts: launching and the GPU's products, windows
and the host's kernels, blocks of rows and their copies (docs/decisions/017). Two halves of a batch take as long as the
busiest of what they share, or as one half alone. What was not measured on the card is assumed, and said (019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from magicpig_cli.config import HALVES_FROM, SCAN_KEYS
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels import row_bytes, signature_bytes
from magicpig_cli.planner import forms
from magicpig_cli.planner.plan import Plan
from magicpig_cli.planner.steps import LAYER_OPERATORS, SAMPLED_OPERATORS, StepTime, Term, exact_keys, operators

PRODUCT_SHARE = 0.75  # of a card's memory bandwidth that a product with few rows reaches
PACKED_SHARE = 0.6  # of that, where packed weights are taken apart on the way: int4, and what was published quantized
BLOCK_KERNELS = 33  # of a block without attention, counted in Llama's (docs/decisions/018)
KERNEL_S = 2e-6  # each, on the GPU, beside the bytes of products
LAUNCH_S = 5e-6  # of one kernel, called from Python
GRAPH_S = 10e-6  # of all kernels between two calls of attention, recorded as one graph
# What attention launches in a layer, counted on a fake device (017): of a sampled one before the host waits for its
# queries, and for each further sequence; to merge; and of an exact one for each block of rows.
ASKING = {"lsh": 15, "rabitq": 10}
ASKING_MORE, MERGING, PER_BLOCK = 8, 18, 16
WINDOW_KERNELS = 7  # of them, for each sequence, the window's own
PCIE_LANE_BYTES_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # by generation, encoding taken off
PCIE_SHARE = 0.8  # of it that copies of pinned memory reach
COPY_S = 10e-6  # latency of one copy between host and GPU, and of waiting for it
COPIES_PER_LAYER = 4  # query and codes to the host, output and LSE back
SCAN_LAUNCHES, PIECE_LAUNCHES = 25, 18  # of a scan of one sequence and layer, and of each SCAN_KEYS signatures of it

Kernels = Callable[[int], tuple[Term, ...]]  # sequences → what the host's kernels take for all sampled layers


def step_time(plan: Plan, speeds: Speeds, kernels: Kernels, tokens: int, batch: int, sampled: int) -> StepTime:
    """One decode step of `batch` sequences, of whose layers so many are sampled, beside the plan's GPU."""
    assert plan.gpu is not None
    missing, assumed = list[str](), list[str]()
    rate = _product_bytes_s(speeds, plan.gpu, assumed)
    if rate is None:
        missing.append("products on the GPU, whose memory bandwidth is not known")
    assumed += [
        f"{BLOCK_KERNELS} kernels a layer, each {KERNEL_S * 1e6:.0f} µs on the GPU beside the bytes of products",
        f"{LAUNCH_S * 1e6:.0f} µs to launch one from Python"
        + (f", {GRAPH_S * 1e6:.0f} µs for all between two calls of attention as a graph" if plan.graphs else ""),
        "where two things run beside each other in a layer, the longer one is all that counts",
    ]
    link = _link(speeds, plan.gpu, assumed)
    if plan.scans_there and sampled:
        assumed.append("a scan of signatures reads and writes each array of its operators in GPU memory")
    if link is None:
        missing.append("copies over PCIe, which were not measured")
    if any(part.packed for part in forms.moved(plan.shape, plan.weight_type, batch)) and rate is not None:
        assumed.append(f"{plan.weight_type} products reach {PACKED_SHARE:.0%} of what bfloat16 ones do")
    machine = _Machine(plan, kernels, speeds.operator_us * 1e-6, tokens, sampled, rate, link)
    if not sampled or batch < HALVES_FROM:
        return StepTime(tuple(machine.forward(batch).terms), tuple(missing), tuple(assumed))
    assumed.append("the halves of a batch wait for each other only where they share the GPU, cores, Python or PCIe")
    halves = [machine.forward(-(-batch // 2)), machine.forward(batch // 2)]
    return StepTime(tuple(_beside_each_other(halves)), tuple(missing), tuple(assumed))


def _product_bytes_s(speeds: Speeds, gpu: Gpu, assumed: list[str]) -> float | None:
    """Bytes per second that a product moves; None where the card is unknown."""
    rate = speeds.device_product_bytes_s
    if rate is None:
        if gpu.memory_bytes_s is None:
            return None
        rate = PRODUCT_SHARE * gpu.memory_bytes_s
        assumed.append(f"products reach {PRODUCT_SHARE:.0%} of {gpu.memory_bytes_s / 1e9:,.0f} GB/s, the data sheet's")
    return rate


def _link(speeds: Speeds, gpu: Gpu, assumed: list[str]) -> tuple[float, float] | None:
    """Bytes per second (to the GPU, from it): as measured, else what the card's link gives; None = unknown."""
    up, down = speeds.host_to_device_bytes_s, speeds.device_to_host_bytes_s
    if up is not None and down is not None:
        return up, down
    lane = PCIE_LANE_BYTES_S.get(gpu.pcie_generation or 0)
    if lane is None or not gpu.pcie_lanes:
        return None
    assumed.append(f"copies reach {PCIE_SHARE:.0%} of PCIe {gpu.pcie_generation}.0 × {gpu.pcie_lanes}")
    rate = PCIE_SHARE * lane * gpu.pcie_lanes
    return rate, rate


@dataclass(slots=True)
class _Forward:
    """A step of some sequences: its sum, and the seconds for which it keeps busy what two halves share."""

    terms: list[Term] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("GPU", "kernels", "Python", "PCIe"), 0.0))

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)


@dataclass(frozen=True, slots=True)
class _Machine:
    """All that decides how long forwards of one plan take."""

    plan: Plan
    kernels: Kernels
    operator_s: float
    tokens: int
    sampled: int  # layers
    rate: float | None  # bytes per second of products
    link: tuple[float, float] | None

    def forward(self, sequences: int) -> _Forward:
        """Stage by stage, in one lane."""
        found = _Forward()
        self._on_gpu(found, sequences)
        self._launching(found, sequences)
        self._sampling(found, sequences)
        self._exact_rows(found, sequences)
        return found

    def _on_gpu(self, found: _Forward, sequences: int) -> None:
        """Products, by the bytes that they move, and that every kernel takes a moment."""
        if self.rate is not None:
            for part in forms.moved(self.plan.shape, self.plan.weight_type, sequences):
                reached = self.rate * PACKED_SHARE if part.packed else self.rate
                sums = f"{part.bytes / 1e9:.2f} GB / {reached / 1e9:,.0f} GB/s"
                found.terms.append(Term("other", part.bytes / reached, f"{part.formula} = {sums}"))
        layers = self.plan.shape.layers
        words = f"{layers} layers × {BLOCK_KERNELS} kernels × {KERNEL_S * 1e6:.0f} µs on the GPU"
        found.terms.append(Term("other", layers * BLOCK_KERNELS * KERNEL_S, words))
        found.busy["GPU"] = found.seconds

    def _launching(self, found: _Forward, sequences: int) -> None:
        """What Python does until it waits for a layer's queries, as far as that takes longer than the GPU does."""
        layers, gpu_s = self.plan.shape.layers, found.busy["GPU"]
        if self.plan.graphs:
            spent, words = (layers + 1) * GRAPH_S, f"{layers + 1} graphs × {GRAPH_S * 1e6:.0f} µs"
        else:
            spent = layers * BLOCK_KERNELS * LAUNCH_S
            words = f"{layers} layers × {BLOCK_KERNELS} launches × {LAUNCH_S * 1e6:.0f} µs"
        if self.sampled:
            count = ASKING[str(self.plan.sampler)] + (sequences - 1) * ASKING_MORE
            spent += self.sampled * count * LAUNCH_S
            words += f" + {self.sampled} layers × {count} launches × {LAUNCH_S * 1e6:.0f} µs"
        caches = layers * sequences * LAYER_OPERATORS[1]
        spent += caches * self.operator_s
        words += f" + {caches:,} small operators × {self.operator_s * 1e6:.1f} µs"
        found.busy["Python"] += spent
        found.terms.append(_excess("other", spent, words, gpu_s, "on the GPU"))

    def _sampling(self, found: _Forward, sequences: int) -> None:
        """The host's kernels with the windows beside them, copies of queries and results, merging, the index."""
        if not self.sampled:
            return
        kernels = self.kernels(sequences)
        spent = sum(term.seconds for term in kernels)
        windows = self.sampled * sequences * WINDOW_KERNELS * KERNEL_S
        words = f"{self.sampled} layers × {sequences} × {WINDOW_KERNELS} kernels × {KERNEL_S * 1e6:.0f} µs"
        found.terms += [*kernels, _excess("window", windows, words, spent, "of the host's kernels")]
        if self.plan.scans_there:
            self._scanning(found, sequences)
        found.terms.append(self._merging(sequences))
        count = self.sampled * operators(SAMPLED_OPERATORS, sequences)
        upkeep = count * self.operator_s
        words = f"{count:,} small operators × {self.operator_s * 1e6:.1f} µs for the index, and around the kernels"
        found.terms.append(Term("other", upkeep, words))
        found.busy["GPU"] += windows + self.sampled * MERGING * KERNEL_S
        found.busy["kernels"] += spent + upkeep  # which take turns
        found.busy["Python"] += self.sampled * MERGING * LAUNCH_S + upkeep

    def _scanning(self, found: _Forward, sequences: int) -> None:
        """Signatures scanned by `attention.scan`, launches beside the work; look-up tables go there, a bit per key and
        head comes back."""
        plan, shape, keys = self.plan, self.plan.shape, self.plan.indexed_keys(self.tokens)
        rate, down = self.rate or float("inf"), self.link[1] if self.link else float("inf")
        group, rows, scans = shape.heads // shape.kv_heads, shape.kv_heads * keys, sequences * self.sampled
        each = signature_bytes(plan.bits) + 14 + 3 * plan.bits // 2 + 80 * group
        launches = SCAN_LAUNCHES + PIECE_LAUNCHES * -(-rows // SCAN_KEYS)
        working, bits = rows * each / rate, shape.heads * keys / 8 / down
        words = (
            f"{scans} scans × (the longer of {rows:,} signatures × {each} B / {rate / 1e9:,.0f} GB/s and "
            f"{launches} launches, 2 copies × {COPY_S * 1e6:.0f} µs, {shape.heads} × {keys:,} bits)"
        )
        seconds = scans * (max(working, launches * LAUNCH_S) + 2 * COPY_S + bits)
        found.terms.append(Term("retrieve", seconds, words))
        found.busy["GPU"] += scans * working
        found.busy["Python"] += scans * launches * LAUNCH_S

    def _merging(self, sequences: int) -> Term:
        """What a sampled layer waits for beside the kernels: queries to the host, results back, and their merging."""
        plan, heads = self.plan, sequences * self.plan.shape.heads
        seconds = MERGING * LAUNCH_S
        words = f"{MERGING} launches × {LAUNCH_S * 1e6:.0f} µs"
        if self.link is not None:
            up, down = self.link
            dim, codes = plan.shape.head_dim, plan.L if plan.sampler == "lsh" else 0
            seconds += COPIES_PER_LAYER * COPY_S + heads * (dim + codes) * 4 / down + heads * (dim + 1) * 4 / up
            words += f" + {COPIES_PER_LAYER} copies × {COPY_S * 1e6:.0f} µs"
            words += f" + {heads} heads × ({dim + codes} + {dim + 1}) × 4 B"
        return Term("merge", self.sampled * seconds, f"{self.sampled} layers × ({words})")

    def _exact_rows(self, found: _Forward, sequences: int) -> None:
        """Rows of exact layers on their way to the GPU, block by block; launching a block's kernels beside that."""
        if self.link is None:
            return
        plan, shape = self.plan, self.plan.shape
        keys, each = exact_keys(plan, self.tokens, self.sampled), row_bytes(shape.head_dim, plan.row_dtype)
        rows, blocks = sequences * shape.kv_heads * keys, sequences * -(-keys // plan.block_rows)
        copying, launching = rows * each / self.link[0], blocks * PER_BLOCK * LAUNCH_S
        words = f"{shape.layers - self.sampled} exact layers: {rows:,} rows × {each} B / {self.link[0] / 1e9:.1f} GB/s"
        if launching > copying:
            words = f"{blocks:,} blocks × {PER_BLOCK} launches × {LAUNCH_S * 1e6:.0f} µs, more than {words}"
        found.terms.append(Term("dense", max(copying, launching), words))
        found.busy["PCIe"] += copying
        found.busy["Python"] += launching


def _excess(stage: str, seconds: float, formula: str, beside_s: float, beside: str) -> Term:
    """By how much something takes longer than what runs beside it."""
    how = "within the" if seconds <= beside_s else "less the"
    words = f"{formula} = {1e3 * seconds:.2f} ms, {how} {1e3 * beside_s:.2f} ms {beside} meanwhile"
    return Term(stage, max(0.0, seconds - beside_s), words)


def _beside_each_other(halves: list[_Forward]) -> Iterator[Term]:
    """Terms of both, all shortened alike, as those of a measured step are (`engine.step`)."""
    found = {name: sum(half.busy[name] for half in halves) for name in halves[0].busy}
    found["one of them alone"] = max(half.seconds for half in halves)
    longest, whole = max(found.values()), sum(half.seconds for half in halves)
    words = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in found.items())
    part = f"{longest / whole:.3f}"
    yield Term("other", 0.0, f"two halves take the longest of {words} ms, which is {part} of {1e3 * whole:.1f} ms")
    for half in halves:
        for term in half.terms:
            yield replace(term, seconds=longest / whole * term.seconds, formula=f"{part} × ({term.formula})")
