"""What a run tells about itself: the object of `--json` and the manifest beside the answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import magicpig_cli
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.runner import Progress
from magicpig_cli.errors import UsageError

if TYPE_CHECKING:
    from magicpig_cli.engine.engine import Engine

State = Literal["running", "finished", "interrupted", "failed"]  # killed = "running", though nobody holds the lock
_COUNTS = ("total", "ok", "failed", "skipped", "prompt_tokens", "completion_tokens")


def summary(progress: Progress, batch_size: int, wall_s: float) -> dict[str, Any]:
    """The keys of CLI.md. `skipped` counts lines that an earlier run has answered: tokens are those of this run."""
    return {
        "total": progress.total,
        "ok": progress.ok,
        "failed": progress.failed,
        "skipped": progress.skipped,
        "prompt_tokens": progress.prompt_tokens,
        "completion_tokens": progress.completion_tokens,
        "wall_s": wall_s,
        "decode_tok_s": progress.decode_tok_s,
        "batch_size": batch_size,
        "peak_rss_bytes": _peak_rss_bytes(),
    }


def manifest(
    parameters: dict[str, Any], choices: dict[str, Any], source: JsonlSource, engine: Engine | None,
    summary: dict[str, Any], state: State, check_s: float,
) -> dict[str, Any]:  # fmt: skip
    """What ran, with what (`parameters.typed` and `parameters.chosen`), and how it went."""
    return {
        "version": magicpig_cli.__version__,
        "state": state,
        "model": parameters["model"]["model"] if engine is None else engine.model_name,
        "parameters": parameters,
        "chosen": choices,
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


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the run before. Raises UsageError where there is none, or none of ours."""
    try:
        content = json.loads(path.read_bytes())
        if all(isinstance(content[key], dict) for key in ("parameters", "chosen")):
            return dict(content)
        reason = "it has no parameters"
    except FileNotFoundError:
        reason = "it is not there"
    except OSError as problem:
        reason = str(problem.strerror)
    except (ValueError, KeyError, TypeError):
        reason = "it is no manifest of a batch"
    raise UsageError(
        f"{path} must say with what the output was made: {reason}",
        hint="--overwrite replaces the output, -o gives another place",
    )


def _peak_rss_bytes() -> int:
    """The most memory that this process has held."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux
