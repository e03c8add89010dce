"""Text ↔ token ids: chat templates, the tokens that end an answer, and the turns of a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from magicpig_cli.engine.documents import BETWEEN
from magicpig_cli.engine.text import decode
from magicpig_cli.engine.thinking import Tags, opened_by, split_thinking
from magicpig_cli.errors import MagicpigError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What Python makes of bytes that are no UTF-8 on a terminal or a command line: tokenizers refuse it.
_NO_CHARACTER = re.compile("[\ud800-\udfff]")
_PROBE = "magicpigprobe"  # plain letters: a template that shows a text shows this one unchanged


class ChatCodec:
    """A model's tokenizer and chat template.

    `template` replaces the tokenizer's own. `notices` collects, once each, what had to be done differently from what
    was asked for; whoever talks to the user prints them. `stop_ids` are all tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, config: Any, generation_config: Any, template: str | None = None) -> None:
        self.notices: list[str] = []
        self._reported = 0  # notices that `new_notices` has handed out
        self._tokenizer = tokenizer
        self._template = template
        self.has_template = bool(template or tokenizer.chat_template)
        self.stop_ids: frozenset[int] = frozenset(
            _ids(generation_config, "eos_token_id")
            | _ids(config.get_text_config(), "eos_token_id")
            | _ids(config, "eos_token_id")
            | _ids(tokenizer, "eos_token_id")
            | self._turn_end()
        )

    # Messages to text to ids

    def render(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt text of messages `{"role", "content"}`; a model without a template gets the plain texts.

        Raises MagicpigError for messages that cannot be meant or that the template refuses.
        """
        plain = [_plain_message(number, message) for number, message in enumerate(messages, start=1)]
        if not plain:
            raise MagicpigError("there are no messages", hint='give at least {"role": "user", "content": "…"}')
        if not self.has_template:
            self._note(f"{self._name} has no chat template: plain completion (--chat-template FILE gives it one)")
            return BETWEEN.join(message["content"] for message in plain)
        try:
            return self._apply(self._adapt(plain), add_generation_prompt)
        except Exception as error:  # a template is foreign code and may raise anything
            whose = "--chat-template" if self._template else f"the chat template of {self._name}"
            raise MagicpigError(
                f"{whose} refuses these messages: {_one_line(error)}", hint="--chat-template FILE uses another one"
            ) from error

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the rendered messages, with the beginning-of-text token exactly once. Raises MagicpigError."""
        return self.encode_raw(self.render(messages))

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a text. What the tokenizer puts before a text is there once, also where the text brings it itself."""
        ids = self._encode(text)
        return ids if ids[:1] == self._opening[:1] else self._opening + ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out."""
        return decode(self._tokenizer, ids)

    def count(self, text: str) -> int:
        """Tokens of a text, without those that open a prompt."""
        return len(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        text = _NO_CHARACTER.sub("\ufffd", text)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    @cached_property
    def _opening(self) -> list[int]:
        """Special tokens that the tokenizer puts before every text: BOS, mostly, or none."""
        bare = self._encode(_PROBE)
        dressed: list[int] = self._tokenizer(_PROBE, verbose=False)["input_ids"]
        starts = (start for start in range(len(dressed)) if dressed[start : start + len(bare)] == bare)
        return dressed[: next(starts, 0)]

    # What the template can and cannot

    def knows_thinking(self, tags: Tags) -> bool:
        """Whether the template itself decides what becomes of thinking in earlier answers: it changes them then."""
        answer = f"{tags.opening}{_PROBE}a{tags.closing}{_PROBE}b"
        turns = [("user", "a"), ("assistant", answer), ("user", "b")]
        try:
            rendered = self._apply([{"role": role, "content": text} for role, text in turns], True)
        except Exception:  # as in render
            return False
        return self.has_template and answer not in rendered

    def _apply(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, chat_template=self._template
        )
        return text

    def _shows(self, *roles: str) -> bool:
        """Whether the template accepts these roles in this order and shows every text."""
        texts = [f"{_PROBE}{'abc'[place]}" for place in range(len(roles))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        try:
            rendered = self._apply(messages, add_generation_prompt=True)
        except Exception:  # as in render: whatever it raises means no
            return False
        return all(text in rendered for text in texts)

    @cached_property
    def _takes_system(self) -> bool:
        return self._shows("system", "user") or not self._shows("user")

    @cached_property
    def _takes_neighbours(self) -> bool:
        return self._shows("user", "user") or not self._shows("user")

    def _adapt(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """Messages in a form that the template takes: system text into the user's turn, neighbours merged."""
        folded = not self._takes_system and any(message["role"] == "system" for message in messages)
        if folded:
            self._note(f"the chat template of {self._name} has no system role: the text goes into the user's turn")
            messages = [{**m, "role": "user"} if m["role"] == "system" else m for m in messages]
        return messages if self._takes_neighbours and not folded else _merge_neighbours(messages)

    def _turn_end(self) -> set[int]:
        """The token with which the template ends an assistant's turn, if it ends it with a token of its own."""
        if not self.has_template:
            return set()
        added = {str(token): id_ for id_, token in self._tokenizer.added_tokens_decoder.items() if str(token).strip()}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
        # Some templates end only turns that are followed by another one, and some end the last one differently.
        for messages in (turns, [*turns, {"role": "user", "content": "b"}]):
            try:
                after = self._apply(messages, add_generation_prompt=False).rpartition(_PROBE)[2].lstrip()
            except Exception:  # a template that cannot be rendered says so when it is used
                return set()
            ends = [text for text in added if after.startswith(text)]
            if ends:
                return {added[max(ends, key=len)]}
        return set()

    @property
    def _name(self) -> str:
        name = str(self._tokenizer.name_or_path or "this model")
        return "/".join(Path(name).parts[-2:]) if Path(name).is_absolute() else name

    def new_notices(self) -> list[str]:
        """Notices since this was last asked."""
        fresh = self.notices[self._reported :]
        self._reported = len(self.notices)
        return fresh

    def _note(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)


def _ids(holder: Any, name: str) -> set[int]:
    """A token id, several or none → a set."""
    value = getattr(holder, name, None)
    if value is None:
        return set()
    return set(value) if isinstance(value, (list, tuple)) else {int(value)}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _plain_message(number: int, message: dict[str, Any]) -> dict[str, str]:
    """Role and text of one message, checked. Raises MagicpigError."""
    role = message.get("role")
    if role not in _ROLES:
        raise MagicpigError(f"message {number} has the role {role!r}", hint="roles are system, user and assistant")
    return {"role": _ROLES[role], "content": _plain_content(number, message.get("content"))}


def _plain_content(number: int, content: Any) -> str:
    """Text as it is, or the text parts of an OpenAI content list, one per line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MagicpigError(
            f"the content of message {number} is {type(content).__name__}", hint="give text, or a list of text parts"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise MagicpigError(
                f"message {number} has a part of type {kind!r}", hint="only parts of type text are read"
            )
        texts.append(text)
    return "\n".join(texts)


def _merge_neighbours(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Messages with no two of one role in a row."""
    merged: list[dict[str, str]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1] = {**message, "content": merged[-1]["content"] + BETWEEN + message["content"]}
        else:
            merged.append(message)
    return merged


def with_system(messages: list[dict[str, str]], text: str | None) -> list[dict[str, str]]:
    """The same turns after another system text, or none."""
    turns = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": text}, *turns] if text else turns


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two prompts share at their beginning."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Conversation:
    """The turns so far. The prompt of the next one is rendered anew each time: templates may change earlier turns."""

    def __init__(self, codec: ChatCodec, system: str | None = None) -> None:
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.opened_thinking: Tags | None = None  # by the prompt that was rendered last
        self._codec = codec
        self.clear()

    def add_user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def add_assistant(self, text: str) -> None:
        """The answer to the prompt that was rendered last. What was thought goes back to the model only by a template
        that knows of it."""
        tags, answer = split_thinking(text, self.opened_thinking)
        if tags is not None:
            closed = text if tags.closing in text else text + tags.closing  # it was interrupted
            text = closed if self._codec.knows_thinking(tags) else answer
        self.messages.append({"role": "assistant", "content": text})

    def set_system(self, text: str | None) -> None:
        """Another system text, or none, for the same turns."""
        self.system = text
        self.messages = with_system(self.messages, text)

    def undo(self) -> str | None:
        """Take back the last question and its answer. Returns the question; None if there was none."""
        last = next((n for n in reversed(range(len(self.messages))) if self.messages[n]["role"] == "user"), None)
        if last is None:
            return None
        question = self.messages[last]["content"]
        del self.messages[last:]
        return question

    def clear(self) -> None:
        """Forget all turns; the system text stays."""
        self.messages = with_system([], self.system)

    def prompt_ids(self) -> list[int]:
        """Ids of all turns, ready for the assistant's next one. Raises MagicpigError."""
        prompt = self._codec.render(self.messages)
        self.opened_thinking = opened_by(prompt)
        return self._codec.encode_raw(prompt)
