"""One reading of all lines: counts, ids, lengths, how many run together, and progress."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from magicpig_cli.batch.check import Checked, Entry, check
from magicpig_cli.batch.line import _KINDS
from magicpig_cli.errors import UsageError
from tests.batch.test_line import EXTREME_VALUES, PLACES


def lengths(*sequences: int) -> Checked:
    """A check of lines with these prompt lengths, each with room for ten more tokens."""
    checked = Checked(total=len(sequences))
    for place, tokens in enumerate(sequences):
        checked.add(Entry(place, place + 1, 0, -1, -1, 0, -2, tokens, tokens + 10))
    return checked


def test_good_and_bad_lines_and_what_is_told_of_them(source, checked):
    opened = source(
        {"prompt": "abc", "max_tokens": 4, "model": "other", "extra": 1}, b"", {"prompt": 1}, {"prompt": "defgh"}, b"{"
    )
    result = checked(opened)
    assert (result.total, result.good) == (4, 2)
    assert [(place, error.number) for place, error in result.errors.items()] == [(1, 3), (3, 5)]
    first, second = result.entries()
    assert (first.place, first.number, first.prompt_tokens, first.sequence_tokens) == (0, 1, 3, 7)
    assert (second.place, second.number, second.prompt_tokens, second.sequence_tokens) == (2, 4, 5, 517)
    assert json.loads(opened.line_at(second.number, second.offset).data) == {"prompt": "defgh"}
    assert first.key != second.key
    assert (result.prompt_tokens, result.sequence_tokens) == (8, 524)
    assert (result.models, result.ignored) == ({"other"}, {"extra"})
    assert result.numbers == {"line-1": 1, "line-3": 3, "line-4": 4, "line-5": 5}


def test_lines_without_an_id_that_ask_the_same_are_told_apart(source, checked, maker):
    same = {"prompt": "x"}
    result = checked(source(same, {"prompt": "x", "seed": 1}, {**same, "id": "a"}, same, {**same, "id": "b"}, same))
    assert [entry.twin for entry in result.entries()] == [0, 0, 0, 1, 0, 2]
    assert len({entry.key for entry in result.entries()}) == 6
    moved = checked(source({"prompt": "first"}, same, same))
    assert [entry.key for entry in moved.entries()][1:] == [
        entry.key for entry in result.entries() if entry.number in (1, 4)
    ]


@pytest.mark.parametrize("raw", [True, False])
def test_extreme_values_make_errors_of_their_own_line_only(source, checked, maker, raw):
    parts = b'{"messages":[{"role":"user","content":[{"type":"text","text":"x","%s":%s}]}]}'
    keys = [key for key in (*_KINDS, "role", "content", "type", "text", "unknown") if "id" not in key]
    lines = [
        place % (key.encode(), value) for place in (*PLACES, parts) for key in keys for value in EXTREME_VALUES.values()
    ]
    result = checked(source(*lines), maker(raw=raw))
    assert result.total == len(lines) == result.good + len(result.errors)
    assert result.good
    assert max(len(error.message) for error in result.errors.values()) <= 400


def test_a_very_long_id_or_key_is_cut_in_messages_only(source, checked):
    long = "x" * 100_000
    result = checked(source({"id": long, "prompt": "a", long: 1}))
    assert result.numbers == {long: 1}
    assert len(*result.ignored) == 80
    with pytest.raises(UsageError) as caught:
        checked(source({"id": long, "prompt": "a"}, {"id": long, "prompt": "b"}))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("lines", "numbers"),
    [
        (({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x"}, {"custom_id": "a", "prompt": "x"}), (1, 3)),
        (({"id": "line-2", "prompt": "x"}, {"prompt": "x"}), (1, 2)),
        (({"id": "a", "prompt": "x"}, b"", {"id": "a", "prompt": 1}), (1, 3)),
    ],
)
def test_ids_are_unique_over_good_and_bad_lines(source, checked, lines, numbers):
    with pytest.raises(UsageError) as caught:
        checked(source(*lines))
    assert f"lines {numbers[0]} and {numbers[1]} " in caught.value.message


def test_no_lines_at_all(source, checked):
    with pytest.raises(UsageError, match="no lines"):
        checked(source(b"", b"  "))


def test_progress_reaches_the_end(source, maker):
    seen = []
    opened = source({"prompt": "a"}, {"prompt": 1}, {"prompt": "b"})
    check(opened, maker(raw=True), lambda lines, done: seen.append((lines, done)))
    assert [lines for lines, _ in seen] == [1, 2, 3]
    assert seen[-1][1] == opened.size_bytes - 1  # without the last line end


def test_histogram_in_powers_of_two():
    assert lengths(1, 64, 65, 129, 1000, 1024).histogram() == [(64, 2), (128, 1), (256, 1), (512, 0), (1024, 2)]
    assert lengths(1025).histogram() == [(2048, 1)]
    assert lengths().histogram() == []


@pytest.mark.parametrize(
    ("lines", "wanted", "size"),
    [(5, None, 5), (50, None, 8), (50, 50, 50), (50, 3, 3), (2, 64, 2), (0, None, 1), (0, 4, 1)],
)
def test_batch_size_is_a_cap(planned, lines, wanted, size):
    """Memory is asked when a line is admitted: how long the others are does not matter here."""
    tight = replace(planned, max_batch=8, budget_bytes=planned.sequence_bytes(1500))
    assert lengths(*[1400] * lines).batch_size(tight, wanted) == size
