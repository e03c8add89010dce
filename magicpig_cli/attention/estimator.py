"""Inclusion probability and weights of the LSH estimator in float64 (paper section 4; DESIGN.md). No torch."""

from __future__ import annotations

import numpy as np

FLOOR = 1e-30
CELLS = 4096


def inclusion_probability(cos, K, L):
    cos = np.clip(np.asarray(cos, dtype=np.float64), -1.0, 1.0)
    p = (1.0 - np.arccos(cos) / np.pi) ** K
    q = np.minimum(p, 1 - 2.0**-53)
    with np.errstate(divide="ignore", under="ignore"):
        log_miss = np.log1p(-q)
        closed = -np.expm1(L * log_miss) - L * p * np.exp((L - 1) * log_miss)
        term = L * (L - 1) / 2 * p**2 * np.exp((L - 2) * log_miss)
        series = term.copy()
        for j in range(2, min(L, 24)):
            term = term * (L - j) / (j + 1) * p / (1 - q)
            series += term
    return np.clip(np.where(L * p < 0.1, series, np.where(p >= 1, 1.0, closed)), FLOOR, 1.0)


def log_weight_table(K, L, cells=CELLS):
    s = np.linspace(0.0, 1.0, cells + 1)
    return -np.log(inclusion_probability(1 - 2 * s * s, K, L)).astype(np.float32)
