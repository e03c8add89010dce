"""`magicpig chat`: one answer, or a conversation about long documents."""

from __future__ import annotations

import contextlib
import json
import os
import select
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magicpig_cli.cli.options import AsJson, NoLive, Quiet, command_options
from magicpig_cli.config import Settings
from magicpig_cli.errors import INTERRUPTED, UsageError
from magicpig_cli.ui import console

_SILENT_S = 3.0
_KEEPING = "Another day"  # of --help

if TYPE_CHECKING:
    from magicpig_cli.cache.sequence import Sequence
    from magicpig_cli.engine.engine import Engine
    from magicpig_cli.events import Finished


@command_options("model", "attention", "generation", "system")
def chat(
    invocation: typer.Context,
    settings: Settings,
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it, a terminal opens a conversation.")
    ] = None,
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", metavar="PATH", help="Put a document into the first message; - is stdin."),
    ] = None,
    as_json: AsJson = False,
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            rich_help_panel=_KEEPING,
            help="Begin a conversation that is kept under this name, or go on with it (with its model unless -m "
            "is given).",
        ),
    ] = None,
    continue_: Annotated[
        bool,
        typer.Option(
            "--continue",
            rich_help_panel=_KEEPING,
            help="Go on with the session that was used last, with its model unless -m is given.",
        ),
    ] = False,
    session_text_only: Annotated[
        bool,
        typer.Option(
            "--session-text-only",
            rich_help_panel=_KEEPING,
            help="Keep a session's text alone, which is read again next time: no file of keys, values and index.",
        ),
    ] = False,
    prompt_cache: Annotated[
        str | None,
        typer.Option(
            "--prompt-cache",
            metavar="FILE",
            rich_help_panel=_KEEPING,
            help="Read the first message's documents (-f) from this file of keys, values and index, as far as it has "
            "them; it is written beside the first answer if it is not there, or if they have grown or changed. Later "
            "turns are not added to it: that is what --session is for.",
        ),
    ] = None,
    quiet: Quiet = False,
    no_live: NoLive = False,
    no_markdown: Annotated[
        bool, typer.Option("--no-markdown", help="Show answers on a terminal as the model writes them.")
    ] = False,
) -> None:
    """Chat with a model about long documents."""
    name = _session_name(session, continue_=continue_)
    if name is not None and not _typed(invocation, "model"):
        settings = _with_model_of(name, settings)
    cache_path = _prompt_cache_path(prompt_cache)
    documents, stdin_taken = _read_documents(prompt, file or [])
    text = _one_question(prompt, documents, stdin_taken)
    if text is None and as_json:
        raise UsageError("--json prints one answer, but there is no question", hint='magicpig chat --json "…"')
    if text is None and not _is_terminal():
        raise UsageError("a conversation needs a terminal at stdin", hint='magicpig chat "Your question"')

    # The terminal may be closed while this runs: what is to be kept is kept, though nobody hears of it.
    with console.lasting_stderr():
        finished = _run(
            settings, text, documents, name=name, cache_path=cache_path, text_only=session_text_only, as_json=as_json,
            quiet=quiet, live=not no_live, markdown=not no_markdown,
        )  # fmt: skip
    if finished is not None and finished.reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _run(
    settings: Settings, text: str | None, documents: list[tuple[str, str]], *, name: str | None,
    cache_path: Path | None, text_only: bool, as_json: bool, quiet: bool, live: bool, markdown: bool,
) -> Finished | None:  # fmt: skip
    """Load the model and answer one question, or hold a conversation (None)."""
    from magicpig_cli.cli.one_turn import OneTurn
    from magicpig_cli.prompt_cache import PromptCache
    from magicpig_cli.sessions import Sessions
    from magicpig_cli.ui.answer import statistics_line
    from magicpig_cli.ui.ending import ending_by_signal
    from magicpig_cli.ui.loading import load_engine

    engine = load_engine(settings, quiet=quiet)
    say = _unheard if quiet else console.say
    sessions = Sessions(say, console.warn, with_cache=not text_only)
    cache = None if cache_path is None else PromptCache(cache_path, engine, say, console.warn)
    if text is None:
        from magicpig_cli.ui.chat.loop import converse

        converse(
            engine, settings, documents, quiet=quiet, live=live, markdown=markdown, sessions=sessions, session=name,
            prompt_cache=cache,
        )  # fmt: skip
        return None
    turn = OneTurn(engine, settings)
    with contextlib.ExitStack() as keeping:
        if name is not None or cache is not None:
            keeping.enter_context(ending_by_signal())
        if name is not None:
            turn.open(sessions, name, quiet=quiet)
        keeping.callback(sessions.leave, turn)
        if cache is not None:
            keeping.enter_context(cache)
        finished = turn.answer(documents, text, cache, show_text=not as_json, quiet=quiet, live=live, markdown=markdown)
        # At once: what is written now may be large, and a signal may end it.
        if as_json:
            print(json.dumps(answer_json(engine, turn.sequence, finished), ensure_ascii=False), flush=True)
        elif not quiet:
            console.say(statistics_line(finished))
    return finished


def _unheard(_: str) -> None:
    """Takes notices of a quiet run."""


def _session_name(session: str | None, *, continue_: bool) -> str | None:
    """Name of the session to go on with or to begin, if any. Raises UsageError."""
    if session is None and not continue_:
        return None
    from magicpig_cli import session_files

    if session is not None and continue_:
        raise UsageError("--continue goes on with the last session, --session names one", hint="give one of them")
    return session_files.most_recent() if session is None else session_files.checked_name(session)


def _typed(invocation: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line, not only in the environment or a configuration."""
    source = invocation.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _with_model_of(session: str, settings: Settings) -> Settings:
    """The same with the model that a session was held with, if it is one that was kept. Raises MagicpigError."""
    from magicpig_cli import session_files

    held = session_files.model_of(session)
    if held is None:
        return settings
    return replace(settings, model=replace(settings.model, model=held[0], revision=settings.model.revision or held[1]))


def _prompt_cache_path(text: str | None) -> Path | None:
    """Where the prompt cache is, or can be. Raises UsageError."""
    if text is None:
        return None
    from magicpig_cli.prompt_cache import check_path

    path = Path(text).expanduser()
    check_path(path)
    return path


def _one_question(prompt: str | None, documents: list[tuple[str, str]], stdin_taken: bool) -> str | None:
    """The one question of this run, from the argument or from stdin; None = hold a conversation."""
    from magicpig_cli.engine.documents import document_text

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
    from magicpig_cli.engine.documents import document_text, read_document

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
            "budget_used": finished.budget,
            "attn_error_estimate": finished.error_estimate,
            "segments": sequence.segments,
        },
        "memory": engine.memory(),
        "device": engine.device,
        "isa": engine.isa,
        "threads": engine.threads,
        "seed": finished.seed,
    }
