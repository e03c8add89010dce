"""Research baselines that look at every key before they choose: what a sampler of the same budget could reach.

Their steps cost more than exact attention, so they are no fast paths; `magicpig eval` holds the samplers to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from magicpig_cli.attention.attention import Attention
from magicpig_cli.attention.base import LogitRule, Partial, StepRecorder
from magicpig_cli.attention.exact import attend_step
from magicpig_cli.attention.merge import merge
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.staging import Staging

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


class FullScores(Attention):
    """Exact attention, but of the offloaded keys of sampled sequences only what `pick` chooses by their true logits."""

    def __init__(
        self, pick: Pick, budget: float, hash_seed: int, sampler: None, row_dtype: torch.dtype, threads: int,
        staging: Staging, rotation: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """sampler: none; the others are those of `Attention`."""
        super().__init__(sampler, row_dtype, threads, staging, rotation)
        self._pick, self._budget, self._hash_seed = pick, budget, hash_seed

    def build_index(self, layer: int, cache: LayerCache) -> None:
        """There is none."""

    def step(
        self, layer: int, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool], q: torch.Tensor,
        key: torch.Tensor, value: torch.Tensor, rule: LogitRule, record: StepRecorder,
    ) -> torch.Tensor:  # fmt: skip
        picked = [b for b, flag in enumerate(sampled) if flag]
        if not picked:
            return super().step(layer, caches, sampled, q, key, value, rule, record)
        queries = self._rotated(q[:, :, 0]).float().contiguous()
        keys, values = self._rotated(key[:, :, 0]), value[:, :, 0]
        for b, cache in enumerate(caches):
            cache.append_one(keys[b], values[b])
        store_from = [cache.store.length if flag else 0 for cache, flag in zip(caches, sampled, strict=True)]
        with record.stage("window"):
            near = attend_step(queries, list(caches), store_from, rule, self._threads, self._staging)
        with record.stage("attend"):
            middle, counts = self._middle(layer, queries, caches, sampled, rule)
        attended = merge(near, middle)
        record.sampled[layer] = counts
        record.offloaded[layer] = [start * queries.shape[1] for start in store_from]
        self._note_errors([caches[b] for b in picked], queries[picked], attended.out[picked], rule, record)
        return attended.out.to(q.dtype).unsqueeze(1)

    def _middle(
        self, layer: int, queries: torch.Tensor, caches: SequenceOf[LayerCache], sampled: SequenceOf[bool],
        rule: LogitRule,
    ) -> tuple[Partial, list[int]]:  # fmt: skip
        """Over the chosen offloaded keys, and how many these are per sequence, summed over query heads."""
        out = torch.zeros_like(queries)
        lse = torch.full(queries.shape[:2], -torch.inf, device=queries.device)
        counts = [0] * len(caches)
        for b in (b for b, flag in enumerate(sampled) if flag):
            uniforms = np.random.Generator(
                np.random.Philox(key=self._hash_seed, counter=[0, 0, caches[b].length, layer])
            )
            rows = caches[b].store.read(0, caches[b].store.length)
            together = max(1, _MOST_FLOATS // max(1, rows[0].numel()))
            group = queries.shape[1] // rows.shape[0]
            for first in range(0, rows.shape[0], together):
                keys, values = self._staging.to_device(rows[first : first + together]).float().unbind(dim=2)
                heads = slice(first * group, (first + keys.shape[0]) * group)
                q = queries[b, heads].view(keys.shape[0], group, -1)
                logits = self._choose(q @ keys.transpose(1, 2), rule, uniforms)  # [heads here, G, N]
                counts[b] += int(torch.isfinite(logits).sum())
                lse[b, heads] = logits.logsumexp(dim=-1).flatten()
                chosen = logits.softmax(dim=-1).nan_to_num() @ values  # NaN: no key was drawn
                out[b, heads] = chosen.flatten(0, 1)
        return Partial(out, lse), counts

    def _choose(self, dots: torch.Tensor, rule: LogitRule, uniforms: np.random.Generator) -> torch.Tensor:
        """Corrected logits of products q·k [Hkv, G, N]."""
        logits = dots * rule.scale
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)

        def draws() -> torch.Tensor:
            return self._staging.to_device(torch.from_numpy(uniforms.random(tuple(logits.shape))))

        return self._pick(logits, self._budget, draws)
