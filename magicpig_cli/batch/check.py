"""All lines once, before any weight is loaded: what is wrong with which, how long they are, what fits together."""

from __future__ import annotations

import heapq
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, field, fields

from magicpig_cli.batch.line import BadLine, Line, LineError, parse_line, shortened
from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.request import RequestMaker
from magicpig_cli.errors import MemoryBudgetError, UsageError
from magicpig_cli.planner import Plan
from magicpig_cli.units import format_bytes

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
    """The input after one reading. A good line takes eight numbers here, and its id."""

    total: int = 0
    errors: dict[int, LineError] = field(default_factory=dict)  # by place
    numbers: dict[str, int] = field(default_factory=dict)  # id → line number
    models: set[str] = field(default_factory=set)  # names that lines give
    ignored: set[str] = field(default_factory=set)  # keys that mean nothing here
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
        for start in range(0, len(self._rows), _COLUMNS):
            yield Entry(*self._rows[start : start + _COLUMNS])

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
        """Sequences decoded together; wanted None = as many as fit even if the longest ones meet.

        Raises MemoryBudgetError if `wanted` of the longest do not fit.
        """
        longest = heapq.nlargest(wanted or plan.max_batch, self._rows[_SEQUENCE::_COLUMNS])
        if wanted is None:
            return max(1, _how_many_fit(plan, longest))
        need = sum(map(plan.sequence_bytes, longest))
        if need > plan.budget_bytes:
            raise MemoryBudgetError(
                f"the {len(longest)} longest sequences (up to {longest[0]:,} tokens) need {format_bytes(need)} for "
                f"keys, values and index together, and {format_bytes(plan.budget_bytes)} are free",
                hint=f"--batch-size {max(1, _how_many_fit(plan, longest))} fits, auto finds it",
            )
        return wanted


def _how_many_fit(plan: Plan, longest: list[int]) -> int:
    left = plan.budget_bytes
    for count, tokens in enumerate(longest):
        left -= plan.sequence_bytes(tokens)
        if left < 0:
            return count
    return len(longest)


def check(source: JsonlSource, maker: RequestMaker, on_progress: Callable[[int, int], None]) -> Checked:
    """Read and measure all lines. `on_progress(lines, bytes)` is called after each.

    Raises UsageError for a duplicate id and for an input without lines.
    """
    checked = Checked()
    twins: Counter[str] = Counter()
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
                high, low = _KEY.unpack(maker.key(line, prompt, twin))
                longest = maker.sequence_tokens(line, len(prompt.ids))
                checked.add(Entry(place, raw.number, raw.offset, high, low, twin, len(prompt.ids), longest))
            except BadLine as problem:
                line = LineError(line.number, line.custom_id, problem.code, problem.message)
        if isinstance(line, LineError):
            checked.errors[place] = line
        checked.total = place + 1
        on_progress(checked.total, raw.offset + len(raw.data))
    if not checked.total:
        raise UsageError("the input has no lines", hint='a line is like {"prompt": "…"}')
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
