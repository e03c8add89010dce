"""The jitter of scores: exponential, so that keys are taken with a probability that goes with their weight.

A key whose estimated logit ŝ lies x below the threshold is taken with probability exp(−x): ŝ + E reaches it, E of an
exponential distribution with mean 1 (docs/decisions/024). All E come from one pool: keys of a kv head take it in the
order of their rows from a place of their own on, so that nothing is drawn, kept or read from memory per key.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from magicpig_cli.kernels.signature_shape import JITTER_NATS, JITTER_ROWS, SIGNATURE_GROUP, TOP_SCORE

_ALL = 2**64 - 1


@lru_cache(maxsize=1)
def jitter_pool() -> np.ndarray:
    """The pool, int16 [JITTER_ROWS], in units of JITTER_NATS / TOP_SCORE: quantiles of the distribution, shuffled by a
    hash of their ranks."""
    ranks = np.argsort(_mixed(np.arange(1, JITTER_ROWS + 1, dtype=np.uint64)), kind="stable")
    nats = -np.log((ranks + 0.5) / JITTER_ROWS)
    pool: np.ndarray = np.rint(nats * (TOP_SCORE / JITTER_NATS)).astype(np.int16)
    pool.flags.writeable = False
    return pool


def jitter_start(key: tuple[int, int], kv_head: int) -> int:
    """Where row 0 of a kv head takes its jitter from; key: (hash seed, layer). The first row of a group of rows."""
    return int(_mixed(np.uint64(head_seed(key, kv_head)))) % JITTER_ROWS // SIGNATURE_GROUP * SIGNATURE_GROUP


def head_seed(key: tuple[int, int], kv_head: int) -> int:
    """64 bits for the draws of a kv head: jitter and uniform tail."""
    seed = key[0]
    for part in (key[1], kv_head):
        seed = int(_mixed(np.uint64((seed + (part + 1) * 0x9E3779B97F4A7C15) & _ALL)))
    return seed


def _mixed(x: np.ndarray | np.uint64) -> np.ndarray:
    """The finaliser of SplitMix64."""
    x = np.asarray(x, dtype=np.uint64)
    with np.errstate(over="ignore"):  # products modulo 2⁶⁴
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    return x ^ x >> np.uint64(31)
