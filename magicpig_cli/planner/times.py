"""Milliseconds of a decode step by stage, from what this machine was measured to do (`hardware.Speeds`).

Reading dominates: weights once per step, rows of exact layers once per step and sequence, sampled rows with gaps.
Beside it the kernels multiply, tables are looked up, and torch's small operators are called from Python. Where figures
of this module come from, and how far predictions were off: docs/decisions/007. What a GPU adds: `device_times`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels import row_bytes, signature_bytes
from magicpig_cli.planner import device_times
from magicpig_cli.planner.forms import HOST_BYTES, WEIGHT_BYTES, WeightType, held_as
from magicpig_cli.planner.plan import Plan
from magicpig_cli.planner.steps import LAYER_OPERATORS, SAMPLED_OPERATORS, StepTime, Term, exact_keys, operators

# Multiply-adds that the attention kernels make in the time in which all threads read a byte: between 1.2 (Sapphire
# Rapids, D = 64, 3 heads per group) and 2.0 (Genoa, D = 128, 4 heads).
MULTIPLY_ADDS_PER_BYTE = 1.6
EXACT_CALL = (20, 0)  # of the attention kernel, in small operators: checks, pieces, and sharing them out
SAMPLED_CALL = (22, 12)
AFTERMATH = 0.25  # of what reading a layer's rows takes, everything after it takes longer: the caches hold nothing else
SCAN_BITS = 128  # of the signatures whose scan was measured
HASH_OPERATORS = 14  # a call of the hash kernel, which is shorter
VISIT_SKEW = 1.7  # ids visited over those of uniform buckets: 1.4–2.0 on real keys (EVIDENCE.md section 1)
GROUP_POWER = 0.75  # the union of a group's heads is what G^0.75 independent heads would read: 2.3× one head for G = 3
SAMPLED_MULTIPLY_ADDS = 4  # per value of a sampled row: q·k, |k−μ|, p·V, and sorting out which heads want it

# Time of a product with B rows over that with one: max(1, fixed + B · slope). Decision 007, int4 020.
BATCH_COST: dict[WeightType, tuple[float, float]] = {
    "float32": (0.85, 0.08), "bfloat16": (0.8, 0.115), "int8": (0.7, 0.185), "int4": (0.79, 0.21),
}  # fmt: skip
EXPERT_COST = (0.55, 0.45)  # of torch's float32 product: three CPUs of EVIDENCE.md section 3, decisions 005 and 007
EXPERT_MOST = 2.8  # from about 4 rows on MKL multiplies blocks, and the time does not grow up to 16


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds with the plan's threads: fewer than were measured read and multiply less."""

    sequential: float
    gather: float
    multiply_adds: float
    products: dict[WeightType, float]  # those that were measured
    count_s: float
    visit_s: float
    scan_s: float
    operator_s: float
    threads: int

    @staticmethod
    def of(plan: Plan, speeds: Speeds) -> Rates:
        share = min(1.0, plan.threads / speeds.threads)
        return Rates(
            sequential=speeds.sequential_bytes_s * share,
            gather=speeds.gather_bytes_s * share,
            multiply_adds=MULTIPLY_ADDS_PER_BYTE * speeds.sequential_bytes_s * share,
            products={form: rate * share for form, rate in speeds.product_bytes_s.items()},
            count_s=speeds.count_ns * 1e-9,
            visit_s=speeds.visit_ns * 1e-9,
            scan_s=speeds.scan_ns * 1e-9,
            operator_s=speeds.operator_us * 1e-6,
            threads=min(plan.threads, speeds.threads),
        )


