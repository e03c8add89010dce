"""What is known of a model before its weights are read: enough to check every line and to plan memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from magicpig_cli.batch.parameters import chosen, identity
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.request import RequestMaker
from magicpig_cli.config import Settings
from magicpig_cli.engine.conversation import ChatCodec
from magicpig_cli.model import loader
from magicpig_cli.planner import Plan
from magicpig_cli.planning import plan_here


def without_weights(
    settings: Settings, source: JsonlSource, raw: bool, allow_outside_files: bool, announce: Callable[[], None]
) -> tuple[RequestMaker, Plan]:
    """Config, tokenizer and plan of the model that `settings` name.

    announce: called before this machine is measured, which happens once.
    Raises ModelError, ContextError, MemoryBudgetError or UsageError for what could not run.
    """
    loader.resolve_device(settings.model.device)
    config = loader.load_config(settings.model)
    loader.check_supported(config, settings.model.model)
    planned = plan_here(loader.load_shape(config, settings.model), settings, announce)
    generation_config = loader.load_generation_config(settings.model)
    tokenizer = loader.load_tokenizer(settings.model)
    meant = replace(settings, model=loader.settled(settings.model))
    maker = RequestMaker(
        codec=ChatCodec(tokenizer, config, generation_config, settings.model.chat_template),
        generation_config=generation_config,
        plan=planned,
        longest=settings.context or planned.shape.context,
        defaults=settings.generation,
        system=settings.system,
        raw=raw,
        directory=source.directory,
        allow_outside_files=allow_outside_files,
        identity=identity(meant, chosen(planned), raw),
    )
    return maker, planned
