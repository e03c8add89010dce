"""What a run tells about itself: the object of `--json` and the manifest beside the answers."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import magicpig_cli
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.runner import Progress
from magicpig_cli.config import Settings

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine

_COUNTS = ("total", "ok", "failed", "skipped", "prompt_tokens", "completion_tokens")


def summary(progress: Progress, batch_size: int, wall_s: float) -> dict[str, Any]:
    """The keys of CLI.md. `skipped` counts lines that an earlier run has answered: none without resuming."""
    return {
        "total": progress.total,
        "ok": progress.ok,
        "failed": progress.failed,
        "skipped": 0,
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.completion_tokens,
        "wall_s": wall_s,
        "decode_tok_s": progress.decode_tok_s,
        "batch_size": batch_size,
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def manifest(
    settings: Settings, options: dict[str, Any], source: JsonlSource, engine: Engine | None,
    summary: dict[str, Any], state: str, check_s: float,
) -> dict[str, Any]:  # fmt: skip
    """What ran, with what, and how it went. `state`: running, finished, interrupted or failed."""
    return {
        "version": magicpig_cli.__version__,
        "state": state,
        "model": settings.model.model if engine is None else engine.model_name,
        "parameters": {**dataclasses.asdict(settings), **options},
        "input": {"path": str(source.path or "-"), "sha256": source.sha256},
        "counts": {key: summary[key] for key in _COUNTS},
        "timings": {
            "check_s": check_s,
            "load_s": 0.0 if engine is None else engine.load_s,
            "wall_s": summary["wall_s"],
            "decode_tok_s": summary["decode_tok_s"],
        },
        "batch_size": summary["batch_size"],
    }


def _peak_rss_bytes() -> int:
    """The most memory that this process has held."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
