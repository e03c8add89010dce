"""Exact attention: prompt chunks over everything before them, and decode steps over the runs they see.

Chunks are matrix products and run in torch on every device, block by block, so that scores never grow with the
context. On the CPU the blocks go through torch's flash kernel, which also gives the LSE by which they are merged: 1.7×
as fast as the online softmax written in torch operations, which is left for soft caps, sliding windows and other
devices. (9/3 heads of 64 and 32/8 of 128, chunks of 512 after 4k tokens, 2 threads; one call over everything with a
mask gains 1.2×, and on bfloat16 queries and rows the kernel is no faster.)

A decode step reads each row once; on the CPU that is the streaming kernel over the rows where they lie, on another
device the rows are copied there, each block while the one before is multiplied (`cache.staging`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf

import torch

from magicpig_cli import kernels
from magicpig_cli.attention.base import LogitRule, Partial
from magicpig_cli.cache.layer import LayerCache
from magicpig_cli.cache.staging import Staging
from magicpig_cli.cache.store import as_array
from magicpig_cli.config import BLOCK_KEYS, FLASH_KEYS


def _logits(q: torch.Tensor, rows: torch.Tensor, rule: LogitRule) -> torch.Tensor:
    """[Hkv, R, n] of q [Hkv, R, D] and rows [Hkv, n, 2, D], all float32."""
    logits = torch.matmul(q, rows[:, :, 0].transpose(1, 2)).mul_(rule.scale)
    if rule.softcap is not None:
        logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
    return logits


class _OnlineSoftmax:
    """Running softmax(q·kᵀ)·v over blocks of keys. q: float32 [Hkv, R, D], the G heads of a group folded into rows."""

    def __init__(self, q: torch.Tensor, rule: LogitRule) -> None:
        self.q, self.rule = q, rule
        self.top = torch.full((*q.shape[:2], 1), -torch.inf, device=q.device)  # running maximum [Hkv, R, 1]
        self.total = torch.zeros_like(self.top)
        self.acc = torch.zeros_like(q)

    def add(self, rows: torch.Tensor, hidden: torch.Tensor | None = None) -> None:
        """rows: [Hkv, n, 2, D] of any float type; hidden: bool [R, n], True where a query must not see a key."""
        rows = rows.float()
        scores = _logits(self.q, rows, self.rule)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        top = torch.maximum(self.top, scores.amax(dim=-1, keepdim=True))
        base = top.masked_fill(torch.isneginf(top), 0.0)  # a row that has seen no key yet
        shrink = torch.exp(self.top - base)
        weights = scores.sub_(base).exp_()
        self.total = self.total * shrink + weights.sum(dim=-1, keepdim=True)
        self.acc = (self.acc * shrink).baddbmm_(weights, rows[:, :, 1])
        self.top = top

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """out float32 [Hkv, R, D] and LSE float32 [Hkv, R]."""
        seen = self.total.clamp_min(torch.finfo(torch.float32).tiny)
        return self.acc / seen, (self.top + torch.log(seen)).squeeze(-1)


def attend_chunk(
    q: torch.Tensor, rows: torch.Tensor, history: Iterable[tuple[int, torch.Tensor]], first: int, rule: LogitRule,
    window: int | None, staging: Staging,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of a prompt chunk to its history and itself (prefill).

    q: [H, T, D]; rows: the chunk's own [Hkv, T, 2, D]; history: (first position, rows [Hkv, n, 2, D]) pieces, where
    q is; first: position of the chunk's first token; window: keys a query sees, itself included (None = all).
    Returns [T, H, D] in q's dtype.
    """
    in_sight = window is None or first + q.shape[1] <= window
    # Not one token alone: the flash kernel splits a single row by the number of threads, which the result then shows.
    if staging.on_host and rule.softcap is None and in_sight and q.shape[1] > 1:
        return _attend_chunk_flash(q, rows, history, rule.scale)
    heads, count, dim = q.shape
    kv_heads = rows.shape[0]
    softmax = _OnlineSoftmax(q.reshape(kv_heads, -1, dim).float(), rule)
    positions = torch.arange(first, first + count, device=q.device)
    group = heads // kv_heads

    def hidden(start: int, stop: int) -> torch.Tensor:
        keys = torch.arange(start, stop, device=q.device)
        mask = keys > positions[:, None]
        if window is not None:
            mask |= keys <= positions[:, None] - window
        return mask.repeat(group, 1)

    for start, piece in _blocks(history):
        stop = start + piece.shape[1]
        if window is not None and stop <= first - window + 1:
            continue  # out of sight even for the chunk's first token
        partly = window is not None and start <= first + count - 1 - window
        softmax.add(piece, hidden(start, stop) if partly else None)
    for offset in range(0, count, BLOCK_KEYS):
        stop = min(offset + BLOCK_KEYS, count)
        softmax.add(rows[:, offset:stop], hidden(first + offset, first + stop))
    out, _ = softmax.result()
    return out.reshape(heads, count, dim).transpose(0, 1).to(q.dtype)


def _blocks(pieces: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, torch.Tensor]]:
    """Pieces cut to BLOCK_KEYS rows at most."""
    for start, piece in pieces:
        for offset in range(0, piece.shape[1], BLOCK_KEYS):
            yield start + offset, piece[:, offset : offset + BLOCK_KEYS]


