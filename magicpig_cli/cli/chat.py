"""`magicpig chat`: one answer, or a conversation about long documents."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.options import AsJson, NoLive, Quiet, command_options
from magicpig_cli.config import Settings
from magicpig_cli.errors import INTERRUPTED, UsageError
from magicpig_cli.ui import console

_SILENT_S = 3.0

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
    no_live: NoLive = False,
    no_markdown: Annotated[
        bool, typer.Option("--no-markdown", help="Show answers on a terminal as the model writes them.")
    ] = False,
) -> None:
    """Chat with a model about long documents."""
    documents, stdin_taken = _read_documents(prompt, file or [])
    text = _one_question(prompt, documents, stdin_taken)
    if text is None and as_json:
        raise UsageError("--json prints one answer, but there is no question", hint='magicpig chat --json "…"')
    if text is None and not _is_terminal():
        raise UsageError("a conversation needs a terminal at stdin", hint='magicpig chat "Your question"')

    from magicpig_cli.ui.loading import load_engine

    engine = load_engine(settings, quiet=quiet)
    if text is None:
        from magicpig_cli.ui.chat.loop import converse

        converse(engine, settings, documents, quiet=quiet, live=not no_live, markdown=not no_markdown)
        return
    finished = _one_turn(
        engine, settings, documents, text, as_json=as_json, quiet=quiet, live=not no_live, markdown=not no_markdown
    )
    if finished.reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _one_question(prompt: str | None, documents: list[tuple[str, str]], stdin_taken: bool) -> str | None:
    """The one question of this run, from the argument or from stdin; None = hold a conversation."""
    from magicpig_cli.engine.conversation import document_text

    if prompt is None and not stdin_taken and sys.stdin is not None and not _is_terminal():
        typed = _stdin_bytes()
        prompt = document_text("stdin", typed) if typed.strip() else ""
    if prompt is None:
        # Documents alone, one of them from stdin: there is no terminal left to ask questions on.
        return "" if stdin_taken else None
    if not prompt.strip() and not documents:
        raise UsageError("there is nothing to answer: the prompt is empty", hint='magicpig chat "Your question"')
    return prompt


def _read_documents(prompt: str | None, files: list[str]) -> tuple[list[tuple[str, str]], bool]:
    """(name, text) of each -f, and of what is piped in beside a question; whether stdin was taken for it."""
    from magicpig_cli.engine.conversation import document_text, read_document

    if files.count("-") > 1:
        raise UsageError("-f - can be given once: stdin is read to its end", hint="give the other documents by path")
    documents = [
        ("stdin", document_text("stdin", _stdin_bytes())) if name == "-" else (Path(name).name, read_document(name))
        for name in files
    ]
    if prompt is not None and "-" not in files and _is_piped():
        piped = _stdin_bytes()
        if piped.strip():
            documents.append(("stdin", document_text("stdin", piped)))
    return documents, "-" in files


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _is_piped() -> bool:
    """Whether somebody put a pipe or a file at stdin: not a terminal, /dev/null or nothing at all."""
    if sys.stdin is None:
        return False
    kind = os.fstat(sys.stdin.fileno()).st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)


def _stdin_bytes() -> bytes:
    """All of stdin. Says so if nothing comes for a while: a pipe that nobody closes looks like a hang otherwise."""
    if sys.stdin is None:
        raise UsageError("stdin is closed", hint="give the text as an argument or with -f FILE")
    if not select.select([sys.stdin], [], [], _SILENT_S)[0]:
        console.say("waiting for stdin to end; </dev/null leaves it out")
    return sys.stdin.buffer.read()


def _one_turn(
    engine: Engine, settings: Settings, documents: list[tuple[str, str]], text: str, *, as_json: bool, quiet: bool,
    live: bool, markdown: bool,
) -> Finished:  # fmt: skip
    from magicpig_cli.engine.conversation import Conversation, document_message
    from magicpig_cli.ui.answer import Interrupts, show_notices, statistics_line, stream_answer
    from magicpig_cli.ui.answer_text import TextLook

    conversation = Conversation(engine.codec, settings.system)
    conversation.add_user(document_message(documents, text) if documents else text)
    sequence = engine.new_sequence()
    prompt_ids = conversation.prompt_ids()
    show_notices(engine, quiet=quiet)
    request = engine.request("chat", prompt_ids, settings.generation, sequence)
    finished = stream_answer(
        engine, request, Interrupts(), show_text=not as_json, quiet=quiet, live=live,
        look=TextLook(markdown, opened=conversation.opened_thinking),
    )  # fmt: skip
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
            # An answer that was interrupted before its first token has neither.
            "ttft_s": timing.ttft_s if finished.token_ids else None,
            "prefill_tok_s": prefilled / timing.prefill_s if finished.token_ids else None,
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
