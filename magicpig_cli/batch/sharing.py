"""Which lines of an input begin with the same token ids, and in which order they run so that few prefixes live at once.

Decided from all good lines before anything runs, whichever of them an earlier run has answered: what a line shares is a
property of the input, so that its answer is the same after a resume. Prompts themselves are not kept: between the check
and the run a prompt is 8 bytes per chunk, a hash of everything up to the end of that chunk.

Prefixes end at multiples of the plan's chunk, and the last token of a prompt is never part of one (it is run again for
its logits): a prompt is then cut into the same chunks with and without sharing, which gives the same bits.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from magicpig_cli.engine.prefix import SharedPrefix

_HASH_BYTES = 8


def _numbers() -> array[int]:
    return array("q")


def prompt_hashes(ids: Sequence[int], chunk: int) -> tuple[array[int], int]:
    """(hashes of the first c, 2c, … ids, up to all but the last one; hash of all ids), 63 bits and a sign each.

    Equal hashes of that many bits mean equal ids: among a million chunks two differing ones agree with p = 3e-8.
    """
    data = np.asarray(ids, dtype="<u4")  # ids[0:N]
    running = hashlib.blake2b(digest_size=_HASH_BYTES)
    found = _numbers()
    last = (len(ids) - 1) // chunk * chunk
    for start in range(0, last, chunk):
        running.update(data[start : start + chunk].tobytes())
        found.append(_number(running.digest()))
    running.update(data[max(0, last) :].tobytes())
    return found, _number(running.digest())


def prompt_hash(ids: Sequence[int]) -> int:
    """The hash of all ids alone."""
    return prompt_hashes(ids, max(1, len(ids)))[1]


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little", signed=True)


@dataclass
class Sharing:
    """What the lines of an input have in common. Lines and prefixes are counted from 0, −1 is none.

    A prefix is kept where two lines or more have it and they part, or one of them ends, within the chunk after it. Its
    parent is the longest shorter one; it begins with all of its parent.
    """

    tokens: array[int] = field(default_factory=_numbers)  # of each prefix
    parents: array[int] = field(default_factory=_numbers)  # of each prefix; always a smaller number
    of_line: array[int] = field(default_factory=_numbers)  # the longest prefix of each good line
    order: array[int] = field(default_factory=_numbers)  # lines as they run: those of a prefix one after another

    @classmethod
    def nothing(cls, lines: int) -> Sharing:
        """Every line by itself, in the order of the input."""
        return cls(of_line=array("q", [-1]) * lines, order=array("q", range(lines)))

    def chain(self, prefix: int) -> list[int]:
        """The prefix and those it continues, the shortest first; nothing for −1."""
        found = []
        while prefix >= 0:
            found.append(prefix)
            prefix = self.parents[prefix]
        return found[::-1]

    def begins_at(self, prefix: int) -> int:
        """Tokens of the prefix's parent: where reading the prefix begins."""
        parent = self.parents[prefix]
        return 0 if parent < 0 else self.tokens[parent]

    def shared_tokens(self, line: int) -> int:
        """Prompt tokens of the line that are read for all who share them."""
        prefix = self.of_line[line]
        return 0 if prefix < 0 else self.tokens[prefix]

    def saved_tokens(self) -> int:
        """Prompt tokens that need not be read because another line has them too, if all lines run."""
        asked = sum(map(self.shared_tokens, range(len(self.of_line))))
        return asked - sum(self.tokens[prefix] - self.begins_at(prefix) for prefix in range(len(self.tokens)))

    def users(self, runs: Callable[[int], bool]) -> array[int]:
        """How many lines of which `runs` says yes, and longer prefixes that have users, each prefix has."""
        counts = array("q", bytes(8 * len(self.tokens)))
        for line, prefix in enumerate(self.of_line):
            if prefix >= 0 and runs(line):
                counts[prefix] += 1
        for prefix in range(len(counts) - 1, -1, -1):
            parent = self.parents[prefix]
            if counts[prefix] and parent >= 0:
                counts[parent] += 1
        return counts


