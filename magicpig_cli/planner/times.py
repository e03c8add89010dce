"""Milliseconds of a decode step by stage, from what this machine was measured to do (`hardware.Speeds`).

Reading dominates: weights once per step, rows of exact layers once per step and sequence, sampled rows with gaps.
Beside it the kernels multiply, tables are looked up, and torch's small operators are called from Python. Where figures
of this module come from, and how far predictions were off: docs/decisions/007.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicpig_cli.events import STAGES
from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels import row_bytes
from magicpig_cli.planner.plan import Plan, WeightType

WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
# Multiply-adds that attention makes in the time in which it could read a byte. 006: with 4 query heads and D = 128 it
# reads at half of the sequential bandwidth, 1,024 multiply-adds in the time of 512 bytes.
MULTIPLY_ADDS_PER_BYTE = 2.0
# A small operator of torch, with the share of Python around it, stands for all calls of a layer that are no products.
OPERATORS_PER_LAYER = 60
CALL_OPERATORS = 10  # one call of our kernels from Python, checks included, in the time of so many small operators
VISIT_SKEW = 1.7  # ids visited over those of uniform buckets: 1.4–2.0 on real keys (EVIDENCE.md section 1)
GROUP_POWER = 0.75  # the union of a group's heads is what G^0.75 independent heads would read: 2.3× one head for G = 3
SAMPLED_MULTIPLY_ADDS = 3  # per value of a sampled row: q·k, |k−μ|, p·V
COPY_S = 10e-6  # latency of one copy between host and GPU, and of waiting for it
COPIES_PER_LAYER = 4  # query and codes to the host, output and LSE back

# Time of a product with B rows over that with one: max(1, fixed + B · slope). Three CPUs of EVIDENCE.md section 3,
# decision 005 and 007; torch's bfloat16 product does one row after the other, its int8 product four at a time.
BATCH_COST: dict[WeightType, tuple[float, float]] = {
    "float32": (0.55, 0.45), "bfloat16": (0.4, 0.6), "int8": (0.0, 0.33),
}  # fmt: skip
FLOAT32_MOST = 2.8  # from about 4 rows on MKL multiplies blocks, and the time does not grow up to 16


@dataclass(frozen=True, slots=True)
class _Rates:
    """Speeds with the plan's threads: fewer than were measured read and multiply less."""

    sequential: float
    gather: float
    multiply_adds: float
    product: float
    count_s: float
    visit_s: float
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
            count_s=speeds.count_ns * 1e-9,
            visit_s=speeds.visit_ns * 1e-9,
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
    sampled = plan.sampled_layers if plan.indexed_keys(tokens) else ()
    stages["dense"] = _dense_s(plan, rates, tokens, batch, len(sampled))
    if sampled:
        for stage, seconds in _sampled_s(plan, rates, tokens, batch, sampled_ratio).items():
            stages[stage] += len(sampled) * seconds
    missing: tuple[str, ...] = ()
    if plan.gpu is None:
        stages["other"] = _products_s(plan, rates, batch)
    else:
        stages["merge"], missing = _transfers_s(plan, plan.speeds, batch, len(sampled))
    stages["other"] += plan.shape.layers * OPERATORS_PER_LAYER * rates.operator_s
    return {stage: 1e3 * seconds for stage, seconds in stages.items()}, missing


def _dense_s(plan: Plan, rates: _Rates, tokens: int, batch: int, sampled: int) -> float:
    """Exact attention of all layers but the sampled ones: every row in sight is read, and multiplied by each head."""
    shape = plan.shape
    windowed = [min(tokens, window) for window in shape.layer_windows if window is not None]
    full = len(shape.full_layers) - sampled
    keys = full * tokens + sum(windowed)
    calls = full + len(windowed)
    return _exact_rows_s(plan, rates, batch * shape.kv_heads * keys) + calls * CALL_OPERATORS * rates.operator_s


def _exact_rows_s(plan: Plan, rates: _Rates, rows: float) -> float:
    group, dim = plan.shape.heads / plan.shape.kv_heads, plan.shape.head_dim
    reading = row_bytes(dim, plan.row_dtype) / rates.sequential
    return rows * (reading + 2 * group * dim / rates.multiply_adds)


def _sampled_s(plan: Plan, rates: _Rates, tokens: int, batch: int, ratio: float) -> dict[str, float]:
    """One sampled layer: codes of the queries, look-ups, and the rows that any head of a group has sampled."""
    shape, keys = plan.shape, plan.indexed_keys(tokens)
    heads, dim, group = batch * shape.heads, shape.head_dim, shape.heads / shape.kv_heads
    signs = plan.K * plan.L
    ids = plan.L * keys / (1 << plan.K) * VISIT_SKEW
    union = keys * (1 - (1 - ratio) ** (group**GROUP_POWER))
    gathered = batch * shape.kv_heads * union * row_bytes(dim, plan.row_dtype) / rates.gather
    multiplied = heads * ratio * keys * SAMPLED_MULTIPLY_ADDS * dim / rates.multiply_adds
    near = _exact_rows_s(plan, rates, batch * shape.kv_heads * plan.window_rows) if plan.windows_on_host else 0.0
    call = CALL_OPERATORS * rates.operator_s
    return {
        "hash": call + dim * signs * 4 / rates.sequential + heads * dim * signs / rates.multiply_adds,
        "retrieve": heads * (plan.L * rates.visit_s + ids * rates.count_s) / rates.threads,
        "attend": call + gathered + multiplied + near,
    }


def _products_s(plan: Plan, rates: _Rates, batch: int) -> float:
    """Linear layers and the output layer: weights are read once, and multiplied by `batch` rows."""
    fixed, slope = BATCH_COST[plan.weight_type]
    factor = max(1.0, fixed + slope * batch)
    if plan.weight_type == "float32":
        factor = min(factor, FLOAT32_MOST)
    return factor * plan.shape.step_params(batch) * WEIGHT_BYTES[plan.weight_type] / rates.product


def _transfers_s(plan: Plan, speeds: Speeds, batch: int, sampled: int) -> tuple[float, tuple[str, ...]]:
    """Queries, codes and results between host and GPU, for sampled layers."""
    up, down = speeds.host_to_device_bytes_s, speeds.device_to_host_bytes_s
    left_out = ("products on the GPU, whose memory was not measured",)
    if up is None or down is None:
        return 0.0, (*left_out, "copies between host and GPU, which were not measured")
    heads, dim = batch * plan.shape.heads, plan.shape.head_dim
    per_layer = heads * (dim + plan.L) * 4 / down + heads * (dim + 1) * 4 / up + COPIES_PER_LAYER * COPY_S
    return sampled * per_layer, left_out
