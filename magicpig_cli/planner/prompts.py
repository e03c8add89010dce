"""Seconds in which a prompt is read on a CPU: products of whole chunks, attention to what came before, tables.

Unlike a decode step (`times`) this multiplies more than it reads, so it goes by the measured speed of such products.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicpig_cli.planner.forms import ENDS, HOST_BYTES, held_as
from magicpig_cli.planner.plan import Plan
from magicpig_cli.planner.steps import LAYER_OPERATORS

# Multiply-adds per second of attention to earlier keys, over those of the products: torch's flash kernel, softmax and
# the cast of rows included.
ATTENTION_SHARE = 0.6
# Sums, norms, activations and rotary embedding of a chunk go through this many float32 arrays as wide as what a layer
# makes per token.
PASSES = 18.0
# One thread: a sign of a hashed key is packed, an id is sorted into a table (EVIDENCE.md section 1: 119 and 62 ms for
# 96k keys with 1,500 signs in 150 tables).
PACK_S, SORT_S = 0.83e-9, 4.3e-9


def _index_work(plan: Plan) -> tuple[int, float]:
    """(signs, seconds of one thread beside them) of taking one key of one head into the index."""
    return {None: (0, 0.0), "lsh": (plan.K * plan.L, plan.L * SORT_S), "rabitq": (plan.bits, 0.0)}[plan.sampler]


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """What reading takes with one plan; `seconds` is asked for many prompts."""

    plan: Plan
    token_s: float  # products and passes, per token
    weights_s: float  # that a chunk takes at least: its weights are read, or cast to float32
    cast_s: float  # of this, what multiplying does not hide
    chunk_s: float  # operators and the output layer, per chunk
    key_s: float  # attention, per token and key that it sees, all heads of one layer
    hash_s: float  # per indexed key, all layers

    @classmethod
    def of(cls, plan: Plan) -> PromptTimes | None:
        """None where this machine was not measured, and for products that were not: a GPU's, and quantizers'."""
        speeds, shape = plan.speeds, plan.shape
        measured = speeds is not None and plan.weight_type in speeds.product_bytes_s and speeds.prompt_multiply_adds_s
        if speeds is None or plan.gpu is not None or not measured:
            return None
        share = min(1.0, plan.threads / speeds.threads)
        multiply, sequential = speeds.prompt_multiply_adds_s * share, speeds.sequential_bytes_s * share
        output = shape.vocab * shape.hidden  # multiplied with the last token of a chunk alone
        layers = shape.step_params(1) - output
        width = 2 * shape.hidden + 2 * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + 3 * shape.inner
        passes = PASSES * shape.layers * width * 4 / sequential
        everything = shape.params - shape.lookup_params - output
        held = held_as(shape, plan.weight_type, everything)
        read = sum(values * HOST_BYTES[form] for form, values in held.items()) / sequential
        cast = 0.0 if plan.weight_type == "float32" else read + everything * 4 / sequential
        operators = shape.layers * sum(LAYER_OPERATORS) * speeds.operator_us * 1e-6
        end = ENDS.get(plan.weight_type, plan.weight_type)
        last = output * HOST_BYTES[end] / (speeds.product_bytes_s[end] * share)
        threads = min(plan.threads, speeds.threads)
        signs, sorted_s = _index_work(plan)
        hashed = shape.head_dim * signs / multiply + (signs * PACK_S + sorted_s) / threads
        return cls(
            plan=plan,
            token_s=layers / multiply + passes,
            weights_s=read,
            cast_s=cast,
            chunk_s=operators + last,
            key_s=2 * shape.heads * shape.head_dim / (multiply * ATTENTION_SHARE),
            hash_s=len(plan.sampled_layers) * shape.kv_heads * hashed,
        )

    def seconds(self, start: int, tokens: int) -> float:
        """Of reading the tokens from `start` to `tokens`, after those before have been read."""
        whole, rest = divmod(tokens - start, self.plan.chunk)
        found = whole * self._chunk_s(self.plan.chunk) + (self._chunk_s(rest) if rest else 0.0)
        seen = (tokens**2 - start**2) / 2
        for window in self.plan.shape.layer_windows:
            found += self.key_s * (seen if window is None else min(seen, (tokens - start) * window))
        keys = self.plan.indexed_keys(tokens) - self.plan.indexed_keys(start)
        return found + max(0, keys) * self.hash_s

    def _chunk_s(self, rows: int) -> float:
        return max(rows * self.token_s, self.weights_s) + self.cast_s + self.chunk_s
