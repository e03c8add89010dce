"""What a decode step takes beside the CPU where a GPU holds the weights: its products, and what goes over PCIe.

Nothing here is taken to run beside anything else, so the sum is what a step takes at most. What was not measured on the
card is assumed, and said (docs/decisions/019).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from magicpig_cli.config import SCAN_KEYS
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels import row_bytes
from magicpig_cli.planner import forms
from magicpig_cli.planner.plan import Plan
from magicpig_cli.planner.steps import StepTime, Term, exact_keys

PRODUCT_SHARE = 0.75  # of a card's memory bandwidth that a product with few rows reaches
PACKED_SHARE = 0.6  # of that, where packed weights are taken apart on the way: int4, and what was published quantized
LAUNCHES = 30  # of kernels per layer: norms, products, rotary embedding, the window's attention, merging
LAUNCH_S = 5e-6  # each, called from Python one after the other
PCIE_LANE_BYTES_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # by generation, encoding taken off
PCIE_SHARE = 0.8  # of it that copies of pinned memory reach
COPY_S = 10e-6  # latency of one copy between host and GPU, and of waiting for it
COPIES_PER_LAYER = 4  # query and codes to the host, output and LSE back
SCAN_LAUNCHES, PIECE_LAUNCHES = 25, 13  # of a scan of one sequence and layer, and of each SCAN_KEYS signatures of it


def with_gpu(
    on_host: Iterable[Term], plan: Plan, speeds: Speeds, tokens: int, batch: int, sampled: int
) -> StepTime:  # fmt: skip
    """The terms of the CPU, and those of the plan's GPU and of the way there."""
    assert plan.gpu is not None
    terms, missing, assumed = list(on_host), list[str](), list[str]()
    rate = _product_bytes_s(speeds, plan.gpu, assumed)
    if rate is None:
        missing.append("products on the GPU, whose memory bandwidth is not known")
    else:
        terms += _products(plan, batch, rate, assumed)
    terms.append(_launches(plan))
    assumed.append(f"{LAUNCHES} launches per layer of {LAUNCH_S * 1e6:.0f} µs, and nothing beside anything else")
    link = _link(speeds, plan.gpu, assumed)
    if plan.scans_there and sampled:
        memory_s, copies_s = rate or float("inf"), link[1] if link else float("inf")
        terms.append(_scan(plan, plan.indexed_keys(tokens), batch * sampled, memory_s, copies_s))
        assumed.append("a scan of signatures reads and writes each array of its operators in GPU memory")
    if link is None:
        missing.append("copies over PCIe, which were not measured")
    else:
        terms += _copies(plan, tokens, batch, sampled, *link)
    return StepTime(tuple(terms), tuple(missing), tuple(assumed))


def _product_bytes_s(speeds: Speeds, gpu: Gpu, assumed: list[str]) -> float | None:
    """Bytes per second that a product moves; None where the card is unknown."""
    rate = speeds.device_product_bytes_s
    if rate is None:
        if gpu.memory_bytes_s is None:
            return None
        rate = PRODUCT_SHARE * gpu.memory_bytes_s
        assumed.append(f"products reach {PRODUCT_SHARE:.0%} of {gpu.memory_bytes_s / 1e9:,.0f} GB/s, the data sheet's")
    return rate


def _products(plan: Plan, batch: int, rate: float, assumed: list[str]) -> Iterator[Term]:
    parts = forms.moved(plan.shape, plan.weight_type, batch)
    if any(part.packed for part in parts):
        assumed.append(f"{plan.weight_type} products reach {PACKED_SHARE:.0%} of what bfloat16 ones do")
    for part in parts:
        reached = rate * PACKED_SHARE if part.packed else rate
        sums = f"{part.bytes / 1e9:.2f} GB / {reached / 1e9:,.0f} GB/s"
        yield Term("other", part.bytes / reached, f"{part.formula} = {sums}")


def _launches(plan: Plan) -> Term:
    layers = plan.shape.layers
    words = f"{layers} layers × {LAUNCHES} launches × {LAUNCH_S * 1e6:.0f} µs"
    return Term("other", layers * LAUNCHES * LAUNCH_S, words)


def _scan(plan: Plan, keys: int, scans: int, memory_bytes_s: float, down_bytes_s: float) -> Term:
    """Signatures scanned by `attention.scan`, launches beside the work; look-up tables go there, a bit per key and head
    comes back."""
    shape = plan.shape
    group, rows = shape.heads // shape.kv_heads, shape.kv_heads * keys
    each = plan.bits // 8 + 2 + 3 * plan.bits // 2 + 56 * group
    launches = SCAN_LAUNCHES + PIECE_LAUNCHES * -(-rows // SCAN_KEYS)
    working, bits = rows * each / memory_bytes_s, shape.heads * keys / 8 / down_bytes_s
    words = (
        f"{scans} scans × (the longer of {rows:,} signatures × {each} B / {memory_bytes_s / 1e9:,.0f} GB/s and "
        f"{launches} launches, 2 copies × {COPY_S * 1e6:.0f} µs, {shape.heads} × {keys:,} bits)"
    )
    return Term("retrieve", scans * (max(working, launches * LAUNCH_S) + 2 * COPY_S + bits), words)


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


def _copies(plan: Plan, tokens: int, batch: int, sampled: int, up: float, down: float) -> Iterator[Term]:
    """Rows of exact layers on their way to the GPU; queries of sampled ones to the host, and results back."""
    shape, heads = plan.shape, batch * plan.shape.heads
    rows, each = batch * shape.kv_heads * exact_keys(plan, tokens, sampled), row_bytes(shape.head_dim, plan.row_dtype)
    layers = shape.layers - sampled
    yield Term("dense", rows * each / up, f"{layers} exact layers: {rows:,} rows × {each} B / {up / 1e9:.1f} GB/s")
    if not sampled:
        return
    codes = plan.L if plan.sampler == "lsh" else 0
    words = heads * (shape.head_dim + codes) * 4 / down + heads * (shape.head_dim + 1) * 4 / up
    yield Term(
        "merge", sampled * (words + COPIES_PER_LAYER * COPY_S),
        f"{sampled} layers × ({COPIES_PER_LAYER} copies × {COPY_S * 1e6:.0f} µs + {heads} heads × "
        f"({shape.head_dim + codes} + {shape.head_dim + 1}) × 4 B)",
    )  # fmt: skip
