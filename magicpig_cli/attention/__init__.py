"""Exact and LSH-sampled attention, and the estimator's formulas."""
