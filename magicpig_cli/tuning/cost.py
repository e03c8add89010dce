"""Milliseconds per token of any (K, L): what this model was measured to take, and what look-ups and rows add to it.

Everything that does not depend on (K, L) is measured in this run: the model's forward, exact attention of a layer, and
what a sampled layer takes beside the work counted here (Python, starting threads, merging). The work itself is counted
in closed form from the histograms and priced with the speeds of the machine (`hardware.Speeds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from magicpig_cli.engine.recording import ExactStep
from magicpig_cli.hardware import Speeds
from magicpig_cli.kernels import row_bytes
from magicpig_cli.planner import Plan
from magicpig_cli.planner.times import SCAN_BITS
from magicpig_cli.tuning.angles import Angles, TableCurve

_FLOAT_BYTES = 4  # of the projections


@dataclass(frozen=True, slots=True)
class CostModel:
    """Times of one decode step of one sequence at the full context."""

    speeds: Speeds
    kv_heads: int
    group: int  # query heads per KV head
    head_dim: int
    row_bytes: int
    offloaded: int  # keys per KV head
    base_ms: float  # the step without any attention
    exact_layer_ms: float
    sampled_layer_ms: float = 0.0  # of a sampled layer, beside what `work_ms` counts

    @classmethod
    def of(cls, plan: Plan, speeds: Speeds, offloaded: int, step: ExactStep) -> CostModel:
        """From exact steps at the full context; `with_overhead` adds what a sampled one takes."""
        shape = plan.shape
        return cls(
            speeds, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim,
            row_bytes(shape.head_dim, plan.row_dtype), offloaded, step.wall_ms - step.attention_ms,
            step.attention_ms / shape.layers,
        )  # fmt: skip

    def with_overhead(self, measured_ms: float, K: int, L: int, angles: Mapping[int, Angles], dense: int) -> CostModel:
        """From a measured step whose sampled layers are those of `angles` and `dense` are exact."""
        curve = TableCurve.of(K, L)
        work = sum(self.work_ms(K, L, curve, layer) for layer in angles.values())
        return self._with_left(measured_ms - work, len(angles), dense)

    def with_signature_overhead(
        self, measured_ms: float, bits: int, ratio: float, sampled: int, dense: int
    ) -> CostModel:
        """The same from a step whose `sampled` layers were sampled by signatures."""
        return self._with_left(measured_ms - sampled * self.signature_work_ms(bits, ratio), sampled, dense)

    def _with_left(self, left_ms: float, sampled: int, dense: int) -> CostModel:
        """left_ms: of a step, without the work of its sampled layers."""
        left_ms -= self.base_ms + dense * self.exact_layer_ms
        return replace(self, sampled_layer_ms=left_ms / sampled)

    def work_ms(self, K: int, L: int, curve: TableCurve, angles: Angles) -> float:
        """Hash, look-up and attention of one sampled layer: float64, from its histogram at the full context."""
        speeds, heads = self.speeds, self.kv_heads * self.group
        hash_s = _FLOAT_BYTES * self.head_dim * K * L / speeds.product_bytes_s["float32"]
        look_up_ns = L * speeds.visit_ns + curve.visited(angles) * speeds.count_ns
        retrieve_s = heads * look_up_ns * 1e-9 / min(speeds.threads, heads)
        attend_s = self.kv_heads * self._union(curve.ratio(angles)) * self.row_bytes / speeds.gather_bytes_s
        return float(1e3 * (hash_s + retrieve_s + attend_s))

    def signature_layer_ms(self, bits: int, ratio: float) -> float:
        """One layer sampled by signatures; beside the work it is taken to take what tables do, if there are any."""
        return self.sampled_layer_ms + self.signature_work_ms(bits, ratio)

    def signature_work_ms(self, bits: int, ratio: float) -> float:
        """Scan and attention of one layer sampled by signatures."""
        heads = self.kv_heads * self.group
        scan_s = heads * self.offloaded * self.speeds.scan_ns * 1e-9 * bits / SCAN_BITS
        attend_s = self.kv_heads * self._union(ratio) * self.row_bytes / self.speeds.gather_bytes_s
        return 1e3 * (scan_s / min(self.speeds.threads, heads) + attend_s)

    def _union(self, ratio: float) -> float:
        """Rows that any of a group's heads samples, as if they sampled independently of each other."""
        return self.offloaded * (1 - (1 - ratio) ** self.group)

    def layer_ms(self, K: int, L: int, curve: TableCurve, angles: Angles) -> float:
        """One sampled layer."""
        return self.sampled_layer_ms + self.work_ms(K, L, curve, angles)
