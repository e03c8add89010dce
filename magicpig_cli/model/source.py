"""Where a model is: on the Hub, in a directory, in a GGUF file or the demo wheel, and where its converted copy lies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from magicpig_cli.config import APP_NAME, ModelOptions
from magicpig_cli.errors import ModelError
from magicpig_cli.model import demo, gguf, gguf_header
from magicpig_cli.model.as_stored import InFile, linear_layers
from magicpig_cli.model.name import model_name


@dataclass(frozen=True)
class Source:
    """Where a model is. Either `folder` or `gguf` (not converted yet) or both (converted) are set."""

    name: str
    folder: Path | None
    gguf: Path | None = None
    revision: str | None = None


def cache_folder() -> Path:
    """Where converted models are kept."""
    return platformdirs.user_cache_path(APP_NAME)


def locate(options: ModelOptions, fetch: Callable[[], Path]) -> Source:
    """Find out which form `options.model` has; `fetch` brings a Hub model's files into a folder. Raises ModelError."""
    if (file := gguf_file(options)) is not None:
        return _gguf_source(file, options)
    path = Path(options.model).expanduser()
    if path.is_dir():
        return Source(model_name(options.model), path)
    if path.is_file():
        return _config_file_source(path, options)
    if _looks_like_a_path(options.model):
        raise ModelError(f"there is no file or directory {path}", hint="a Hub id looks like owner/name")
    folder = fetch()
    return Source(options.model, folder, revision=folder.name)


def gguf_file(options: ModelOptions) -> Path | None:
    """The GGUF file that `options.model` is; None if it has another form. Raises ModelError if it is not there."""
    if options.model == "demo":
        return demo.wheel_file()
    path = Path(options.model).expanduser()
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise ModelError(f"there is no file {path}", hint="give the path of a .gguf file, or a Hub id")
    return path


def linear_in_file(options: ModelOptions) -> InFile | None:
    """Linear layers as the GGUF file of a model stores them, whether it was converted before or not.

    None for models of other forms, and where weights are random. Raises ModelError.
    """
    file = None if options.load_format == "dummy" else gguf_file(options)
    return None if file is None else linear_layers(gguf_header.tensors(file))


def _looks_like_a_path(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~")) or text.count("/") > 1 or text.endswith(".json")


def _gguf_source(path: Path, options: ModelOptions) -> Source:
    converted = converted_folder(options, path)
    revision = converted.name if options.model == "demo" else gguf.fingerprint(path)
    return Source(model_name(options.model), converted if converted.is_dir() else None, path, revision)


def converted_folder(options: ModelOptions, path: Path) -> Path:
    """The demo's copy survives a new environment: it is known by its version, other files by path, size and time."""
    if options.model == "demo":
        return cache_folder() / "demo" / demo.version()
    return cache_folder() / "gguf" / f"{path.stem}-{gguf.fingerprint(path)}"


def _config_file_source(path: Path, options: ModelOptions) -> Source:
    if path.suffix != ".json" or options.load_format != "dummy":
        raise ModelError(
            f"{path} is a file, not a model",
            hint="give the directory, or a .gguf file; bench --load-format dummy takes a config.json",
        )
    return Source(model_name(options.model), path)