def _attend_chunk_flash(
    q: torch.Tensor, rows: torch.Tensor, history: Iterable[tuple[int, torch.Tensor]], scale: float
) -> torch.Tensor:
    """attend_chunk on the CPU, without soft cap, where every query sees all of the history."""
    heads, count, dim = q.shape
    kv_heads = rows.shape[0]
    grouped = q.float().contiguous().view(kv_heads, heads // kv_heads, count, dim)
    folded = grouped.view(kv_heads, 1, -1, dim)  # where nothing is hidden the heads of a group are just more rows
    out, lse = _flash(grouped, rows.float(), scale, causal=True)
    out, lse = out.reshape(folded.shape), lse.reshape(folded.shape[:-1])
    for block in _float_blocks(history, rows.shape):
        part, part_lse = _flash(folded, block, scale)
        both = torch.logaddexp(lse, part_lse)
        out.mul_(torch.exp(lse - both).unsqueeze(-1)).addcmul_(part, torch.exp(part_lse - both).unsqueeze(-1))
        lse = both
    return out.view(heads, count, dim).transpose(0, 1).to(q.dtype)


def _flash(
    q: torch.Tensor, rows: torch.Tensor, scale: float, *, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's flash kernel: q [Hkv, X, R, D], rows [Hkv, n, 2, D], float32 → out [Hkv, X, R, D], LSE [Hkv, X, R]."""
    k, v = (part.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for part in rows.unbind(dim=2))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _float_blocks(history: Iterable[tuple[int, torch.Tensor]], shape: torch.Size) -> Iterator[torch.Tensor]:
    """The pieces' rows as float32 [Hkv, FLASH_KEYS, 2, D], the last block shorter; valid until the next is taken.

    Cut anew, as a piece may be four rows long, and always in the same memory, whose page faults are paid once.
    """
    buffer = torch.empty(shape[0], FLASH_KEYS, *shape[2:])
    filled = 0
    for _, piece in history:
        while piece.shape[1]:
            taken = min(FLASH_KEYS - filled, piece.shape[1])
            buffer[:, filled : filled + taken] = piece[:, :taken]
            piece = piece[:, taken:]
            filled += taken
            if filled == FLASH_KEYS:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:, :filled]


def _visible(cache: LayerCache, store_from: int) -> Iterator[torch.Tensor]:
    """Rows that the newest token sees, on the device; of the store those from `store_from` on."""
    first = cache.first_visible()
    for start, piece in cache.pieces_there(max(store_from, min(cache.store.length, first - cache.shape.sink))):
        if start + piece.shape[1] > first:
            yield piece[:, max(0, first - start) :]


def attend_step(
    q: torch.Tensor, caches: list[LayerCache], store_from: list[int], rule: LogitRule, threads: int, staging: Staging
) -> Partial:
    """Attention of one new token per sequence (decode).

    q: float32 [B, H, D]; of what the token sees in the store of sequence b, only rows from store_from[b] on.
    """
    if staging.on_host:
        runs = [cache.runs(start) for cache, start in zip(caches, store_from, strict=True)]
        done = kernels.exact_attend(as_array(q), runs, scale=rule.scale, softcap=rule.softcap, threads=threads)
        return Partial(torch.from_numpy(done.out), torch.from_numpy(done.lse))
    parts = [_see_all(row, cache, start, rule) for row, cache, start in zip(q, caches, store_from, strict=True)]
    return _stacked(parts, q)


def attend_near(q: torch.Tensor, caches: list[LayerCache], windows_only: SequenceOf[bool], rule: LogitRule) -> Partial:
    """Attention of one new token per sequence, on the device: q float32 [B, H, D].

    windows_only[b]: sequence b attends to its window alone, else to everything it sees.
    """
    parts = [
        _see_window(row, cache, rule) if only else _see_all(row, cache, 0, rule)
        for row, cache, only in zip(q, caches, windows_only, strict=True)
    ]
    return _stacked(parts, q)


def _see_all(
    row: torch.Tensor, cache: LayerCache, store_from: int, rule: LogitRule
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and LSE of one token [H, D]; of what it sees in the store only rows from `store_from` on."""
    softmax = _OnlineSoftmax(row.reshape(cache.spec.kv_heads, -1, row.shape[-1]), rule)
    for piece in _visible(cache, store_from):
        softmax.add(piece)
    return softmax.result()


def _see_window(row: torch.Tensor, cache: LayerCache, rule: LogitRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of its window, where it is itself; in few operators: giving them may take longer than computing them."""
    rows = cache.window.valid.float()
    logits = _logits(row.reshape(rows.shape[0], -1, row.shape[-1]), rows, rule)
    lse = logits.logsumexp(dim=-1, keepdim=True)
    return torch.matmul(logits.sub_(lse).exp_(), rows[:, :, 1]), lse.squeeze(-1)


def _stacked(parts: list[tuple[torch.Tensor, torch.Tensor]], q: torch.Tensor) -> Partial:
    """out and LSE of each sequence as those of q [B, H, D]."""
    outs, sums = (torch.stack(each) for each in zip(*parts, strict=True))
    return Partial(outs.view(q.shape), sums.view(q.shape[:2]))
