"""Prompt and answer until the user leaves: what Ctrl-C, Ctrl-D and signals do in each state."""

from __future__ import annotations

from prompt_toolkit.application.current import get_app_or_none

from magicpig_cli.config import Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.errors import MagicpigError
from magicpig_cli.prompt_cache import PromptCache
from magicpig_cli.ui import console
from magicpig_cli.ui.chat import commands
from magicpig_cli.ui.chat.completing import SlashCompleter
from magicpig_cli.ui.chat.documents import add_document
from magicpig_cli.ui.chat.editing import editor, is_command, unblocked
from magicpig_cli.ui.chat.sessions import Sessions, open_session
from magicpig_cli.ui.chat.state import Chat
from magicpig_cli.ui.chat.toolbar import Toolbar
from magicpig_cli.ui.ending import Ended, ending_by_signal


def converse(
    engine: Engine, settings: Settings, documents: list[tuple[str, str]], *, quiet: bool, live: bool = True,
    markdown: bool = True, sessions: Sessions | None = None, session: str | None = None,
    prompt_cache: PromptCache | None = None,
) -> None:  # fmt: skip
    """Hold a conversation, which begins with documents as (name, text).

    session: the name of one to go on with, or to begin.

    Ctrl-C twice within a second, SIGTERM and SIGHUP raise KeyboardInterrupt. Raises ContextError for documents without
    room.
    """
    chat = Chat(
        engine, settings, quiet=quiet, live=live, markdown=markdown, sessions=sessions, prompt_cache=prompt_cache
    )  # fmt: skip
    with ending_by_signal(_leave_prompt):
        if not quiet:
            console.say(f"{engine.model_name} · {engine.context:,} tokens of context · /help lists commands")
        if sessions is not None and session is not None:
            open_session(chat, session)
        for name, text in documents:
            add_document(chat, name, text)
        try:
            _loop(chat)
        finally:
            if sessions is not None:
                sessions.leave(chat)


def _loop(chat: Chat) -> None:
    toolbar = Toolbar()
    prompt = editor(SlashCompleter(chat), toolbar)
    default = ""
    while True:
        try:
            toolbar.update(chat)
            line = prompt.prompt(default=default)
        except KeyboardInterrupt:
            if chat.interrupts.is_second():
                raise
            if not prompt.default_buffer.text:
                console.say("Ctrl-C again, Ctrl-D or /exit leaves")
            default = ""
            continue
        except EOFError:
            return
        try:
            default = _handle(chat, line) or ""
        except KeyboardInterrupt:
            if chat.interrupts.is_second():
                raise
            default = ""
            console.say("interrupted")
        except commands.Leave:
            return


def _handle(chat: Chat, line: str) -> str | None:
    """Do what a line says; returns text for the next prompt. Raises Leave."""
    try:
        if is_command(line):
            return commands.run(chat, line.strip())
        text = unblocked(line)
        return chat.turn(text) if text.strip() else None
    except MagicpigError as error:
        console.error(error)
        return None


def _leave_prompt() -> bool:
    """Have the prompt raise Ended, if it waits."""
    app = get_app_or_none()
    if app is None or app.loop is None or not app.is_running:
        return False

    def leave() -> None:
        if app.future is not None and not app.future.done():
            app.exit(exception=Ended)

    app.loop.call_soon_threadsafe(leave)  # what is raised within a callback of asyncio goes no further
    return True
