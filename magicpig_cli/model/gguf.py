"""GGUF files: converted once to safetensors in the cache directory, then loaded like any other folder.

transformers spends 20 s on dequantising 135M parameters, and 5 s on the vocabulary; the converted copy loads in 1–3 s
(EVIDENCE.md section 3). Weights are kept as float32: dequantised values have more bits than a bfloat16.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.errors import ModelError
from magicpig_cli.events import LoadProgress
from magicpig_cli.model import weights
from magicpig_cli.model.progress import Report, forwarded, one_line
from magicpig_cli.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_FORMAT = 1  # raise when converted folders of older versions must not be used
_MAGIC = b"GGUF"
_PART_NAME = re.compile(r"-(\d{5})-of-(\d{5})$")  # of a file that was split, before its suffix
_LEFT_BEHIND_S = 24 * 3600  # a temporary folder of that age belongs to a process that was killed
_STAGE = "converting the GGUF file, once"


def fingerprint(path: Path) -> str:
    """Changes when the file does."""
    stat = path.stat()
    text = f"{_FORMAT}\n{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(path: Path) -> None:
    """Raise ModelError if this cannot be read as GGUF here."""
    weights.refuse_pointer(path)
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ModelError(f"{path} is not a GGUF file", hint="download it again")
    part = _PART_NAME.search(path.stem)
    if part and int(part[2]) > 1:
        first, whole = (path.with_name(path.name.replace(part[0], by)) for by in (f"-00001-of-{part[2]}", ""))
        raise ModelError(
            f"{path} is part {int(part[1])} of {int(part[2])} of a GGUF file; only whole ones can be read",
            hint=f"llama-gguf-split --merge {first} {whole}",
        )
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"reading a GGUF file needs the package {' and '.join(missing)}", hint="pip install 'magicpig-cli[gguf]'"
        )


@contextmanager
def readable(path: Path) -> Iterator[dict[str, Any]]:
    """Arguments for transformers' from_pretrained; what it raises on this file becomes a ModelError."""
    check(path)
    try:
        yield {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name, "local_files_only": True}
    except MemoryError:
        raise
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno is not None:
            raise  # a full disk, say, has nothing to do with the file
        raise ModelError(
            f"cannot read {path}: {one_line(problem)}",
            hint="download it again; if its architecture is not known as GGUF, use the model's safetensors form",
        ) from problem


def read_config(path: Path) -> PretrainedConfig:
    """The config inside the file, without weights."""
    from transformers import AutoConfig

    with readable(path) as source:
        config: PretrainedConfig = AutoConfig.from_pretrained(**source)
        return config


def read_tokenizer(path: Path, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer inside the file, chat template included. config: what `read_config` gave for it."""
    from transformers import AutoTokenizer

    with readable(path) as source:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**source)
    for name in ("bos", "eos", "pad"):  # transformers 5.17 takes another token than the file says for the end token
        if (token := getattr(config, f"{name}_token_id", None)) is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    return tokenizer


def convert(path: Path, config: PretrainedConfig, target: Path, report: Report) -> None:
    """Make `target` a folder with config, tokenizer and float32 safetensors of the GGUF file, unless it is there.

    config: what `read_config` gave for it.

    The folder appears whole or not at all: written beside its place, then renamed. Two processes at once both succeed.
    Raises ModelError if the file cannot be read or the disk is too full.
    """
    if target.is_dir():
        return
    report(LoadProgress(_STAGE))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_behind(target.parent)
        temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent))
    except OSError as problem:
        raise _not_written(target, problem) from problem
    try:
        _write(path, config, temporary, report)
        _publish(temporary, target)
    except OSError as problem:
        raise _not_written(target, problem) from problem
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _not_written(target: Path, problem: OSError) -> ModelError:
    return ModelError(
        f"cannot write the converted model to {target}: {problem.strerror or problem}",
        hint="free space there, or set XDG_CACHE_HOME to another place",
    )


def _remove_left_behind(folder: Path) -> None:
    for old in folder.glob("*.tmp"):
        if time.time() - old.stat().st_mtime > _LEFT_BEHIND_S:
            shutil.rmtree(old, ignore_errors=True)


def _publish(temporary: Path, target: Path) -> None:
    try:
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():  # if it is, another process was faster
            raise


def _write(path: Path, config: PretrainedConfig, folder: Path, report: Report) -> None:
    import torch
    from huggingface_hub import save_torch_state_dict
    from transformers import AutoModelForCausalLM

    _check_space(folder, config)
    tokenizer = read_tokenizer(path, config)
    with forwarded(_STAGE, report), readable(path) as source:
        model = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
    report(LoadProgress("writing the converted model"))
    # save_pretrained refuses on a model that came from GGUF: write its parts.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_torch_state_dict(_untied(model.state_dict()), folder)


def _untied(state: dict[str, Any]) -> dict[str, Any]:
    """One name per tensor, the first (the embedding of a tied pair), as publishers write it."""
    kept: dict[int, str] = {}
    for name, tensor in state.items():
        kept.setdefault(tensor.data_ptr(), name)
    return {name: state[name] for name in kept.values()}


def _check_space(folder: Path, config: PretrainedConfig) -> None:
    from magicpig_cli.model.shape import shape_from_config

    need = int(shape_from_config(config).params * 4 * 1.05)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ModelError(
            f"converting needs {format_bytes(need)} in {folder.parent}, and {format_bytes(free)} are free",
            hint="free space there, or set XDG_CACHE_HOME to another place",
        )
