"""Choosing (K, L) and dense layers for one model on one machine, from what its own attention looks like on real text.

    text → capture (exact prefill, queries at several depths) → angles (histograms; any (K, L) in closed form)
    → search (error × ms × bytes, dense layers) → verify, steps (real tables, real steps) → the same on other text

Nothing here prints: `tune` yields progress and returns a `Tuned`.
"""
