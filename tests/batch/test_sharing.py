"""Which prefixes lines share, against all of them compared one by one; order of running, users, and memory."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli.batch.sharing import Prefixes, PrefixFinder, Sharing, prompt_hash, prompt_hashes
from magicpig_cli.engine.prefix import SharedPrefix

Prompt = tuple[int, ...]


def found(prompts: list[Prompt], chunk: int) -> Sharing:
    finder = PrefixFinder(chunk)
    for prompt in prompts:
        finder.add(prompt)
    return finder.find()


@st.composite
def inputs(draw) -> tuple[list[Prompt], int]:
    """(prompts of at least one token that often begin alike, chunk)."""
    beginnings = draw(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=4))
    endings = st.lists(st.integers(0, 2), min_size=1, max_size=6)
    prompts = draw(st.lists(st.tuples(st.sampled_from(beginnings), endings), max_size=12))
    return [tuple(start + end) for start, end in prompts], draw(st.integers(1, 4))


def beginnings(prompt: Prompt, chunk: int) -> list[Prompt]:
    """What may be shared of a prompt: whole chunks, without its last token. The shortest first."""
    return [prompt[:end] for end in range(chunk, len(prompt), chunk)]


def kept(prompts: list[Prompt], chunk: int) -> set[Prompt]:
    """Prefixes of two lines or more that do not all go on with the same chunk."""
    counts = Counter(start for prompt in prompts for start in beginnings(prompt, chunk))
    longer = {start[:-chunk]: max(counts[other] for other in counts if other[:-chunk] == start[:-chunk] and other)
              for start in counts}  # fmt: skip
    return {start for start, count in counts.items() if count > 1 and longer.get(start, 0) < count}


def chains(sharing: Sharing, prompts: list[Prompt]) -> list[list[Prompt]]:
    """Of each line, its prefixes as token ids."""
    return [
        [prompt[: sharing.tokens[prefix]] for prefix in sharing.chain(number)]
        for prompt, number in zip(prompts, sharing.of_line, strict=True)
    ]


@given(inputs())
def test_prefixes_are_those_of_a_comparison_one_by_one(case):
    prompts, chunk = case
    sharing = found(prompts, chunk)
    wanted = kept(prompts, chunk)
    assert chains(sharing, prompts) == [[start for start in beginnings(p, chunk) if start in wanted] for p in prompts]
    assert len(sharing.tokens) == len(wanted)
    read = {start[:end] for start in wanted for end in range(chunk, len(start) + 1, chunk)}
    own = sum(len(prompt) - sharing.shared_tokens(line) for line, prompt in enumerate(prompts))
    assert sharing.saved_tokens() == sum(map(len, prompts)) - own - chunk * len(read)
    assert sharing.saved_tokens() >= chunk * bool(wanted)


@given(inputs())
def test_lines_of_a_prefix_follow_each_other_by_first_appearance(case):
    prompts, chunk = case
    sharing = found(prompts, chunk)
    first: dict[Prompt, int] = {}
    all_chains = chains(sharing, prompts)
    for line, chain in enumerate(all_chains):
        for start in chain:
            first.setdefault(start, line)
    keys = [([first[start] for start in chain], line) for line, chain in enumerate(all_chains)]
    assert list(sharing.order) == sorted(range(len(prompts)), key=lambda line: [*keys[line][0], line])
    for number, tokens in enumerate(sharing.tokens):
        has = [number in sharing.chain(sharing.of_line[line]) for line in sharing.order]
        assert sum(a != b for a, b in zip([False, *has], [*has, False], strict=True)) == 2, tokens  # one block
    if not sharing.tokens:
        assert list(sharing.order) == list(range(len(prompts)))


@given(inputs(), st.randoms(use_true_random=False), st.floats(0, 1))
def test_prefixes_end_with_their_last_user_and_few_live_at_once(case, chance, share):
    """Whatever lines run: users are these lines and longer prefixes that have users, and the last frees it."""
    prompts, chunk = case
    sharing = found(prompts, chunk)
    runs = {line for line in range(len(prompts)) if chance.random() < share}
    prefixes = Prefixes(sharing, runs.__contains__)
    seen: dict[int, SharedPrefix] = {}
    for line in filter(runs.__contains__, sharing.order):
        prefix = prefixes.of(line)
        chain = list(prefix.chain())[::-1] if prefix else []
        assert [p.tokens for p in chain] == [sharing.tokens[n] for n in sharing.chain(sharing.of_line[line])]
        for number, one in zip(sharing.chain(sharing.of_line[line]), chain, strict=True):
            assert seen.setdefault(number, one) is one  # made once
            assert one.users > 0
        living = sum(one.users > 0 for one in seen.values())
        assert living == len(chain)  # one line at a time: none of another group
        if prefix:
            prefix.release()
    assert all(prefix.users == 0 for prefix in seen.values())
    assert set(seen) == {number for line in runs for number in sharing.chain(sharing.of_line[line])}


def test_users_of_nested_prefixes():
    prompts = [(1, 1, 2, 2, 9), (1, 1, 2, 2, 8), (1, 1, 3), (7,), (1, 1, 2, 2, 7)]
    sharing = found(prompts, 2)
    assert list(sharing.tokens) == [2, 4]
    assert list(sharing.parents) == [-1, 0]
    assert list(sharing.order) == [0, 1, 4, 2, 3]
    assert list(sharing.users(lambda line: True)) == [2, 3]  # line 2 and the longer prefix; lines 0, 1, 4
    assert list(sharing.users(lambda line: line in (1, 3))) == [1, 1]
    assert list(sharing.users(lambda line: line == 2)) == [1, 0]
    assert (sharing.saved_tokens(), sharing.begins_at(1), sharing.shared_tokens(3)) == (2 * 3 + 2 * 2, 2, 0)


def test_the_last_token_is_never_shared():
    assert list(found([(1, 2), (1, 2)], 2).tokens) == []
    assert list(found([(1, 2, 3), (1, 2, 3)], 2).tokens) == [2]
    assert list(found([(1, 2, 3, 4, 5)] * 3, 2).tokens) == [4]  # nothing parts at 2


def test_a_conversation_that_grows_line_by_line_is_one_chain():
    """Longer than Python's stack: nothing here recurses."""
    prompts = [tuple(range(2 * turns + 1)) for turns in range(1, 1500)]
    sharing = found(prompts, 2)
    assert list(sharing.order) == list(range(len(prompts)))
    assert list(sharing.parents) == list(range(-1, len(prompts) - 2))
    prefixes = Prefixes(sharing, lambda line: True)
    last = None
    for line in sharing.order:
        last = prefixes.of(line)
        if line < len(prompts) - 1:
            assert last is not None
            assert last.users == 2  # this line, and the longer prefix or, in the end, the last line
    taken = prefixes.of(len(prompts) - 1)
    assert taken is last  # its own prompt is the longest; it shares all but its last chunk


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 9))
def test_hashes_depend_on_the_ids_before_them_alone(ids, chunk):
    hashes, whole = prompt_hashes(ids, chunk)
    assert len(hashes) == (len(ids) - 1) // chunk
    assert whole == prompt_hash(ids)
    for number, value in enumerate(hashes, start=1):
        assert value == prompt_hash(ids[: number * chunk])
    longer, _ = prompt_hashes([*ids, 5], chunk)
    assert longer[: len(hashes)] == hashes
    assert prompt_hash([*ids, 5]) != whole
    assert prompt_hash([ids[0] ^ 1, *ids[1:]]) != whole


@pytest.mark.parametrize("shared", [0, 900])
def test_prompts_are_not_kept(shared):
    """At most 10 bytes per chunk while three million tokens go through, and little more while they are compared."""
    chance = np.random.default_rng(0)
    head = chance.integers(0, 1 << 17, shared * 64, dtype=np.uint32)
    finder = PrefixFinder(64)
    chunks = 0
    tracemalloc.start()
    try:
        for _ in range(50):
            ids = np.concatenate([head, chance.integers(0, 1 << 17, (1000 - shared) * 64, dtype=np.uint32)])
            finder.add(ids)
            chunks += (len(ids) - 1) // 64
            del ids
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        sharing = finder.find()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10 * chunks + 10_000
    assert peak < held + 60 * chunks
    assert list(sharing.tokens) == ([shared * 64] if shared else [])
