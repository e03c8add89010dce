"""What a plan says of each sampler: its options, what is expected of it on real text, and what its index takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from magicpig_cli.model.shape import ModelShape
from magicpig_cli.planner.indexes import IndexBytes, SignaturesBytes, TablesBytes
from magicpig_cli.planner.quality import expected_ratio, expected_signature_error, expected_table_error

Options = dict[str, float | None]
NO_OPTIONS: Options = dict.fromkeys(("K", "L", "budget", "tail", "bits", "target_error"))


class SamplerPlan(Protocol):
    """What all samplers have."""

    @property
    def options(self) -> Options:
        """What was chosen, by the names of the options; None where an option is another sampler's."""
        ...

    @property
    def words(self) -> str:
        """The same where there is little room."""
        ...

    @property
    def ratio(self) -> float:
        """Share of the offloaded keys that is expected to be sampled."""
        ...

    @property
    def error(self) -> float:
        """Relative error of attention that is expected, a guide."""
        ...

    def index(self, shape: ModelShape, layers: int) -> IndexBytes:
        """What the index of so many layers takes."""
        ...


@dataclass(frozen=True, slots=True)
class TablesPlan:
    """lsh. table_ratio: of the keys, that tables of (K, L) are expected to sample; tail: of that, drawn beside them."""

    K: int
    L: int
    table_ratio: float
    tail: float

    @property
    def options(self) -> Options:
        return NO_OPTIONS | {"K": self.K, "L": self.L, "tail": self.tail}

    @property
    def words(self) -> str:
        return f"K={self.K} L={self.L}"

    @property
    def tail_rate(self) -> float:
        """Share of all keys that is drawn uniformly: by the closed form, so that no profile's figure decides a draw."""
        return self.tail * expected_ratio(self.K, self.L) if self.tail else 0.0

    @property
    def ratio(self) -> float:
        return self.tail_rate + (1 - self.tail_rate) * self.table_ratio

    @property
    def error(self) -> float:
        return expected_table_error(self.table_ratio)

    def index(self, shape: ModelShape, layers: int) -> IndexBytes:
        return TablesBytes(layers, shape.kv_heads, shape.head_dim, self.K, self.L)


@dataclass(frozen=True, slots=True)
class SignaturesPlan:
    """rabitq. tail: of the budget, drawn uniformly; target_error: None = the budget stays."""

    budget: float
    bits: int
    tail: float
    target_error: float | None

    @property
    def options(self) -> Options:
        return NO_OPTIONS | {
            "budget": self.budget, "tail": self.tail, "bits": self.bits, "target_error": self.target_error,
        }  # fmt: skip

    @property
    def words(self) -> str:
        return f"{100 * self.budget:.3g}%" if self.target_error is None else f"error {self.target_error:g}"

    @property
    def ratio(self) -> float:
        return self.budget

    @property
    def error(self) -> float:
        return self.target_error or expected_signature_error(self.budget, self.bits)

    def index(self, shape: ModelShape, layers: int) -> IndexBytes:
        return SignaturesBytes(layers, shape.kv_heads, shape.head_dim, self.bits)
