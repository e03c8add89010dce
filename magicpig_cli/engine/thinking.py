"""Reasoning models write what they think between tags before they answer. This tells the two apart.

Thinking stands at the start of an answer or not at all: a tag further on is text about tags. Some templates put the
opening tag into the prompt, so that the model writes only the closing one (DeepSeek-R1, Qwen3-Thinking).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands before and after thinking."""

    opening: str
    closing: str


TAGS = (
    Tags("<think>", "</think>"),
    Tags("<thinking>", "</thinking>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),
    Tags("[THINK]", "[/THINK]"),
)
# Some tokenizers have them as special tokens. Left out, thinking would run into the answer.
TAG_TEXTS = frozenset(text for tags in TAGS for text in (tags.opening, tags.closing))

Part = tuple[bool, str]  # (thinking, text)


def opened_by(prompt: str) -> Tags | None:
    """The tags of which a rendered prompt ends with the opening one."""
    end = prompt.rstrip()
    return next((tags for tags in TAGS if end.endswith(tags.opening)), None)


class ThinkingStream:
    """Sorts the text of one answer as it comes. Tags and the blank lines beside them are left out.

    opened: what the prompt has opened already.
    """

    def __init__(self, opened: Tags | None = None) -> None:
        self.tags = opened  # of the thinking that there was, or is
        self.thinking = opened is not None
        self._begun = opened is not None  # whether it is known if there is any
        self._held = ""
        self._fresh = True  # nothing of the present part was given out yet

    def feed(self, text: str) -> list[Part]:
        """Parts that are now certain."""
        self._held += text
        if not self._begun and not self._begin(final=False):
            return []
        return self._sort(final=False)

    def finish(self) -> list[Part]:
        """What was held back."""
        if not self._begun:
            self._begin(final=True)
        return self._sort(final=True)

    def _begin(self, *, final: bool) -> bool:
        """Find out whether the answer begins with thinking. Returns whether that is known now."""
        start = self._held.lstrip()
        if not final and any(tags.opening.startswith(start) for tags in TAGS):
            return False
        self._begun = True
        self.tags = next((tags for tags in TAGS if start.startswith(tags.opening)), None)
        if self.tags is None:
            self._fresh = False  # an answer without thinking stays as it is
        else:
            self.thinking = True
            self._held = start[len(self.tags.opening) :]
        return True

    def _sort(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        if self.thinking and self.tags is not None:
            thought, closing, rest = self._held.partition(self.tags.closing)
            if closing:
                parts.append((True, self._trimmed(thought.rstrip())))
                self.thinking, self._fresh, self._held = False, True, rest
            else:
                safe = len(thought) if final else _before_tag(thought, self.tags.closing)
                self._held = thought[safe:]
                return [(True, piece)] if (piece := self._trimmed(thought[:safe])) else []
        piece, self._held = self._trimmed(self._held), ""
        return [part for part in (*parts, (False, piece)) if part[1]]

    def _trimmed(self, text: str) -> str:
        """Text without the blank lines that a part begins with."""
        if self._fresh:
            text = text.lstrip("\n") if text.strip() else ""
            self._fresh = not text
        return text


def _before_tag(text: str, closing: str) -> int:
    """Length of the text before white space and what may be the beginning of the tag."""
    longest = min(len(text), len(closing) - 1)
    begun = next((n for n in range(longest, 0, -1) if text.endswith(closing[:n])), 0)
    return len(text[: len(text) - begun].rstrip())


def split_thinking(text: str, opened: Tags | None = None) -> tuple[Tags | None, str]:
    """(tags, answer) of a whole answer; tags are None where nothing was thought."""
    stream = ThinkingStream(opened)
    parts = stream.feed(text) + stream.finish()
    return stream.tags, text if stream.tags is None else "".join(part for thinking, part in parts if not thinking)
