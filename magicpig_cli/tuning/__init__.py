"""Choosing (K, L) and dense layers for one model on one machine, from what its own attention looks like on real text.

    text → capture (exact prefill, queries at several depths) → angles (histograms; quality of any (K, L) in closed form)
    → search (error × ms × bytes, dense layers) → verify (real tables, real steps) → held-out text

Nothing here prints: `tune` yields progress and returns a `Tuned`.
"""
