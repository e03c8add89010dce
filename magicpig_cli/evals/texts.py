"""The texts that are read and that hide needles, in whole words."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from magicpig_cli.corpus import SHIPPED, read_text
from magicpig_cli.errors import UsageError

DEFAULT = "pydoc_data.topics"
SYNTHETIC = "synthetic"  # named as the text of tasks that use none
_WORD = re.compile(r"\S+\s*")
_END = re.compile(r"[.!?:]\s+$|\n")  # of a word after which something may be inserted
_SEARCHED = 60  # words looked through for such a place


@dataclass(frozen=True)
class Text:
    """A text with a name for people."""

    name: str
    content: str

    @classmethod
    def load(cls, name: str) -> Text:
        """A text that is always there (`corpus.SHIPPED`) or a file. Raises UsageError."""
        text = cls(name, SHIPPED[name]() if name in SHIPPED else read_text(Path(name)))
        if not text.words:
            raise UsageError(f"{name} has no words", hint="--text FILE with plain text")
        return text

    @cached_property
    def words(self) -> list[str]:
        """Everything from one word to the next, white space included."""
        return _WORD.findall(self.content)

    @cached_property
    def digest(self) -> str:
        """Which content it is."""
        return hashlib.sha256(self.content.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    def excerpt(self, start: int, count: int) -> list[str]:
        """`count` words from the start-th on, from the beginning again where the text ends."""
        words, start = self.words, start % len(self.words)
        return (words[start:] + words * -(-count // len(words)))[:count]


def with_inserted(words: list[str], insertions: list[tuple[float, str]]) -> str:
    """The words with lines of their own inserted, each after this share of them, where a line or sentence ends.

    Lines that belong to one place keep their order.
    """
    places: dict[int, list[str]] = {}
    for share, line in sorted(insertions, key=lambda insertion: insertion[0]):
        places.setdefault(_gap(words, round(share * len(words))), []).append(line)
    parts: list[str] = []
    for place in range(len(words) + 1):
        if place in places:
            before = "" if not place or words[place - 1].endswith("\n") else "\n"
            parts.append(before + "".join(f"{line}\n" for line in places[place]))
        if place < len(words):
            parts.append(words[place])
    return "".join(parts)


def _gap(words: list[str], wanted: int) -> int:
    """The place nearest after `wanted` where a line or a sentence ends; `wanted` itself if there is none near."""
    for place in range(wanted, min(wanted + _SEARCHED, len(words)) + 1):
        if place == 0 or _END.search(words[place - 1]):
            return place
    return wanted
