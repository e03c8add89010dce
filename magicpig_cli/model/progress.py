"""What transformers, huggingface_hub and tqdm would draw or say on the terminal, as LoadProgress events and lines."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.utils import logging as hub_logging
from tqdm import tqdm
from transformers import modeling_gguf_pytorch_utils as gguf_utils
from transformers.utils import logging as transformers_logging

from magicpig_cli.errors import MagicpigError, ModelError
from magicpig_cli.events import LoadProgress

Report = Callable[[LoadProgress], None]


def ignore(_: LoadProgress) -> None:
    """For callers that want no progress."""


def one_line(problem: BaseException, most: int = 300) -> str:
    """What a library says in several lines, in one of at most `most` characters."""
    return " ".join(str(problem).split())[:most] or type(problem).__name__


def bar_class(stage: str, report: Report, unit: str | None = None) -> type[tqdm]:
    """A tqdm that reports instead of drawing, at most ten times a second.

    unit: bars that count something else stay silent. Of several bars at once only the furthest is reported, so that
    progress never runs backwards: the Hub shows received and written bytes in two bars.
    """
    furthest = 0

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm has no types
        monitor_interval = 0  # no thread that redraws

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # the Hub's own name for a kind of bar
            self._nowhere = open(os.devnull, "w")  # noqa: SIM115  closed with the bar
            super().__init__(*args, **{**kwargs, "disable": False, "file": self._nowhere, "mininterval": 0.1})

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal furthest
            if (unit is None or self.unit == unit) and self.n >= furthest:
                furthest = self.n
                report(LoadProgress(stage, int(self.n), int(self.total or 0)))
            return True

        def close(self) -> None:
            super().close()
            self._nowhere.close()

    return ReportingBar


@contextmanager
def forwarded(stage: str, report: Report) -> Iterator[None]:
    """Inside, transformers and the Hub write nothing; the bars of loading and GGUF reading become reports."""
    bar = bar_class(stage, report)
    verbosity = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    hook = transformers_logging.set_tqdm_hook(lambda _factory, args, kwargs: bar(*args, **kwargs))
    gguf_bar = vars(gguf_utils)["tqdm"]  # this module alone does not ask the hook
    vars(gguf_utils)["tqdm"] = bar
    transformers_logging.set_verbosity(logging.ERROR)
    hub_logging.set_verbosity(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity[0])
        hub_logging.set_verbosity(verbosity[1])
        transformers_logging.set_tqdm_hook(hook)
        vars(gguf_utils)["tqdm"] = gguf_bar


@contextmanager
def explaining(what: str) -> Iterator[None]:
    """Whatever a library raises becomes one line that says what was read, and what the library said."""
    try:
        with forwarded("loading", ignore):
            yield
    except (MagicpigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as problem:
        raise ModelError(f"cannot read {what}: {one_line(problem)}", hint="--debug shows where it failed") from problem
