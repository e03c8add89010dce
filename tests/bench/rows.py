"""Bench documents made by hand: rows with the keys that reports, comparisons and plots read."""

from __future__ import annotations

from typing import Any

META: dict[str, Any] = {
    "version": "0.1.0", "commit": "a" * 40, "model": "tiny", "params": 1000, "dtype": "float32", "kv_dtype": "float32",
    "device": "cpu", "cpu": "A CPU", "isa": "avx2", "threads": 2, "torch": "2.6", "transformers": "5.20", "seed": 0,
    "sink": 4, "local": 64, "dense_layers": [0], "date": "2026-01-01T00:00:00+00:00", "complete": True,
}  # fmt: skip


def row(mode: str, context: int, repetitions: list[list[float]], batch: int = 1, **changes: Any) -> dict[str, Any]:
    """A row of these step times, by repetition."""
    samples = [ms for steps in repetitions for ms in steps]
    middle = sorted(samples)[len(samples) // 2]
    sampling = mode != "exact"
    whole = {
        "mode": mode, "context": context, "batch": batch, "fill": "tiled", "fill_fresh_positions": True,
        "prefilled_tokens": 512, "beyond_model_context": context > 8192,
        "K": 10 if sampling else None, "L": 150 if sampling else None,
        "gen_tokens": len(repetitions[0]), "reps": len(repetitions),
        "sampled_ratio": {"mean": 0.02, "p5": 0.01, "p95": 0.03, "per_layer": [None, 0.02]} if sampling else None,
        "tpot_ms": {"mean": sum(samples) / len(samples), "std": 0.5, "p50": middle, "p90": middle, "p99": max(samples)},
        "cv": 0.01, "decode_tok_s": batch * 1000 * len(samples) / sum(samples), "prefill_tok_s": 250.0, "ttft_s": None,
        "index_s": 0.5 if sampling else None,
        "stages_ms": {"dense": 1.0, "other": 2.0},
        "memory": {"kv_bytes": 10, "index_bytes": 5 if sampling else 0, "rss_bytes": 100, "vram_bytes": 0},
        "attn_error": {"p50": 0.03, "p90": 0.1, "rms": 0.05} if sampling else None,
        "speedup_vs_exact": 1.0, "conditions": {"steal": 0.0, "mhz": None}, "warnings": [], "samples_ms": samples,
    }  # fmt: skip
    return {**whole, **changes}


def steady(mean_ms: float, reps: int = 5, steps: int = 20) -> list[list[float]]:
    """Repetitions whose means differ by up to 1%, with steps that differ by up to 2%."""
    return [
        [mean_ms * (1 + 0.005 * (rep % 3 - 1)) * (1 + 0.02 * ((7 * step) % 11 - 5) / 5) for step in range(steps)]
        for rep in range(reps)
    ]
