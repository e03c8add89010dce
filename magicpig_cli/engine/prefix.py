"""Token prefixes that several requests have in common: read and indexed once, then forked.

Which requests share what is decided before anything runs (`batch.sharing`), from all of them: a result depends on the
input, never on which of them happen to run at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from magicpig_cli.cache.sequence import Sequence


@dataclass(eq=False)
class SharedPrefix:
    """The first `tokens` token ids of every request that names it, and of every longer prefix whose parent it is.

    tokens: a multiple of the plan's chunk, so that the prompt is cut into the same chunks with and without sharing.
    users: requests and longer prefixes that have not ended yet; the last one to end frees the sequence.
    """

    tokens: int
    parent: SharedPrefix | None = field(default=None, repr=False)
    users: int = 0
    sequence: Sequence | None = None  # once it has been read

    def chain(self) -> Iterator[SharedPrefix]:
        """This prefix and those it is a continuation of, the longest first."""
        prefix: SharedPrefix | None = self
        while prefix is not None:
            yield prefix
            prefix = prefix.parent

    def release(self) -> None:
        """One user has ended."""
        for prefix in self.chain():  # no recursion: a conversation that grows line by line is a chain of hundreds
            prefix.users -= 1
            if prefix.users > 0:
                return
            prefix.forget()

    def forget(self) -> None:
        """Free its sequence, if it has been read. Forks of it live on."""
        if self.sequence is not None:
            self.sequence.release()
            self.sequence = None
