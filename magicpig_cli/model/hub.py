"""Files of a model on the Hub: into its cache, or found there. What goes wrong becomes a line and a hint (CASES 26)."""

from __future__ import annotations

import errno
from pathlib import Path

from huggingface_hub import constants, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CacheNotFound,
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from magicpig_cli.config import ModelOptions
from magicpig_cli.errors import ModelError
from magicpig_cli.model import weights
from magicpig_cli.model.progress import Report, bar_class, forwarded, one_line

CONFIG_FILES = ("config.json", "*.py")  # Python files are only run with --trust-remote-code
TEXT_FILES = (
    *CONFIG_FILES, "generation_config.json", "tokenizer*", "*.model", "vocab*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "*.tiktoken", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
_STAGE = "downloading"
_CACHED_SHOWN = 6


def is_offline(options: ModelOptions) -> bool:
    """Asked for by option or by the Hub's own environment variable."""
    return options.offline or bool(constants.HF_HUB_OFFLINE)


def fetch(options: ModelOptions, patterns: tuple[str, ...], report: Report) -> Path:
    """Folder of the revision's snapshot that holds the files matching `patterns`, as far as the model has any.

    Raises ModelError.
    """
    offline = is_offline(options)
    try:
        with forwarded(_STAGE, report):
            folder = snapshot_download(
                options.model, revision=options.revision, allow_patterns=list(patterns), local_files_only=offline,
                ignore_patterns=None if any("/" in p for p in patterns) else ["*/*"],
                tqdm_class=bar_class(_STAGE, report, unit="B"),
            )  # fmt: skip
    except LocalEntryNotFoundError as problem:
        # A snapshot may lack files that nobody needs; whoever needs one looks for it.
        partial = getattr(problem, "snapshot_path", None)
        if partial is None:
            raise _not_cached(options, offline) from problem
        return Path(partial)
    except Exception as problem:
        raise _explained(options, problem) from problem
    return Path(folder)


def fetch_weights(options: ModelOptions, report: Report) -> Path:
    """Like `fetch`, for config, tokenizer and one form of the weights: safetensors where there is a choice."""
    folder = fetch(options, (*TEXT_FILES, *weights.INDEX_FILES), report)
    # The text files' snapshot names the commit: a branch that moves meanwhile cannot mix two versions.
    pinned = ModelOptions(model=options.model, revision=folder.name, offline=options.offline)
    for name in () if weights.names_in(folder) else weights.SINGLE_FILES:
        folder = fetch(pinned, (name,), report)
        if (folder / name).exists():
            return folder
    missing = [name for name in weights.names_in(folder) if not (folder / name).exists()]
    return fetch(pinned, tuple(missing), report) if missing else folder


def _not_cached(options: ModelOptions, offline: bool) -> ModelError:
    cached = cached_models()
    shown = ", ".join(cached[:_CACHED_SHOWN]) + (" …" if len(cached) > _CACHED_SHOWN else "")
    there = f"the cache holds {shown}" if cached else "the Hub cache is empty"
    what = options.model + (f" at revision {options.revision}" if options.revision else "")
    if offline:
        return ModelError(
            f"{what} is not on this machine, and offline nothing is fetched",
            hint=f"run once without --offline and HF_HUB_OFFLINE, or use -m demo; {there}",
        )
    return ModelError(
        f"the Hub cannot be reached, and {what} is not on this machine",
        hint=f"check the connection, or use -m demo; {there}",
    )


def cached_models() -> list[str]:
    """Ids of models of which at least some files are in the Hub cache."""
    try:
        return sorted(
            repo.repo_id for repo in scan_cache_dir(constants.HF_HUB_CACHE).repos if repo.repo_type == "model"
        )
    except CacheNotFound:
        return []


def _explained(options: ModelOptions, problem: Exception) -> ModelError:
    """What the Hub or the disk refused, in words. GatedRepoError is a kind of RepositoryNotFoundError."""
    page = f"{constants.ENDPOINT}/{options.model}"
    if isinstance(problem, GatedRepoError):
        return ModelError(
            f"{options.model} is gated: its licence has to be accepted before it can be fetched",
            hint=f"accept it at {page}, then set HF_TOKEN to a token of that account (or run `hf auth login`)",
        )
    if isinstance(problem, RevisionNotFoundError):
        return ModelError(f"{options.model} has no revision {options.revision}", hint=f"branches and tags: {page}/refs")
    if isinstance(problem, RepositoryNotFoundError):
        return ModelError(
            f"there is no model {options.model} on the Hub, or it is private",
            hint="check the spelling; for a private model set HF_TOKEN (or run `hf auth login`)",
        )
    if isinstance(problem, DisabledRepoError):
        return ModelError(f"{options.model} has been disabled on the Hub", hint=f"see {page}")
    if isinstance(problem, OfflineModeIsEnabled):
        return _not_cached(options, offline=True)
    if isinstance(problem, HFValidationError):
        return ModelError(
            f"{options.model!r} is neither a Hub id nor a file or directory here",
            hint="a Hub id looks like owner/name; demo is the model that needs no download",
        )
    if isinstance(problem, OSError) and problem.errno == errno.ENOSPC:
        return ModelError(
            f"the disk is full: {options.model} does not fit into {constants.HF_HUB_CACHE}",
            hint="free space there, or set HF_HOME to another disk",
        )
    status = f"HTTP status {problem.response.status_code}" if isinstance(problem, HfHubHTTPError) else None
    return ModelError(
        f"fetching {options.model} failed: {status or one_line(problem)}",
        hint="try again; --offline uses what is cached",
    )
