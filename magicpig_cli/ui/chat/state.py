"""The state of one conversation, and what a turn does to it. Earlier turns stay in the cache: only new text is read."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from magicpig_cli.cache.sequence import Sequence
from magicpig_cli.config import AttentionOptions, Settings
from magicpig_cli.engine.conversation import Conversation, common_prefix
from magicpig_cli.engine.documents import document_message
from magicpig_cli.engine.engine import Engine
from magicpig_cli.engine.sampling import SamplingParams, resolve_sampling
from magicpig_cli.errors import ContextError, MagicpigError
from magicpig_cli.events import Event, Finished
from magicpig_cli.planner import Plan
from magicpig_cli.prompt_cache import FirstMessage, PromptCache
from magicpig_cli.sessions import Loaded
from magicpig_cli.ui import console
from magicpig_cli.ui.answer import Interrupts, show_notices, statistics_line, stream_answer
from magicpig_cli.ui.answer_text import TextLook
from magicpig_cli.ui.chat.documents import Waiting
from magicpig_cli.ui.chat.patience import interruptible
from magicpig_cli.ui.chat.sessions import Sessions
from magicpig_cli.ui.chat.totals import Totals

_WARN_AT = (0.9, 0.7)  # of the context
_MAKES_ROOM = "/undo or /clear makes room; -c gives a larger context"


@dataclass(frozen=True, slots=True)
class Setup:
    """What an answer depends on beside the messages."""

    system: str | None
    drawn: SamplingParams
    plan: Plan  # with the attention that /set has chosen

    @property
    def repeats(self) -> bool:
        """Whether it draws the same tokens each time."""
        return self.drawn.greedy or self.drawn.seed is not None


@dataclass(frozen=True, slots=True)
class Asked:
    """A message as it was typed, and the documents that went with it."""

    text: str
    documents: tuple[Waiting, ...] = ()
    answered: Setup | None = None  # how, if it was to the end

    @property
    def named_documents(self) -> list[tuple[str, str]]:
        """Their (name, text)."""
        return [(document.name, document.text) for document in self.documents]

    @property
    def message(self) -> str:
        """What the model is told."""
        return document_message(self.named_documents, self.text) if self.documents else self.text


class Chat:
    """One conversation: messages, their cache, documents waiting for the next message, settings, statistics.

    `sessions` keeps conversations, or is None.
    """

    def __init__(
        self, engine: Engine, settings: Settings, *, quiet: bool = False, live: bool = True, markdown: bool = True,
        sessions: Sessions | None = None, prompt_cache: PromptCache | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.settings, self.quiet, self.live = engine, settings, quiet, live
        self.look = TextLook(markdown)
        self.sampling = AttentionOptions()  # what /set has changed of it
        self.sessions = sessions
        self._prompt_cache = prompt_cache
        self.conversation = Conversation(engine.codec, settings.system)
        self.sequence = engine.new_sequence()
        self.waiting: list[Waiting] = []
        self.asked: list[Asked] = []  # one per user message
        self.interrupts = Interrupts()
        self.totals = Totals()
        self._so_far: list[str] = []  # of the answer that is being given
        self._belonging = 0  # see cached_tokens
        self._warned = 0.0  # share of the context that was last warned of

    # Turns

    def turn(self, text: str) -> str | None:
        """Answer one message. Returns the text to edit again if the turn was dropped."""
        asked = Asked(text, tuple(self.waiting))
        self.waiting = []
        self.asked.append(asked)
        self.conversation.add_user(asked.message)
        self._so_far = []
        with self._beside():
            try:
                finished = self._answer()
            except BaseException:  # Ctrl-C twice, or a signal: what was answered is kept, as after a single Ctrl-C
                if self._so_far:
                    self.conversation.add_assistant("".join(self._so_far))
                else:
                    self.take_back()
                raise
            if finished is None:
                self.take_back()
                return text
            self._add(finished)
        return None

    def again(self) -> None:
        """Answer the last message once more; the earlier answer stays if there is none. Raises MagicpigError."""
        messages = self.conversation.messages
        if not self.asked:
            raise MagicpigError("there is no question to answer again")
        before = messages.pop() if messages[-1]["role"] == "assistant" else None
        finished: Finished | None = None
        with self._beside():
            try:
                finished = self._answer()
            finally:
                if finished is None and before is not None:
                    messages.append(before)
                    console.say("the earlier answer stays")
            if finished is not None:
                self._add(finished)

    @property
    def setup(self) -> Setup:
        """What the next answer will depend on."""
        drawn = resolve_sampling(self.settings.generation, self.engine.generation_config)
        return Setup(self.conversation.system, drawn, self.engine.plan)

    @property
    def gives_the_same(self) -> bool:
        """Whether the last message would be answered as it was."""
        return bool(self.asked) and self.setup.repeats and self.asked[-1].answered == self.setup

    def take_back(self) -> Asked | None:
        """As if the last message had not been sent: its documents wait again. None if there was none."""
        if not self.asked:
            return None
        asked = self.asked.pop()
        self.conversation.undo()
        self.waiting = [*asked.documents, *self.waiting]
        return asked

    def _beside(self) -> AbstractContextManager[object]:
        """What a turn is held within, so that nothing is cut of the sequence while the prompt cache is written."""
        return nullcontext() if self._prompt_cache is None else self._prompt_cache

    def _answer(self) -> Finished | None:
        """The model's answer to the conversation as it is; None if there is none, which has been said."""
        try:
            ids = self._prompt_ids()
            show_notices(self.engine, quiet=self.quiet)
            finished = self._run(ids)
        except ContextError as error:
            console.error(ContextError(error.message, hint=_MAKES_ROOM))
            return None
        except MagicpigError as error:
            console.error(error)
            return None
        if finished.dropped:
            console.say("interrupted before there was an answer")
            self._belonging = min(self._belonging, finished.reused_tokens)
            return None
        return finished

    def _run(self, ids: list[int]) -> Finished:
        """Answer a prompt; the first one with documents that the prompt cache has or is to have."""
        if self._prompt_cache is None or len(self.asked) > 1:
            return self._stream(ids, self.sequence)
        first = FirstMessage(self.conversation.messages, self.asked[0].named_documents, self.asked[0].text)
        return self._prompt_cache.answer(
            first, ids, self.sequence, lambda sequence, observe: self._stream(ids, sequence, observe)
        )

    def _stream(self, ids: list[int], sequence: Sequence, *observers: Callable[[Event], None]) -> Finished:
        self.sequence, self._so_far = sequence, []
        request = self.engine.request("chat", ids, self.settings.generation, sequence)
        self.totals.begin()

        def observe(event: Event) -> None:
            for observer in (self.totals.observe, *observers):
                observer(event)

        return stream_answer(
            self.engine, request, self.interrupts, show_text=True, quiet=self.quiet, live=self.live,
            look=replace(self.look, opened=self.conversation.opened_thinking), observe=observe, so_far=self._so_far,
        )  # fmt: skip

    def _add(self, finished: Finished) -> None:
        self.conversation.add_assistant(finished.text)
        to_the_end = finished.reason != "interrupted"
        self.asked[-1] = replace(self.asked[-1], answered=self.setup if to_the_end else None)
        self._belonging = self.sequence.length
        if not self.quiet:
            console.say(statistics_line(finished))
        self._warn_of_context(finished)
        if self.sessions is not None:
            self.sessions.after_turn(self)

    def _prompt_ids(self) -> list[int]:
        """Tokens of the conversation. Ctrl-C meanwhile (a very long document) raises MagicpigError, twice ends all."""
        try:
            return interruptible(self.conversation.prompt_ids)
        except KeyboardInterrupt:
            if self.interrupts.is_second():
                raise
            raise MagicpigError("interrupted before the prompt was read") from None

    # Context

    @property
    def cached_tokens(self) -> int:
        """First tokens of the sequence that belong to the conversation.

        It holds more after a turn was taken back: the next message mostly begins like that one, with its documents, and
        is read from where they part.
        """
        return min(self._belonging, self.sequence.length)

    @property
    def used_tokens(self) -> int:
        """Tokens in the cache, and of the documents that wait."""
        return self.cached_tokens + sum(document.tokens for document in self.waiting)

    def count_cache(self) -> None:
        """After turns were taken back: find out what of the cache still belongs to the conversation."""
        kept = self._prompt_ids() if self.asked else []
        self._belonging = common_prefix(self.sequence.ids, kept)
        self._warned = min(self._warned, self._belonging / self.engine.context)

    def forget(self) -> None:
        """Start over; system text and settings stay."""
        self.conversation.clear()
        self.asked, self.waiting, self._warned, self._belonging = [], [], 0.0, 0
        self.sequence.truncate(0)

    def replace(self, loaded: Loaded) -> None:
        """Go on with a conversation that was kept."""
        self.forget()
        self.conversation.system = loaded.system
        self.conversation.clear()
        self.conversation.messages = list(loaded.messages)
        self.asked = [Asked(text) for text in _of_user(loaded.messages)]
        if loaded.generation is not None:
            self.settings = replace(self.settings, generation=loaded.generation)
        if loaded.sequence is not None:
            self.sequence = loaded.sequence
            self._belonging = loaded.sequence.length

    def _warn_of_context(self, finished: Finished) -> None:
        """Once at each mark, and when an answer has been cut by it."""
        total, used = self.engine.context, self.cached_tokens
        share = used / total
        mark = next((mark for mark in _WARN_AT if share >= mark), 0.0)
        if finished.reason == "length" and finished.prompt_tokens + len(finished.token_ids) >= total:
            console.warn(f"the context of {total:,} tokens is full; {_MAKES_ROOM}")
        elif mark > self._warned:
            console.warn(f"{used:,} of {total:,} tokens of context are used ({share:.0%}); {_MAKES_ROOM}")
        self._warned = max(mark, self._warned)


def _of_user(messages: Listed[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]
