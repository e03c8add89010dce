"""A device scans its copies of signatures (docs/decisions/022): which rows reach the thresholds, as bits.

    host: look-up tables of the queries ──> device: scores, thresholds, bits ──> host: attends to rows that have a bit

All of it is integers, or floats that hold integers exactly, so a device takes the rows that the kernels would take, bit
for bit (`kernels.Lookup`). Nothing waits: sizes are known beforehand, as a bit per row needs no count and cannot
overflow. In plain torch: it runs on whatever torch has, and a CPU can test it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import embedding_bag

from magicpig_cli.cache.signatures_there import BlockThere
from magicpig_cli.config import SCAN_KEYS
from magicpig_cli.kernels import JITTER_ROWS, SIGNATURE_ROWS

_LEAST = torch.iinfo(torch.int16).min  # below every score


def scan(
    blocks: Sequence[BlockThere], lookup: Sequence[torch.Tensor], jitter: torch.Tensor, starts: Sequence[int],
    subset: torch.Tensor, longest: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Bits uint8 [H, n/8] of the rows that reach the thresholds, and these int32 [H].

    lookup: tables, lines, means and factor_scale of a `kernels.Lookup`, its subset, and the pool of jitter twice, int16
    [2·JITTER_ROWS], all on the device of the blocks; starts: the `Lookup`'s; longest: the largest size of a subset.

    A threshold that takes no row, or all, is for the host to know (`kernels.bounds_of`).
    """
    values = scores(blocks, lookup, jitter, starts)
    bounds = thresholds(values, subset, longest)
    return packed(values >= bounds[:, None]), bounds.int()


def scores(
    blocks: Sequence[BlockThere], lookup: Sequence[torch.Tensor], jitter: torch.Tensor, starts: Sequence[int]
) -> torch.Tensor:
    """int16 [H, n], as `kernels.rabitq_scores` has them."""
    tables, lines, means, factor_scale = lookup
    heads, kv_heads, nibbles = len(tables), len(factor_scale), tables.shape[1]
    group = heads // kv_heads
    lift, centre, share, of_jitter = (part.reshape(kv_heads, group, 1, 1) for part in lines.unbind(1))
    entries = _entries(tables.view(kv_heads, group, nibbles, 16), lift, centre)
    offsets = torch.arange(kv_heads * nibbles, dtype=torch.int32, device=tables.device) * 256
    offsets = offsets.view(kv_heads, 1, 1, nibbles)
    half = lines.new_full((1,), 1 << 14)  # of 2^15, by which products are divided: so they are rounded
    of_means = (means.to(torch.int32).bitwise_left_shift_(15) + half).view(kv_heads, group, -1, 1)
    out = torch.empty((kv_heads, group, means.shape[1], SIGNATURE_ROWS), dtype=torch.int16, device=tables.device)
    done, at_once = 0, max(1, min(SCAN_KEYS // kv_heads, JITTER_ROWS) // SIGNATURE_ROWS)
    for codes, factors in _pieces(blocks, at_once):
        cells = slice(done, done + len(codes))
        sums = _centred_sums(codes, entries, offsets, group)  # [Hkv, G, cells here, 256]
        shares = (factors * factor_scale[:, None]).round_().to(torch.int32).transpose(0, 1).unsqueeze(1)
        centred = torch.addcmul(half, sums, shares).bitwise_right_shift_(15)
        scored = torch.addcmul(of_means[:, :, cells], centred, share)  # below 2^30, as a score is below 2^15
        scored.bitwise_right_shift_(15)
        added = _jitter_of(cells, jitter, starts).to(torch.int32)
        scored += torch.addcmul(half, added, of_jitter).bitwise_right_shift_(15)
        out[:, :, cells] = scored
        done += len(codes)
    return out.view(heads, -1)


def _jitter_of(cells: slice, jitter: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """int16 [Hkv, 1, cells, 256]."""
    count = (cells.stop - cells.start) * SIGNATURE_ROWS
    firsts = [(start + cells.start * SIGNATURE_ROWS) % JITTER_ROWS for start in starts]
    return torch.stack([jitter[first : first + count] for first in firsts]).view(len(starts), 1, -1, SIGNATURE_ROWS)


def _entries(tables: torch.Tensor, lift: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    """What a byte of codes stands for: float32 [Hkv·nibbles·256, 2·G], the entries of its low nibble for each head,
    which are of one row, and those of its high one, which are of another; multiplied by the lift, and so that all
    nibbles together are centred. Of tables [Hkv, G, nibbles, 16]."""
    lifted = tables * lift
    lifted[:, :, :1] -= centre
    kv_heads, group, nibbles, _ = lifted.shape
    of_nibble = lifted.permute(0, 2, 3, 1).float()  # [Hkv, nibbles, 16, G]
    shape = (kv_heads, nibbles, 16, 16, group)  # high, low
    both = torch.stack([of_nibble[:, :, None].expand(shape), of_nibble[:, :, :, None].expand(shape)], dim=4)
    return both.view(-1, 2 * group)


def _pieces(blocks: Sequence[BlockThere], at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Codes and factors of so many cells at a time, the last time of fewer. What blocks are small stands together."""
    codes, factors, held = list[torch.Tensor](), list[torch.Tensor](), 0
    for block in blocks:
        first = 0
        while first < len(block.codes):
            last = min(len(block.codes), first + at_once - held)
            codes.append(block.codes[first:last])
            factors.append(block.factors[first:last])
            held, first = held + last - first, last
            if held == at_once:
                yield _together(codes), _together(factors)
                codes, factors, held = [], [], 0
    if codes:
        yield _together(codes), _together(factors)


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _centred_sums(codes: torch.Tensor, entries: torch.Tensor, offsets: torch.Tensor, group: int) -> torch.Tensor:
    """lift · Σ_j tables[j, c_j] − centre of each row: int32 [Hkv, G, cells, 256]; codes [cells, Hkv, 8, nibbles, 16].

    A sum has 15 bits and every part of it fewer than 24, so float32 is exact in any order.
    """
    cells, kv_heads, groups, nibbles, rows = codes.shape
    named = torch.empty((cells, kv_heads, groups, rows, nibbles), dtype=torch.int32, device=codes.device)
    torch.add(codes.transpose(3, 4), offsets, out=named)
    sums = embedding_bag(named.view(-1, nibbles), entries, mode="sum")
    out = torch.empty((kv_heads, group, cells, groups, 2, rows), dtype=torch.int32, device=codes.device)
    out.copy_(sums.view(cells, kv_heads, groups, rows, 2, group).permute(1, 5, 0, 2, 4, 3))
    return out.view(kv_heads, group, cells, -1)


def thresholds(values: torch.Tensor, subset: torch.Tensor, longest: int) -> torch.Tensor:
    """int16 [H]: of each head's scores int16 [H, n] the count-th largest of every stride-th (`Lookup.subset`)."""
    stride, size, count = (part[:, None] for part in subset.unbind(1))
    at = torch.arange(longest, device=values.device)
    picked = values.gather(1, (at * stride).clamp_max_(values.shape[1] - 1))
    picked.masked_fill_(at >= size, _LEAST)
    return picked.sort(dim=1, descending=True).values.gather(1, (count - 1).clamp_min_(0)).squeeze(1)


def packed(flags: torch.Tensor) -> torch.Tensor:
    """bool [H, n] as bits uint8 [H, n/8], lowest first; n a multiple of 8."""
    places = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return flags.view(torch.uint8).view(len(flags), -1, 8).bitwise_left_shift(places).sum(dim=2, dtype=torch.uint8)
