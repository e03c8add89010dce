"""What a sampler is expected to do on real text, before anything is read: share of keys, and error of attention."""

from __future__ import annotations

import numpy as np

from magicpig_cli.attention.estimator import inclusion_probability

# Angles between queries and centred keys, θ/π: a normal distribution that gives the four sampled ratios of EVIDENCE.md
# section 1 within 3% (demo model at 8k: 8.1, 7.0, 4.5 and 5.4% for (8, 75), (9, 120), (10, 150) and (11, 300)).
ANGLE_MEAN, ANGLE_SPREAD = 0.5075, 0.065
_NODES = 41

# Relative error of one attention output, RMS, and the share of keys at which it was measured (EVIDENCE.md section 2):
# tables (10, 150) 0.059 at 3.8%, where 6.5% of (9, 120) halve the KL, which goes with the square of the error;
# signatures of 128 bits 0.036 at 2% by a threshold and a tail; with jitter 0.74 of that. Powers are within 15% of
# what was measured with 64 to 256 bits and at 0.5 to 8% (docs/decisions/024).
_TABLES = (0.059, 0.038, 0.43)  # error, share, power
_SIGNATURES = (0.027, 0.02, 0.85)
_SIGNATURE_BITS = (128, 0.2)  # bits, power


def expected_ratio(K: int, L: int) -> float:
    """Share of the offloaded keys that tables of (K, L) are expected to sample on real text."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    angles = np.clip(ANGLE_MEAN + ANGLE_SPREAD * nodes, 0.0, 1.0)
    return float(weights @ inclusion_probability(np.cos(np.pi * angles), K, L) / weights.sum())


def expected_table_error(ratio: float) -> float:
    """Relative error of attention with tables that sample this share of the keys: a guide, 0.05 for (10, 150)."""
    error, share, power = _TABLES
    return float(error * (share / ratio) ** power)


def budget_for(error: float, bits: int) -> float:
    """Of signatures, with which they are expected to err so much."""
    at, share, power = _SIGNATURES
    known, bits_power = _SIGNATURE_BITS
    return min(1.0, float(share * (at * (known / bits) ** bits_power / error) ** (1 / power)))


def expected_signature_error(budget: float, bits: int) -> float:
    """The same of signatures; 0 where everything is read."""
    error, share, power = _SIGNATURES
    known, bits_power = _SIGNATURE_BITS
    return 0.0 if budget >= 1 else error * (share / budget) ** power * (known / bits) ** bits_power