class Prefixes:
    """The shared prefixes of one run, made when the first of their lines is asked for and forgotten after the last.

    Lines have to be asked for in the order of `Sharing.order`, those that `runs` says yes to and no others.
    """

    def __init__(self, sharing: Sharing, runs: Callable[[int], bool]) -> None:
        self._sharing = sharing
        self._users = sharing.users(runs)
        self._open: list[tuple[int, SharedPrefix]] = []  # the chain of the line that was asked for last

    def of(self, line: int) -> SharedPrefix | None:
        """The longest prefix of a line. Whoever takes it is one of its users and has to release it."""
        chain = self._sharing.chain(self._sharing.of_line[line])
        common = sum(1 for (number, _), wanted in zip(self._open, chain, strict=False) if number == wanted)
        del self._open[common:]
        for number in chain[common:]:
            parent = self._open[-1][1] if self._open else None
            prefix = SharedPrefix(self._sharing.tokens[number], parent, self._users[number])
            self._open.append((number, prefix))
        return self._open[-1][1] if self._open else None


class PrefixFinder:
    """Takes the prompts one by one and keeps their hashes: 8 bytes per chunk, and 8 per line."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._hashes = _numbers()  # of all lines, one after another
        self._counts = _numbers()  # hashes of each line

    def add(self, ids: Sequence[int]) -> int:
        """Take the prompt of the next line. Returns the hash of all of it."""
        hashes, whole = prompt_hashes(ids, self._chunk)
        self._hashes.extend(hashes)
        self._counts.append(len(hashes))
        return whole

    def find(self) -> Sharing:
        """What the lines taken so far share."""
        lines = len(self._counts)
        ends = list(accumulate(self._counts))
        kept = self._kept(ends)
        if not len(kept):
            return Sharing.nothing(lines)
        return self._trees(kept, ends)

    def _kept(self, ends: list[int]) -> np.ndarray:
        """Places of the hashes, among those of all lines, at which a prefix that is kept ends."""
        hashes = np.frombuffer(self._hashes, dtype=np.int64)
        found, counts = np.unique(hashes, return_counts=True)
        lines_with = counts[np.searchsorted(found, hashes)]
        go_on = np.append(lines_with[1:], 0)  # lines that have the next chunk of this line too
        go_on[[end - 1 for end in ends if end]] = 0
        return np.flatnonzero((lines_with > 1) & (go_on < lines_with))

    def _trees(self, kept: np.ndarray, ends: list[int]) -> Sharing:
        sharing = Sharing()
        numbers: dict[int, int] = {}  # hash → prefix
        below: list[list[int]] = []  # of each prefix: lines, and −1 − number of longer prefixes, as they appear
        roots: dict[int, int] = {}  # first line of each tree → its shortest prefix
        start = at = 0
        for line, end in enumerate(ends):
            prefix = -1
            while at < len(kept) and kept[at] < end:
                found = self._hashes[kept[at]]
                if found not in numbers:
                    numbers[found] = len(below)
                    below.append([])
                    sharing.tokens.append((int(kept[at]) - start + 1) * self._chunk)
                    sharing.parents.append(prefix)
                    if prefix >= 0:
                        below[prefix].append(-1 - numbers[found])
                    else:
                        roots[line] = numbers[found]
                prefix = numbers[found]
                at += 1
            sharing.of_line.append(prefix)
            if prefix >= 0:
                below[prefix].append(line)
            start = end
        sharing.order.extend(_in_order(sharing.of_line, roots, below))
        return sharing


def _in_order(of_line: array[int], roots: dict[int, int], below: list[list[int]]) -> Iterator[int]:
    """Lines by themselves where they stand; those of a tree where its first one stands, depth first."""
    for line, prefix in enumerate(of_line):
        if prefix < 0:
            yield line
        elif line in roots:
            waiting = [-1 - roots[line]]
            while waiting:
                entry = waiting.pop()
                if entry >= 0:
                    yield entry
                else:
                    waiting.extend(reversed(below[-1 - entry]))
