"""All lines once, before any weight is loaded: what is wrong with which, how long they are, what fits together."""

from __future__ import annotations

import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields

import numpy as np

from magicpig_cli.batch.line import BadLine, Line, LineError, parse_line, shortened
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.request import INSUFFICIENT_MEMORY, RequestMaker
from magicpig_cli.batch.sharing import PrefixFinder, Sharing
from magicpig_cli.errors import UsageError
from magicpig_cli.planner import Plan

_NAMES_KEPT = 8  # of foreign models and ignored keys
_SHOWN = 80  # characters of an id or a key in a message
_KEY = struct.Struct(">qq")


@dataclass(frozen=True, slots=True)
class Entry:
    """A good line: where it is and how long it gets. `place` counts all lines that are not blank, from 0."""

    place: int
    number: int
    offset: int
    key_high: int  # the line's key, in two halves
    key_low: int
    twin: int  # lines without an id before it that ask the same, if it has none either
    prompt_hash: int  # of all its token ids
    prompt_tokens: int
    sequence_tokens: int  # with the longest answer it may get

    @property
    def key(self) -> bytes:
        """See RequestMaker.key."""
        return _KEY.pack(self.key_high, self.key_low)


_COLUMNS = len(fields(Entry))
_PROMPT, _SEQUENCE = _COLUMNS - 2, _COLUMNS - 1


@dataclass
class Checked:
    """The input after one reading. A good line takes nine numbers here, its id, and two for what it shares."""

    total: int = 0
    errors: dict[int, LineError] = field(default_factory=dict)  # by place
    too_large: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # bad for that alone: key → (place, number)
    numbers: dict[str, int] = field(default_factory=dict)  # id → line number
    models: set[str] = field(default_factory=set)  # names that lines give
    ignored: set[str] = field(default_factory=set)  # keys that mean nothing here
    sharing: Sharing = field(default_factory=Sharing)  # of the good lines, numbered as `entries` gives them
    _rows: array[int] = field(default_factory=lambda: array("q"))

    @property
    def good(self) -> int:
        """Lines that can be answered."""
        return len(self._rows) // _COLUMNS

    @property
    def prompt_tokens(self) -> int:
        return sum(self._rows[_PROMPT::_COLUMNS])

    @property
    def sequence_tokens(self) -> int:
        """Prompt tokens and the most that the answers may take."""
        return sum(self._rows[_SEQUENCE::_COLUMNS])

    def entries(self) -> Iterator[Entry]:
        """The good lines, in order."""
        return map(self.entry, range(self.good))

    def entry(self, line: int) -> Entry:
        """A good line; they are counted from 0, without the bad ones."""
        return Entry(*self._rows[line * _COLUMNS : (line + 1) * _COLUMNS])

    def lengths(self) -> np.ndarray:
        """[good lines, 2]: prompt tokens, and tokens of the sequence with its longest answer."""
        return np.frombuffer(self._rows, dtype=np.int64).reshape(-1, _COLUMNS)[:, [_PROMPT, _SEQUENCE]]

    def histogram(self) -> list[tuple[int, int]]:
        """(longest, lines) of prompt lengths, in powers of two from 64 tokens; no empty ones at either end."""
        counts = Counter(max(64, 1 << (tokens - 1).bit_length()) for tokens in self._rows[_PROMPT::_COLUMNS])
        bounds, bound = [], min(counts, default=0)
        while counts and bound <= max(counts):
            bounds.append(bound)
            bound *= 2
        return [(bound, counts[bound]) for bound in bounds]

    def add(self, entry: Entry) -> None:
        self._rows.extend(astuple(entry))

    def batch_size(self, plan: Plan, wanted: int | None) -> int:
        """Sequences decoded together at most. Memory has its say line by line, when each is admitted."""
        return max(1, min(wanted or plan.max_batch, self.good))


def check(
    source: JsonlSource, maker: RequestMaker, on_progress: Callable[[int, int], None], *, share: bool = True
) -> Checked:
    """Read and measure all lines. `on_progress(lines, bytes)` is called after each.

    share: find out which begin with the same tokens. Raises UsageError for a duplicate id and for an input without
    lines.
    """
    checked = Checked()
    twins: Counter[str] = Counter()
    finder = PrefixFinder(maker.plan.chunk)
    for place, raw in enumerate(source.lines()):
        line = parse_line(raw)
        _claim(checked, line.custom_id, line.number)
        if isinstance(line, Line):
            _note(checked, line)
            try:
                prompt = maker.read(line)
                twin = 0
                if not line.named:
                    twin = twins[prompt.digest]
                    twins[prompt.digest] += 1
                key = maker.key(line, prompt, twin)
                longest = maker.sequence_tokens(line, len(prompt.ids))
            except BadLine as problem:
                if problem.code == INSUFFICIENT_MEMORY:
                    checked.too_large[key] = place, line.number
                line = LineError(line.number, line.custom_id, problem.code, problem.message)
            else:
                high, low = _KEY.unpack(key)
                whole = finder.add(prompt.ids)
                checked.add(Entry(place, raw.number, raw.offset, high, low, twin, whole, len(prompt.ids), longest))
        if isinstance(line, LineError):
            checked.errors[place] = line
        checked.total = place + 1
        on_progress(checked.total, raw.offset + len(raw.data))
    if not checked.total:
        raise UsageError("the input has no lines", hint='a line is like {"prompt": "…"}')
    checked.sharing = finder.find() if share else Sharing.nothing(checked.good)
    return checked


def _claim(checked: Checked, custom_id: str, number: int) -> None:
    first = checked.numbers.setdefault(custom_id, number)
    if first != number:
        raise UsageError(
            f"lines {first:,} and {number:,} both have the id {shortened(custom_id, _SHOWN)!r}",
            hint="give every line an id of its own, or none",
        )


def _note(checked: Checked, line: Line) -> None:
    """Remember what a notice will tell."""
    if line.model and len(checked.models) < _NAMES_KEPT:
        checked.models.add(line.model)
    for key in line.ignored:
        if len(checked.ignored) < _NAMES_KEPT:
            checked.ignored.add(shortened(key, _SHOWN))
