"""Single questions to a tiny random model, in conversations and with documents that are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path

from magicpig_cli.cli.one_turn import OneTurn
from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.prompt_cache import PromptCache
from magicpig_cli.sessions import Sessions

GREEDY = GenerationOptions(max_tokens=6, temperature=0.0)
BOOK = "".join(f"{n}: the ferry number {n * 7} leaves from pier {n % 5}.\n" for n in range(60))


def load(directory: Path, **attention) -> Engine:
    options = AttentionOptions(**{"mode": "lsh", "kv_dtype": "float32", **attention})
    model = ModelOptions(str(directory), device="cpu", dtype="float32")
    return Engine.load(Settings(model, options, GREEDY, threads=1))


class Said(list):
    """What was said and warned of."""

    def sessions(self, **how) -> Sessions:
        return Sessions(self.append, self.append, **how)

    def cache(self, path: Path, engine: Engine) -> PromptCache:
        return PromptCache(path, engine, self.append, self.append)


def turn(engine: Engine) -> OneTurn:
    return OneTurn(engine, Settings(generation=GREEDY))


def ask(one: OneTurn, text: str, documents=(), cache: PromptCache | None = None):
    with contextlib.nullcontext() if cache is None else cache:
        return one.answer(list(documents), text, cache, show_text=False, quiet=True, live=False, markdown=False)
