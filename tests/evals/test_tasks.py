"""Tasks: prompts of the length that was asked for, an answer that the text really gives, the same for the same seed."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.errors import ContextError, UsageError
from magicpig_cli.evals.fit import SLACK, largest_that_fits
from magicpig_cli.evals.suite import TASKS
from magicpig_cli.evals.tasks import Sample, make_sample
from magicpig_cli.evals.texts import Text, with_inserted

UNIT = 64  # bytes of the longest unit of filler here: a line's indentation, a word of punctuation


def sample(engine, text: Text, task: str, context: int = 3000, seed: int = 0, number: int = 0) -> Sample:
    return make_sample(engine.codec, TASKS[task], text, context, seed, number)


def words_of(engine, found: Sample) -> str:
    return engine.codec.decode(found.prompts[0].ids)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [2500, 4096, 7001])
def test_prompt_and_answer_fill_the_context_and_never_exceed_it(engine, topics, task, context):
    for number in range(3):
        found = sample(engine, topics, task, context, number=number)
        longest = max(len(prompt.ids) + prompt.room for prompt in found.prompts)
        assert context - SLACK - UNIT <= longest <= context
        for prompt in found.prompts:
            assert len(prompt.gold) < prompt.room
            assert found.shared == prompt.ids[: len(found.shared)]
            assert len(found.shared) < len(prompt.ids)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_a_function_of_its_seed_and_number(engine, topics, task):
    again = sample(engine, topics, task)
    assert sample(engine, topics, task) == again
    assert sample(engine, topics, task, seed=1) != again
    assert sample(engine, topics, task, number=1) != again
    other = Text("others", topics.content)
    assert (sample(engine, other, task) == again) == (not TASKS[task].uses_text)


@pytest.mark.parametrize("task", TASKS)
def test_the_least_context_that_a_refusal_names_is_enough(engine, topics, task):
    with pytest.raises(ContextError, match=f"{task} needs a context of") as refused:
        sample(engine, topics, task, context=60)
    least = int(re.search(r"of ([\d,]+) tokens", refused.value.message)[1].replace(",", ""))
    assert refused.value.hint.startswith(f"-c {least}")
    assert sample(engine, topics, task, context=least).prompts
    with pytest.raises(ContextError):
        sample(engine, topics, task, context=least - 1)


@pytest.mark.parametrize(("task", "needles"), [("niah", 1), ("multikey", 3000 // 128)])
def test_numbers_are_told_once_and_asked_by_their_word(engine, topics, task, needles):
    found = sample(engine, topics, task)
    text, (prompt,) = words_of(engine, found), found.prompts
    told = dict(re.findall(r"belongs to the word (\w+) is (\d{7})\.", text))
    assert len(told) == needles
    asked = re.search(r"belongs to the word (\w+) is$", text)[1]
    assert prompt.references == (told[asked],)
    assert engine.codec.decode(prompt.gold) == f" {told[asked]}"
    assert text.count(told[asked]) == 1


def test_a_pass_key_is_told_and_its_prompt_is_what_tells_it(engine, topics):
    found = sample(engine, topics, "passkey")
    text, (prompt,) = words_of(engine, found), found.prompts
    (value,) = re.findall(r"The pass key is (\d{5})\. Remember it\. \1 is the pass key\.\n", text)
    assert prompt.references == (value,)
    assert text.endswith("\n\nThe pass key is")


def test_ten_pass_keys_share_a_text_and_are_all_asked_for(engine, topics):
    found = sample(engine, topics, "tenkeys")
    told = dict(re.findall(r"pass key of the (\w+) is (\d{5})\. Remember it", words_of(engine, found)))
    assert len(found.prompts) == len(told) == TASKS["tenkeys"].questions
    for prompt in found.prompts:
        asked = re.search(r"pass key of the (\w+) is$", engine.codec.decode(prompt.ids))[1]
        assert prompt.references == (told[asked],)
    assert len(found.shared) > 0.95 * len(found.prompts[0].ids)


def test_a_chain_of_variables_leads_to_the_number_in_order(engine, topics):
    found = sample(engine, topics, "vt")
    text, (prompt,) = words_of(engine, found), found.prompts
    value = re.search(r"have the value (\d+) are$", text)[1]
    known: list[str] = []
    for name, source in re.findall(r"^VAR ([A-Z]{5}) = (.+)$", text, re.MULTILINE):
        assert source == (f"VAR {known[-1]}" if known else value)
        known.append(name)
    assert tuple(known) == prompt.references
    assert engine.codec.decode(prompt.gold) == " " + ", ".join(known)


@pytest.mark.parametrize("context", [2500, 7000])
def test_the_common_words_are_the_most_common_ones(engine, topics, context):
    found = sample(engine, topics, "cwe", context)
    listed = re.findall(r"\d+\. (\S+)", words_of(engine, found))
    counts = Counter(listed).most_common()
    assert {word for word, _ in counts[:10]} == set(found.prompts[0].references)
    assert counts[9][1] >= 2 * counts[10][1]
    assert listed != sorted(listed)


def test_common_words_do_not_run_out(engine, topics):
    """A list of 20,000 needs more rare words than there are."""
    draft = TASKS["cwe"].draw(random.Random(0), topics, 10**6)
    counts = Counter(re.findall(r"\d+\. (\S+)", draft.body(20_000))).most_common()
    assert sum(count for _, count in counts) == 20_000
    assert [count for _, count in counts[:10]] == [30] * 10
    assert counts[10][1] <= 6


@pytest.mark.parametrize("context", [2500, 7000])
def test_the_frequent_words_are_those_after_the_dots(engine, topics, context):
    found = sample(engine, topics, "fwe", context)
    body = words_of(engine, found).split("\n\n")[1]
    counts = Counter(body.split()).most_common(5)
    assert counts[0][0] == "..."
    assert tuple(word for word, _ in counts[1:4]) == found.prompts[0].references
    assert counts[1][1] > counts[2][1] > counts[3][1] > counts[4][1]


def test_lines_are_inserted_where_lines_or_sentences_end():
    words = ["One ", "two. ", "three ", "four\n", "five"]
    assert with_inserted(words, [(0.2, "HERE")]) == "One two. \nHERE\nthree four\nfive"
    assert with_inserted(words, [(0.5, "HERE")]) == "One two. \nHERE\nthree four\nfive"
    assert with_inserted(words, [(0.6, "A"), (0.65, "B")]) == "One two. three four\nA\nB\nfive"
    assert with_inserted(words, [(0.0, "HERE")]) == "HERE\nOne two. three four\nfive"
    assert with_inserted(["a ", "b"], [(0.9, "HERE")]) == "a b\nHERE\n"
    assert with_inserted([], [(0.5, "HERE")]) == "HERE\n"


def test_an_excerpt_begins_again_where_the_text_ends():
    text = Text("abc", "a b\nc")
    assert text.excerpt(1, 2) == ["b\n", "c"]
    assert text.excerpt(4, 5) == ["b\n", "c", "a ", "b\n", "c"]


def test_texts_are_files_or_known_by_name(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("Some words.")
    assert Text.load(str(path)).words == ["Some ", "words."]
    assert "def " in Text.load("stdlib").content
    assert len(Text.load("stdlib").content) > 500_000
    assert Text.load("pydoc_data.topics").digest != Text.load("stdlib").digest
    path.write_text(" \n")
    with pytest.raises(UsageError, match="has no words"):
        Text.load(str(path))


@given(per_unit=st.floats(0.2, 30), fixed=st.integers(0, 500), limit=st.integers(500, 50_000), least=st.integers(0, 50))
def test_as_much_filler_as_there_is_room_for(per_unit, fixed, limit, least):
    asked = []

    def size(count: int) -> int:
        asked.append(count)
        return fixed + int(count * per_unit)

    found = largest_that_fits(size, limit, least)
    if size(least) > limit:
        assert found is None
        return
    assert found >= least
    assert limit - SLACK - per_unit - 1 <= size(found) <= limit
    assert len(asked) < 40
