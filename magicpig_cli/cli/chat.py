"""`magicpig chat`: one answer, or a conversation about long documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.options import AsJson, Quiet, command_options
from magicpig_cli.config import Settings
from magicpig_cli.errors import UsageError

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.events import Finished


@command_options("model", "attention", "generation", "system")
def chat(
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it, a terminal opens a conversation.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", metavar="PATH", help="Put a document into the first message; - is stdin."),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Chat with a model about long documents."""
    text = _single_prompt(prompt, file or [])
    if text is None and as_json:
        raise UsageError("--json prints one answer, but there is no question", hint='magicpig chat --json "…"')
    documents = _read_documents(file or [])

    from magicpig_cli.ui.loading import load_engine

    engine = load_engine(settings, quiet=quiet)
    if text is None:
        from magicpig_cli.ui.conversation import converse

        converse(engine, settings, documents, quiet=quiet)
        return
    finished = _one_turn(engine, settings, documents, text, as_json=as_json, quiet=quiet)
    if finished.reason == "interrupted":
        raise typer.Exit(130)


def _single_prompt(prompt: str | None, files: list[str]) -> str | None:
    """The one question of this run, from the argument or from stdin; None = hold a conversation."""
    if prompt is None and "-" not in files and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None:
        return None
    if not prompt.strip() and not files:
        raise UsageError("there is nothing to answer: the prompt is empty", hint='magicpig chat "Your question"')
    return prompt


def _read_documents(files: list[str]) -> list[tuple[str, str]]:
    """(name, text) of each -f; stdin at most once."""
    from magicpig_cli.engine.conversation import read_document

    if files.count("-") > 1:
        raise UsageError("-f - can be given once: stdin is read to its end", hint="give the other documents by path")
    return [("stdin", sys.stdin.read()) if name == "-" else (Path(name).name, read_document(name)) for name in files]


def _one_turn(
    engine: Engine, settings: Settings, documents: list[tuple[str, str]], text: str, *, as_json: bool, quiet: bool
) -> Finished:
    from magicpig_cli.engine.conversation import Conversation, document_message
    from magicpig_cli.ui import console
    from magicpig_cli.ui.answer import show_notices, statistics_line, stream_answer

    conversation = Conversation(engine.codec, settings.system)
    conversation.add_user(document_message(documents, text) if documents else text)
    sequence = engine.new_sequence()
    prompt_ids = conversation.prompt_ids()
    show_notices(engine, quiet=quiet)
    request = engine.request("chat", prompt_ids, settings.generation, sequence)
    finished = stream_answer(engine, request, show_text=not as_json, quiet=quiet)
    if as_json:
        print(json.dumps(answer_json(engine, sequence, finished), ensure_ascii=False))
    elif not quiet:
        console.say(statistics_line(finished))
    return finished


def answer_json(engine: Engine, sequence: Sequence, finished: Finished) -> dict[str, Any]:
    """The object of `chat --json` (CLI.md)."""
    import numpy as np

    tpot = np.array(finished.timing.tpot_ms)
    p50, p90, p99 = np.percentile(tpot, [50, 90, 99]).tolist() if tpot.size else (None, None, None)
    prefilled = finished.prompt_tokens - finished.reused_tokens
    timing = finished.timing
    return {
        "model": engine.model_name,
        "text": finished.text,
        "finish_reason": finished.reason,
        "usage": {
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": len(finished.token_ids),
            "reused_tokens": finished.reused_tokens,
        },
        "timing": {
            "load_s": engine.load_s,
            "ttft_s": timing.ttft_s,
            "prefill_tok_s": prefilled / timing.prefill_s if timing.prefill_s else None,
            "decode_tok_s": 1000 / float(tpot.mean()) if tpot.size else None,
            "tpot_ms": {"mean": float(tpot.mean()) if tpot.size else None, "p50": p50, "p90": p90, "p99": p99},
        },
        "attention": {
            **engine.attention_summary(),
            "sampled_ratio": finished.sampled_ratio,
            "segments": sequence.segments,
        },
        "memory": engine.memory(),
        "device": engine.device,
        "isa": engine.isa,
        "threads": engine.threads,
        "seed": finished.seed,
    }
