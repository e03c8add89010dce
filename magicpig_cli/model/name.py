"""What a model is called, from what the user typed, without opening it."""

from __future__ import annotations

import os
from pathlib import Path


def model_name(typed: str) -> str:
    """Hub id, `demo`, or the name of a directory or file (of a config.json: its directory's)."""
    path = Path(os.path.expanduser(typed))
    if typed == "demo":
        return typed
    if path.suffix == ".gguf":
        return path.stem
    if path.is_dir():
        return path.resolve().name
    if path.is_file():
        return path.parent.resolve().name if path.stem == "config" else path.stem
    return typed
