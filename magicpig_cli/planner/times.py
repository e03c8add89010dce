"""Milliseconds of a decode step by stage, from what this machine was measured to do (`hardware.Speeds`).

Reading dominates: weights once per step, rows of exact layers once per step and sequence, sampled rows with gaps.
Beside it the kernels multiply, tables are looked up, and torch's small operators are called from Python. Where figures
of this module come from, and how far predictions were off: docs/decisions/007.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicpig_cli.events import STAGES
from magicpig_cli.gpus import Gpu
from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels import row_bytes
from magicpig_cli.planner.plan import Plan, WeightType

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Multiply-adds that the attention kernels make in the time in which all threads read a byte: between 1.2 (Sapphire
# Rapids, D = 64, 3 heads per group) and 2.0 (Genoa, D = 128, 4 heads).
MULTIPLY_ADDS_PER_BYTE = 1.6
# What a step does beside products and kernels, in the time of so many small operators of torch called from Python:
LAYER_OPERATORS = (160, 47)  # norms, rotary embedding, activations, modules; and for each sequence its cache
SAMPLED_OPERATORS = (60, 11)  # of a sampled layer beside that, a piece of maintenance of the index included
SCAN_BITS = 128  # of the signatures whose scan was measured
CALL_OPERATORS = 40  # a call of the attention kernel: checks, pieces, and sharing them out
HASH_OPERATORS = 14  # a call of the hash kernel, which is shorter
VISIT_SKEW = 1.7  # ids visited over those of uniform buckets: 1.4–2.0 on real keys (EVIDENCE.md section 1)
GROUP_POWER = 0.75  # the union of a group's heads is what G^0.75 independent heads would read: 2.3× one head for G = 3
SAMPLED_MULTIPLY_ADDS = 4  # per value of a sampled row: q·k, |k−μ|, p·V, and sorting out which heads want it
PCIE_LANE_BYTES_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}  # by generation, encoding taken off
PCIE_SHARE = 0.8  # of it that copies of pinned memory reach; assumed, not measured
COPY_S = 10e-6  # latency of one copy between host and GPU, and of waiting for it
COPIES_PER_LAYER = 4  # query and codes to the host, output and LSE back

# Time of a product with B rows over that with one: max(1, fixed + B · slope). Decision 007.
BATCH_COST: dict[WeightType, tuple[float, float]] = {
    "float32": (0.85, 0.08), "bfloat16": (0.8, 0.115), "int8": (0.7, 0.185),
}  # fmt: skip
EXPERT_COST = (0.55, 0.45)  # of torch's float32 product: three CPUs of EVIDENCE.md section 3, decisions 005 and 007
EXPERT_MOST = 2.8  # from about 4 rows on MKL multiplies blocks, and the time does not grow up to 16


@dataclass(frozen=True, slots=True)
class _Rates:
    """Speeds with the plan's threads: fewer than were measured read and multiply less."""

    sequential: float
    gather: float
    multiply_adds: float
    product: float
    float32_product: float
    count_s: float
    visit_s: float
    scan_s: float
    operator_s: float
    threads: int

    @staticmethod
    def of(plan: Plan, speeds: Speeds) -> _Rates:
        share = min(1.0, plan.threads / speeds.threads)
        return _Rates(
            sequential=speeds.sequential_bytes_s * share,
            gather=speeds.gather_bytes_s * share,
            multiply_adds=MULTIPLY_ADDS_PER_BYTE * speeds.sequential_bytes_s * share,
            product=speeds.product_bytes_s[plan.weight_type] * share,
            float32_product=speeds.product_bytes_s["float32"] * share,
            count_s=speeds.count_ns * 1e-9,
            visit_s=speeds.visit_ns * 1e-9,
            scan_s=speeds.scan_ns * 1e-9,
            operator_s=speeds.operator_us * 1e-6,
            threads=min(plan.threads, speeds.threads),
        )


def step_ms(plan: Plan, tokens: int, batch: int, sampled_ratio: float) -> tuple[dict[str, float], tuple[str, ...]]:
    """(stage → milliseconds of one step of `batch` sequences of `tokens`, what is left out of them).

    No stages where the machine was not measured.
    """
    if plan.speeds is None:
        return {}, ("this machine was not measured",)
    rates = _Rates.of(plan, plan.speeds)
    stages = dict.fromkeys(STAGES, 0.0)
    sampled = len(plan.sampled_layers) if plan.indexed_keys(tokens) else 0
    if sampled:
        for stage, seconds in _sampled_s(plan, rates, tokens, batch, sampled_ratio).items():
            stages[stage] += sampled * seconds
    missing: tuple[str, ...] = ()
    if plan.gpu is None:
        stages["dense"] = _dense_s(plan, rates, tokens, batch, sampled)
        stages["other"] = _products_s(plan, rates, batch)
    else:
        stages["dense"], stages["merge"], missing = _across_s(plan, plan.speeds, plan.gpu, tokens, batch, sampled)
    stages["other"] += _operators(plan, batch, sampled) * rates.operator_s
    return {stage: 1e3 * seconds for stage, seconds in stages.items()}, missing


def _exact_keys(plan: Plan, tokens: int, sampled: int) -> int:
    """Keys per KV head that all layers but the sampled ones attend to exactly."""
    windows = [min(tokens, window) for window in plan.shape.layer_windows if window is not None]
    return (len(plan.shape.full_layers) - sampled) * tokens + sum(windows)


def _dense_s(plan: Plan, rates: _Rates, tokens: int, batch: int, sampled: int) -> float:
    """Exact attention on the CPU: every row in sight is read, and multiplied by each head of the group."""
    rows = batch * plan.shape.kv_heads * _exact_keys(plan, tokens, sampled)
    call = CALL_OPERATORS * rates.operator_s
    return _exact_rows_s(plan, rates, rows) + (plan.shape.layers - sampled) * call


def _exact_rows_s(plan: Plan, rates: _Rates, rows: float) -> float:
    group, dim = plan.shape.heads / plan.shape.kv_heads, plan.shape.head_dim
    reading = row_bytes(dim, plan.row_dtype) / rates.sequential
    return rows * (reading + 2 * group * dim / rates.multiply_adds)


def _sampled_s(plan: Plan, rates: _Rates, tokens: int, batch: int, ratio: float) -> dict[str, float]:
    """One sampled layer: finding the keys, and the rows that any head of a group has sampled."""
    shape, keys = plan.shape, plan.indexed_keys(tokens)
    heads, dim, group = batch * shape.heads, shape.head_dim, shape.heads / shape.kv_heads
    union = keys * (1 - (1 - ratio) ** (group**GROUP_POWER))
    gathered = batch * shape.kv_heads * union * row_bytes(dim, plan.row_dtype) / rates.gather
    multiplied = heads * ratio * keys * SAMPLED_MULTIPLY_ADDS * dim / rates.multiply_adds
    near = _exact_rows_s(plan, rates, batch * shape.kv_heads * plan.window_rows) if plan.windows_on_host else 0.0
    find = _FINDING[str(plan.sampler)](plan, rates, keys, heads)
    return {**find, "attend": CALL_OPERATORS * rates.operator_s + gathered + multiplied + near}


def _look_up_s(plan: Plan, rates: _Rates, keys: int, heads: int) -> dict[str, float]:
    """lsh: codes of the queries, and the buckets that they name."""
    dim, signs = plan.shape.head_dim, plan.K * plan.L
    ids = plan.L * keys / (1 << plan.K) * VISIT_SKEW
    hash_call = HASH_OPERATORS * rates.operator_s
    return {
        "hash": hash_call + dim * signs * 4 / rates.sequential + heads * dim * signs / rates.multiply_adds,
        "retrieve": heads * (plan.L * rates.visit_s + ids * rates.count_s) / rates.threads,
    }


def _scan_s(plan: Plan, rates: _Rates, keys: int, heads: int) -> dict[str, float]:
    """rabitq: rotations of the queries, and the signatures of all keys."""
    dim = plan.shape.head_dim
    rotated = dim * plan.bits * 4 / rates.sequential + heads * dim * plan.bits / rates.multiply_adds
    return {"retrieve": rotated + heads * keys * rates.scan_s * plan.bits / SCAN_BITS / rates.threads}


_FINDING = {"lsh": _look_up_s, "rabitq": _scan_s}


def _operators(plan: Plan, batch: int, sampled: int) -> int:
    """Small operators that take as long as what is neither product nor kernel."""
    (layer, cache), (index, upkeep) = LAYER_OPERATORS, SAMPLED_OPERATORS
    return plan.shape.layers * (layer + batch * cache) + sampled * (index + batch * upkeep)


def _products_s(plan: Plan, rates: _Rates, batch: int) -> float:
    """Linear layers and the output layer: weights are read once and multiplied by `batch` rows.

    Experts of a mixture are float32 and torch's, whatever the others are, and each has the rows of its own tokens.
    """
    shape, form = plan.shape, plan.weight_type
    experts = shape.step_experts(batch)
    shared = (shape.step_params(batch) - experts) * WEIGHT_BYTES[form] / rates.product
    own = experts * WEIGHT_BYTES["float32"] / rates.float32_product
    factor = _batch_factor(BATCH_COST[form], batch)
    return factor * shared + min(EXPERT_MOST, _batch_factor(EXPERT_COST, batch * shape.experts_used)) * own


def _batch_factor(cost: tuple[float, float], rows: float) -> float:
    """Time of a product with so many rows over that with one."""
    fixed, slope = cost
    return max(1.0, fixed + slope * rows)


def _across_s(
    plan: Plan, speeds: Speeds, gpu: Gpu, tokens: int, batch: int, sampled: int
) -> tuple[float, float, tuple[str, ...]]:
    """What goes over PCIe: (rows of exact layers, queries and results of sampled ones, what is left out)."""
    left_out: tuple[str, ...] = ("products on the GPU, whose memory is not measured",)
    up, down = speeds.host_to_device_bytes_s, speeds.device_to_host_bytes_s
    if up is None or down is None:
        link = _link_bytes_s(gpu)
        if link is None:
            return 0.0, 0.0, (*left_out, "copies over PCIe, which were not measured")
        up = down = link
        left_out = (*left_out, f"copies over PCIe are taken at {PCIE_SHARE:.0%} of what the link gives")
    shape, heads = plan.shape, batch * plan.shape.heads
    rows = batch * shape.kv_heads * max(0, _exact_keys(plan, tokens, sampled))
    dense = rows * row_bytes(shape.head_dim, plan.row_dtype) / up
    codes = plan.L if plan.sampler == "lsh" else 0
    words = heads * (shape.head_dim + codes) * 4 / down + heads * (shape.head_dim + 1) * 4 / up
    return dense, sampled * (words + COPIES_PER_LAYER * COPY_S), left_out


def _link_bytes_s(gpu: Gpu) -> float | None:
    """Bytes per second that copies reach over the card's link, where generation and lanes are known."""
    lane = PCIE_LANE_BYTES_S.get(gpu.pcie_generation or 0)
    return None if lane is None or not gpu.pcie_lanes else PCIE_SHARE * lane * gpu.pcie_lanes
