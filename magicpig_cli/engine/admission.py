"""Whether memory is left for one more sequence (paper section 4.3: the batch is what fits into host memory).

A sequence is promised all that it may come to take, at its own length, before it starts; so it never meets a full
memory because of its neighbours. What the promises are made from is the plan's budget, corrected by what other
programs have taken or given back since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from magicpig_cli import hardware
from magicpig_cli.engine.answer import Answer
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.planner import Plan

LOOK_EVERY_S = 0.5  # reading the system's figures takes 0.1 ms, and a full batch asks before every step


class Admission:
    """Made when the model has been loaded and no sequence lives.

    free: bytes that this process could still take. own: bytes that it holds privately.
    """

    def __init__(
        self,
        plan: Plan,
        free: Callable[[], int] = hardware.free_memory,
        own: Callable[[], int] = hardware.process_bytes,
    ) -> None:
        self._plan = plan
        self._free = free
        self._own = own
        self._whole = free() + own()  # that nobody else had
        self._budget = plan.budget_bytes
        self._looked = time.monotonic()

    def budget(self) -> int:
        """Bytes for all sequences together, as things are now."""
        if time.monotonic() - self._looked >= LOOK_EVERY_S:
            self._budget = max(0, self._plan.budget_bytes + self._free() + self._own() - self._whole)
            self._looked = time.monotonic()
        return self._budget

    def need_and_left(
        self, answer: Answer, opened: Iterable[Answer], prefixes: Iterable[SharedPrefix]
    ) -> tuple[int, int]:
        """Bytes that an answer brings along, and those that are left beside others.

        opened: the others; prefixes: what has been read for them. A caller's own sequence was promised its memory when
        the model was loaded.
        """
        if answer.request.sequence is not None:
            return 0, 0
        chain = answer.request.prefix.chain() if answer.request.prefix else ()
        unread = (prefix for prefix in chain if prefix.sequence is None)
        need = self._promised(answer) + sum(map(self._prefix_bytes, unread))
        return need, self.budget() - sum(map(self._promised, opened)) - sum(map(self._prefix_bytes, prefixes))

    def _promised(self, answer: Answer) -> int:
        if answer.request.sequence is not None:
            return 0
        return self._bytes_of(answer.longest, answer.request.prefix)

    def _prefix_bytes(self, prefix: SharedPrefix) -> int:
        return self._bytes_of(prefix.tokens, prefix.parent)

    def _bytes_of(self, tokens: int, prefix: SharedPrefix | None) -> int:
        """What a sequence of `tokens` may take beside the prefix that it is forked from."""
        need = self._plan.sequence_bytes(tokens)
        if prefix is None:
            return need
        lengths = [part.tokens for part in prefix.chain()]
        return need - self._plan.shared_bytes(prefix.tokens, tokens, lengths[:0:-1])