def step_time(plan: Plan, tokens: int, batch: int, sampled_ratio: float) -> StepTime:
    """One decode step of `batch` sequences of `tokens`."""
    if plan.speeds is None:
        return StepTime((), missing=("this machine was not measured",))
    rates = Rates.of(plan, plan.speeds)
    sampled = len(plan.sampled_layers) if plan.indexed_keys(tokens) else 0

    def kernels(sequences: int) -> tuple[Term, ...]:
        return tuple(_sampled(plan, rates, tokens, sequences, sampled_ratio, sampled))

    if plan.gpu is not None:
        return device_times.step_time(plan, plan.speeds, kernels, tokens, batch, sampled)
    terms = list(kernels(batch)) if sampled else []
    terms += [_operators(plan, rates, batch, sampled), *_dense(plan, rates, tokens, batch, sampled)]
    if plan.weight_type not in rates.products:  # published so, or measured by a version that did not know them
        return StepTime(tuple(terms), missing=(f"products of {plan.weight_type} weights, which were not measured",))
    return StepTime((*terms, *_products(plan, rates, batch)))


def _dense(plan: Plan, rates: Rates, tokens: int, batch: int, sampled: int) -> Iterator[Term]:
    """Exact attention on the CPU: every row in sight is read, and multiplied by each head of the group."""
    rows = batch * plan.shape.kv_heads * exact_keys(plan, tokens, sampled)
    layers = plan.shape.layers - sampled
    call = operators(EXACT_CALL, batch) * rates.operator_s
    yield Term("dense", _exact_rows_s(plan, rates, rows) + layers * call, f"{layers} layers: {rows:,} rows")
    yield _after(rows * _reading_s(plan, rates), "rows in order")


def _reading_s(plan: Plan, rates: Rates) -> float:
    """Of a row in order."""
    return row_bytes(plan.shape.head_dim, plan.row_dtype) / rates.sequential


def _exact_rows_s(plan: Plan, rates: Rates, rows: float) -> float:
    group, dim = plan.shape.heads / plan.shape.kv_heads, plan.shape.head_dim
    return rows * (_reading_s(plan, rates) + 2 * group * dim / rates.multiply_adds)


def _after(reading_s: float, what: str) -> Term:
    return Term("other", AFTERMATH * reading_s, f"{AFTERMATH} × {1e3 * reading_s:.1f} ms of reading {what}")


def _sampled(plan: Plan, rates: Rates, tokens: int, batch: int, ratio: float, layers: int) -> Iterator[Term]:
    """All sampled layers: finding the keys, and the rows that any head of a group has sampled."""
    shape, keys = plan.shape, plan.indexed_keys(tokens)
    heads, dim, group = batch * shape.heads, shape.head_dim, shape.heads / shape.kv_heads
    for find in _FINDING[str(plan.sampler)](plan, rates, keys, batch):
        yield replace(find, seconds=layers * find.seconds, formula=f"{layers} layers × {find.formula}")
    each = row_bytes(dim, plan.row_dtype)
    union = keys * (1 - (1 - ratio) ** (group**GROUP_POWER))
    gathered = batch * shape.kv_heads * union * each / rates.gather
    multiplied = heads * ratio * keys * SAMPLED_MULTIPLY_ADDS * dim / rates.multiply_adds
    near = _exact_rows_s(plan, rates, batch * shape.kv_heads * plan.window_rows) if plan.windows_on_host else 0.0
    words = (
        f"{layers} layers × ({batch * shape.kv_heads * union:,.0f} rows of {each} B / {rates.gather / 1e9:.1f} GB/s + "
        f"{heads * ratio * keys:,.0f} sampled × {SAMPLED_MULTIPLY_ADDS * dim} multiply-adds / "
        f"{rates.multiply_adds / 1e9:.0f} G/s + a call)"
    )
    call = operators(SAMPLED_CALL, batch) * rates.operator_s
    yield Term("attend", layers * (call + gathered + multiplied + near), words)
    if plan.gpu is None:  # there the rest of the layer is the GPU's
        yield _after(layers * gathered, "sampled rows")


