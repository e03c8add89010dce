"""`magicpig chat "question"`: one answer, as part of a session if one is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.config import Settings
from magicpig_cli.engine.conversation import Conversation
from magicpig_cli.engine.documents import document_message
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import Event, Finished
from magicpig_cli.prompt_cache import FirstMessage, PromptCache
from magicpig_cli.sessions import Sessions
from magicpig_cli.ui import console
from magicpig_cli.ui.answer import Interrupts, show_notices, stream_answer
from magicpig_cli.ui.answer_text import TextLook
from magicpig_cli.ui.ending import Ended


class OneTurn:
    """A conversation of which one more turn is held."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.conversation = Conversation(engine.codec, settings.system)
        self.sequence = engine.new_sequence()
        self._read_s = 0.0  # what reading the session took

    @property
    def cached_tokens(self) -> int:
        """Tokens of the conversation that are in the cache: nothing is ever taken back."""
        return self.sequence.length

    def open(self, sessions: Sessions, name: str, *, quiet: bool) -> None:
        """Go on with a session, or begin it. Raises MagicpigError."""
        loaded = sessions.open(name, self)
        if loaded is None:
            return
        for line in () if quiet else loaded.notices:
            console.say(line)
        self.conversation = Conversation(self.engine.codec, loaded.system)
        self.conversation.messages = list(loaded.messages)
        self._read_s = loaded.read_s
        if loaded.generation is not None:
            self.settings = replace(self.settings, generation=loaded.generation)
        if loaded.sequence is not None:
            self.sequence = loaded.sequence

    def answer(
        self, documents: list[tuple[str, str]], text: str, cache: PromptCache | None, *, show_text: bool, quiet: bool,
        live: bool, markdown: bool,
    ) -> Finished:  # fmt: skip
        """Ask, and stream the answer. `ttft_s` includes reading a session or prompt cache. Raises MagicpigError.

        On KeyboardInterrupt and `Ended` the conversation keeps what was answered by then, as after a single Ctrl-C.
        """
        conversation, so_far = self.conversation, list[str]()
        conversation.add_user(document_message(documents, text) if documents else text)

        def stream(ids: list[int], sequence: Sequence, observe: Callable[[Event], None] | None = None) -> Finished:
            self.sequence = sequence
            return stream_answer(
                self.engine, self.engine.request("chat", ids, self.settings.generation, sequence), Interrupts(),
                show_text=show_text, quiet=quiet, live=live,
                look=TextLook(markdown, opened=conversation.opened_thinking), observe=observe, so_far=so_far,
            )  # fmt: skip

        try:
            ids = conversation.prompt_ids()
            show_notices(self.engine, quiet=quiet)
            self.engine.check_fits(len(ids), self.settings.generation.max_tokens)
            if cache is None:
                finished = stream(ids, self.sequence)
            else:
                first = FirstMessage(conversation.messages, documents, text)
                finished = cache.answer(first, ids, self.sequence, partial(stream, ids))
        except BaseException as problem:
            if so_far and isinstance(problem, KeyboardInterrupt | Ended):
                conversation.add_assistant("".join(so_far))
            else:
                conversation.undo()
            raise
        if finished.token_ids:
            conversation.add_assistant(finished.text)
        else:
            conversation.undo()
        timing = finished.timing
        return replace(finished, timing=replace(timing, ttft_s=timing.ttft_s + self._read_s))
