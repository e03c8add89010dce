"""Research baselines that look at every key before they choose: what a sampler of the same budget could reach.

Their steps cost more than exact attention, so they are no fast paths; `magicpig eval` holds the samplers to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NoReturn

import numpy as np
import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import Estimate, LogitRule, Partial, StepRecorder
from magicpig_cli.attention.merge import merge
from magicpig_cli.cache.base import Index, IndexReader
from magicpig_cli.cache.layer import LayerCache, Run
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import RowStore
from magicpig_cli.errors import MagicpigError

_FLOOR = 1e-30  # of a weight over the largest one: keys far below it count as equals
_MOST_FLOATS = 1 << 26  # keys and values of KV heads that are looked at together

Draws = Callable[[], torch.Tensor]  # uniform in [0, 1), float64 [.., N]
Pick = Callable[[torch.Tensor, float, Draws], torch.Tensor]


def pick_top(logits: torch.Tensor, budget: float, _: Draws) -> torch.Tensor:
    """Logits [.., N] of the `budget`·N largest of each row (at least one), −∞ for the others."""
    count = max(1, round(budget * logits.shape[-1]))
    values, keys = logits.topk(count, dim=-1)
    return torch.full_like(logits, -torch.inf).scatter_(-1, keys, values)


def pick_oracle(logits: torch.Tensor, budget: float, draws: Draws) -> torch.Tensor:
    """Logits − ln u [.., N] of keys that are drawn independently, each with its u; −∞ for the others.

    u is proportional to the key's softmax weight up to 1, and adds up to `budget`·N (paper section 3, where as many
    keys are drawn with replacement; here no key is counted twice).
    """
    u = oracle_probabilities(logits, budget)
    return torch.where(draws() < u, logits - u.log().to(logits.dtype), -torch.inf)


def oracle_probabilities(logits: torch.Tensor, budget: float) -> torch.Tensor:
    """u = min(1, c·w) with c such that it adds up to `budget`·N in each row: float64 [.., N]."""
    weights = (logits.double() - logits.amax(dim=-1, keepdim=True)).exp().clamp_min(_FLOOR)
    keys = weights.shape[-1]
    wanted = budget * keys
    if wanted >= keys:
        return torch.ones_like(weights)
    # No more than `wanted` keys can have u = 1, so these and the next one are all that must be in order.
    largest, places = weights.topk(min(keys, math.ceil(wanted) + 1), dim=-1)
    others = weights.scatter(-1, places, 0.0).sum(dim=-1, keepdim=True)
    rest = others + largest.flip(-1).cumsum(-1).flip(-1)  # of each of these and all smaller weights
    certain = torch.arange(largest.shape[-1], dtype=torch.float64, device=weights.device)
    factors = (wanted - certain).clamp_min(0) / rest  # c if the larger ones have u = 1
    first = (factors * largest <= 1).double().argmax(dim=-1, keepdim=True)  # the largest weight with u ≤ 1
    return (factors.gather(-1, first) * weights).clamp_max(1.0)


BASELINES: Mapping[str, Pick] = {"topk": pick_top, "oracle": pick_oracle}


class WholeStore(Index):
    """What a baseline samples from: every row of a store, without anything beside it."""

    own_bytes = 0
    parts = ()
    outgrown = False

    def __init__(self, sampler: str, store: RowStore, length: int = 0) -> None:
        self.sampler = sampler
        self._store, self._length = store, length

    @property
    def length(self) -> int:
        return self._length

    def extend(self) -> None:
        self._length = self._store.length

    step = extend

    def truncate(self, length: int) -> None:
        self._length = min(self._length, length)

    def fork(self, store: RowStore) -> WholeStore:
        return WholeStore(self.sampler, store, self._length)

    def saved(self, length: int) -> NoReturn:
        raise MagicpigError(f"{self.sampler} is a baseline: it has no index that could be saved")


class FullScores:
    """A sampler that computes the logits of all keys and reads those that `BASELINES[name]` picks."""

    def __init__(self, name: str, budget: float, hash_seed: int, threads: int, staging: Staging) -> None:
        self.name = name
        self._pick = BASELINES[name]
        self._budget, self._hash_seed, self._threads, self._staging = budget, hash_seed, threads, staging

    def new_index(self, layer: int, cache: LayerCache) -> Index:
        return WholeStore(self.name, cache.store)

    def restored(self, layer: int, cache: LayerCache, saved: IndexReader) -> NoReturn:
        raise saved.damaged(f"there is no index for {self.name}")

    def learn(self, index: Index, error: np.ndarray) -> None:
        """Errors are not estimated."""

    def forget(self, layer: int) -> None:
        """Nothing is drawn for a layer."""

    def on_device(self, layer: int, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ()

    def built(self, index: Index) -> None:
        """It is on the host alone."""

    def found_there(self, *_: object) -> None:
        """It is on the host alone."""

    def attend(
        self, layer: int, q: np.ndarray, caches: list[LayerCache], rule: LogitRule, record: StepRecorder,
        exact: list[list[Run]] | None = None, sampled: SequenceOf[bool] | None = None,
        computed: SequenceOf[torch.Tensor] = (), reached: SequenceOf[kernels.Reached | None] | None = None,
    ) -> Estimate:  # fmt: skip
        attended = Partial(torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf))
        if exact is not None:
            near = kernels.exact_attend(q, exact, scale=rule.scale, softcap=rule.softcap, threads=self._threads)
            attended = Partial(torch.from_numpy(near.out), torch.from_numpy(near.lse))
        counts = np.zeros(q.shape[:2], dtype=np.int64)
        queries = self._staging.to_device(torch.from_numpy(q))
        with record.stage("attend"):
            for b in (b for b in range(len(caches)) if sampled is None or sampled[b]):
                middle, counts[b] = self._middle(layer, queries[b : b + 1], caches[b], rule)
                whole = merge(Partial(attended.out[b : b + 1], attended.lse[b : b + 1]), middle)
                attended.out[b], attended.lse[b] = whole.out[0], whole.lse[0]
        return Estimate(attended.out.numpy(), attended.lse.numpy(), counts, None)

    def _middle(
        self, layer: int, q: torch.Tensor, cache: LayerCache, rule: LogitRule
    ) -> tuple[Partial, np.ndarray]:  # fmt: skip
        """Over the chosen keys of one sequence, q [1, H, D] on the device, and how many these are: int64 [H].

        Nobody waits for a baseline: copies are made at once.
        """
        assert cache.index is not None, "sampling needs an index"
        uniforms = np.random.Generator(np.random.Philox(key=self._hash_seed, counter=[0, 0, cache.length, layer]))
        rows = cache.store.read(0, cache.index.length)
        together = max(1, _MOST_FLOATS // max(1, rows[0].numel()))
        outs, sums, counts = [], [], []
        queries = q[0].view(rows.shape[0], -1, q.shape[-1])  # [Hkv, G, D]
        for first in range(0, rows.shape[0], together):
            heads = slice(first, first + together)
            keys, values = self._staging.to_device(rows[heads]).float().unbind(dim=2)
            logits = self._choose(queries[heads] @ keys.transpose(1, 2), rule, uniforms)  # [heads here, G, N]
            counts.append(torch.isfinite(logits).sum(dim=-1).flatten())
            sums.append(logits.logsumexp(dim=-1).flatten())
            outs.append((logits.softmax(dim=-1).nan_to_num() @ values).flatten(0, 1))  # NaN: no key was drawn
        out, lse, found = (self._staging.to_host(torch.cat(parts)) for parts in (outs, sums, counts))
        return Partial(out.unsqueeze(0), lse.unsqueeze(0)), found.numpy()

    def _choose(self, dots: torch.Tensor, rule: LogitRule, uniforms: np.random.Generator) -> torch.Tensor:
        """Corrected logits of products q·k [Hkv, G, N]."""
        logits = dots * rule.scale
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)

        def draws() -> torch.Tensor:
            return self._staging.to_device(torch.from_numpy(uniforms.random(tuple(logits.shape))))

        return self._pick(logits, self._budget, draws)