def _look_up(plan: Plan, rates: Rates, keys: int, batch: int) -> Iterator[Term]:
    """lsh: codes of the queries, and the buckets that they name."""
    heads, dim, signs = batch * plan.shape.heads, plan.shape.head_dim, plan.K * plan.L
    ids = plan.L * keys / (1 << plan.K) * VISIT_SKEW
    if plan.gpu is None:  # a GPU hashes itself, in a few of its launches
        hash_call = HASH_OPERATORS * rates.operator_s
        hashed = dim * signs * 4 / rates.sequential + heads * dim * signs / rates.multiply_adds
        yield Term("hash", hash_call + hashed, f"{heads} heads × {dim} values × {signs} signs")
    yield Term(
        "retrieve", heads * (plan.L * rates.visit_s + ids * rates.count_s) / rates.threads,
        f"{heads} heads × ({plan.L} tables × {rates.visit_s * 1e9:.1f} ns + {ids:,.0f} ids × "
        f"{rates.count_s * 1e9:.2f} ns) / {rates.threads} threads",
    )  # fmt: skip


def _scan(plan: Plan, rates: Rates, keys: int, batch: int) -> Iterator[Term]:
    """rabitq: rotations of the queries, and the signatures of all keys unless a GPU scans them; nobody has read them
    since the last step."""
    heads, dim = batch * plan.shape.heads, plan.shape.head_dim
    rotated = dim * plan.bits * 4 / rates.sequential + heads * dim * plan.bits / rates.multiply_adds
    if plan.scans_there:  # once for it, and once for the weights of what it finds
        yield Term("retrieve", 2 * rotated, "rotations, twice")
        return
    one_s = rates.scan_s * plan.bits / SCAN_BITS
    signatures = batch * plan.shape.kv_heads * keys * signature_bytes(plan.bits)
    yield Term(
        "retrieve", rotated + heads * keys * one_s / rates.threads + signatures / rates.sequential,
        f"({heads} heads × {keys:,} signatures × {one_s * 1e9:.2f} ns / {rates.threads} threads + "
        f"{signatures:,} B / {rates.sequential / 1e9:.1f} GB/s, and rotations)",
    )  # fmt: skip


_FINDING = {"lsh": _look_up, "rabitq": _scan}


def _operators(plan: Plan, rates: Rates, batch: int, sampled: int) -> Term:
    """Small operators that take as long as what is neither product nor kernel."""
    count = plan.shape.layers * operators(LAYER_OPERATORS, batch) + sampled * operators(SAMPLED_OPERATORS, batch)
    return Term("other", count * rates.operator_s, f"{count:,} small operators × {rates.operator_s * 1e6:.1f} µs")


def _products(plan: Plan, rates: Rates, batch: int) -> Iterator[Term]:
    """Linear layers and the output layer: weights are read once and multiplied by `batch` rows.

    Experts of a mixture are float32 and torch's, whatever the others are, and each has the rows of its own tokens.
    """
    shape = plan.shape
    experts = shape.step_experts(batch)
    for form, values in held_as(shape, plan.weight_type, shape.step_params(batch) - experts).items():
        shared, rate, factor = values * HOST_BYTES[form], rates.products[form], _batch_factor(BATCH_COST[form], batch)
        yield Term(
            "other", factor * shared / rate,
            f"{factor:.2f} × {shared:,.0f} B of {form} weights / {rate / 1e9:.1f} GB/s",
        )  # fmt: skip
    if experts:
        own, factor = experts * WEIGHT_BYTES["float32"], _batch_factor(EXPERT_COST, batch * shape.experts_used)
        rate = rates.products["float32"]
        yield Term(
            "other", min(EXPERT_MOST, factor) * own / rate,
            f"{min(EXPERT_MOST, factor):.2f} × {own:,.0f} B of experts / {rate / 1e9:.1f} GB/s",
        )  # fmt: skip


def _batch_factor(cost: tuple[float, float], rows: float) -> float:
    """Time of a product with so many rows over that with one."""
    fixed, slope = cost
    return max(1.0, fixed + slope * rows)
