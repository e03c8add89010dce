"""Token ids to text while they arrive: nothing is shown that a later token could still change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from magicpig_cli.engine.thinking import TAG_TEXTS

_UNFINISHED = "\ufffd"  # how a decoder shows bytes that are no character (yet)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, hence tokens
_LONGEST_WINDOW = 64  # tokens; only a long run of broken bytes comes near it


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Id → text of every token that is no part of an answer's text."""
    special = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {**special, **dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))}


def decode(tokenizer: Any, ids: Iterable[int]) -> str:
    """Text of ids without special tokens. Spaces stay as the model wrote them: no clean-up."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class _Detokenizer:
    """Ids → text that is final as far as UTF-8 is concerned, at a cost per token that does not grow with the answer.

    Decoding starts at a token whose text is out already (`_ids[0]`), because a decoder treats the start of its input
    specially (it drops a leading space) and joins bytes across tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window: tokens of the last finished piece, then those of the next one
        self._finished = 0  # tokens of the last finished piece
        self._out = 0  # characters of the window's text that were handed out
        self._stuck = 0  # tokens since characters were last handed out

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = decode(self._tokenizer, self._ids)
        if not text.endswith(_UNFINISHED) or len(self._ids) >= _LONGEST_WINDOW:
            return self._finish_piece(text)
        self._stuck += 1
        safe = len(text.rstrip(_UNFINISHED))
        if safe <= self._out:
            # After four tokens the oldest held byte cannot become a character any more; the newest still can.
            if self._stuck < _LONGEST_CHARACTER or self._out + 1 >= len(text):
                return ""
            safe = self._out + 1
        else:
            self._stuck = 0
        delta = text[self._out : safe]
        self._out += len(delta)
        return delta

    def flush(self) -> str:
        """What was held back, broken characters included."""
        return self._finish_piece(decode(self._tokenizer, self._ids))

    def _finish_piece(self, text: str) -> str:
        delta = text[self._out :]
        self._ids = self._ids[self._finished :]
        self._finished = len(self._ids)
        self._out = len(decode(self._tokenizer, self._ids))
        self._stuck = 0
        return delta


class TextStream:
    """The text of one answer, piece by piece. What was returned once is never taken back.

    Bytes of an incomplete character are held back, and so is text that may be the beginning of a stop string. Special
    tokens are skipped, tags around thinking aside; one whose text is a stop string stops.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._stop = stop
        self._special = special_tokens(tokenizer)
        self._detokenizer = _Detokenizer(tokenizer)
        self._held = ""
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """Everything returned so far."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is now safe to show. Nothing more comes once `stopped`."""
        if self.stopped:
            return ""
        if token_id in self._special:
            if self._special[token_id] in self._stop:
                self._held += self._detokenizer.flush()
                self._cut_at_stop()
                self.stopped = True
            if self.stopped or self._special[token_id] not in TAG_TEXTS:
                return ""
            self._held += self._detokenizer.flush() + self._special[token_id]
        else:
            self._held += self._detokenizer.push(token_id)
        if self._cut_at_stop():
            return self._show(len(self._held))
        return self._show(len(self._held) - self._may_become_stop())

    def finish(self) -> str:
        """Flush what is held back; returns it. The stop string of an answer that `stopped` is not part of it."""
        if not self.stopped:
            self._held += self._detokenizer.flush()
            self._cut_at_stop()
        return self._show(len(self._held))

    def _show(self, count: int) -> str:
        delta, self._held = self._held[:count], self._held[count:]
        if delta:
            self._shown.append(delta)
        return delta

    def _cut_at_stop(self) -> bool:
        """End the held text before the stop string that is complete first, however the text was cut into tokens."""
        found = [(start + len(stop), start) for stop in self._stop if (start := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)[1]]
            self.stopped = True
        return bool(found)

    def _may_become_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max((_overlap(self._held, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` with which `text` ends."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
