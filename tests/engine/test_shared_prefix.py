"""Requests that begin alike: the common part is read once, answers are the same, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicpig_cli.config import GenerationOptions
from magicpig_cli.engine.engine import Engine, Request
from magicpig_cli.engine.prefix import SharedPrefix
from magicpig_cli.events import Failed, Finished, PrefillProgress, Requeued
from tests.engine.test_generate import answers, prompt
from tests.engine.test_scheduler import breaking

DOCUMENT = 1100  # of which two chunks of 512 are shared


def questions(engine: Engine, count: int = 5) -> list[Request]:
    options = GenerationOptions(max_tokens=10, temperature=1.0, seed=3)
    return [
        engine.request(str(i), prompt(DOCUMENT) + prompt(10 + 7 * i, seed=i + 1), options) for i in range(count)
    ]  # fmt: skip


def sharing(requests: list[Request], *tokens: int) -> tuple[list[Request], list[SharedPrefix]]:
    """The requests with a chain of prefixes of these lengths."""
    prefixes: list[SharedPrefix] = []
    for length in tokens:
        if prefixes:
            prefixes[-1].users += 1
        prefixes.append(SharedPrefix(length, prefixes[-1] if prefixes else None))
    prefixes[-1].users += len(requests)
    return [replace(request, prefix=prefixes[-1]) for request in requests], prefixes


@pytest.fixture
def engine(tiny_engine) -> Engine:
    return tiny_engine(context=2048)


@pytest.mark.parametrize("tokens", [(1024,), (512,), (512, 1024)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_those_without_sharing(engine, tokens, batch_size):
    expected = answers(engine, questions(engine), batch_size)
    shared, prefixes = sharing(questions(engine), *tokens)
    found = answers(engine, shared, batch_size)
    for key, finished in expected.items():
        assert found[key].token_ids == finished.token_ids
        assert found[key].reused_tokens == tokens[-1]
    assert all(prefix.sequence is None and prefix.users == 0 for prefix in prefixes)
    assert engine.memory()["kv_bytes"] == 0


def test_the_document_is_read_once(engine):
    shared, _ = sharing(questions(engine), 1024)
    done: dict[str, list[int]] = {}
    for event in engine.generate(shared, 3):
        if isinstance(event, PrefillProgress):
            done.setdefault(event.key, []).append(event.done)
    assert done["0"] == [0, 512, 1024, len(shared[0].prompt_ids)]
    for key, request in zip("1234", shared[1:], strict=True):
        assert done[key] == [1024, len(request.prompt_ids)]


@pytest.mark.parametrize("mode", ["exact", "lsh", "rabitq"])
def test_who_runs_beside_whom_does_not_matter(tiny_engine, mode):
    engine = tiny_engine(mode, context=2048, K=4, L=20, target_error=0.1)

    def run(batch_size: int, keys: str, delay: float = 1.0) -> dict[str, tuple[int, ...]]:
        chosen, _ = sharing([request for request in questions(engine) if request.key in keys], 512, 1024)
        events = engine.generate(chosen, batch_size, delay)
        return {event.key: event.token_ids for event in events if isinstance(event, Finished)}

    expected = run(1, "01234")
    assert run(5, "01234", delay=0.0) == expected
    assert run(2, "42310") == expected
    assert {**run(2, "13"), **run(1, "0"), **run(3, "24")} == expected


@pytest.mark.parametrize("method", ["decode", "prefill"])
def test_memory_that_runs_out(engine, monkeypatch, method):
    expected = answers(engine, questions(engine), 1)
    breaking(monkeypatch, engine, method, lambda call: call == 4, MemoryError())
    shared, prefixes = sharing(questions(engine), 512, 1024)
    events = list(engine.generate(shared, 3))
    assert [event for event in events if isinstance(event, Requeued)]
    found = {event.key: event.token_ids for event in events if isinstance(event, Finished)}
    assert found == {key: finished.token_ids for key, finished in expected.items()}
    assert all(prefix.users == 0 for prefix in prefixes)
    assert engine.memory()["kv_bytes"] == 0


def test_a_prefix_that_cannot_be_read_fails_its_requests_and_no_others(engine, monkeypatch):
    breaking(monkeypatch, engine, "prefill", lambda call: call <= 2, MemoryError())
    shared, _ = sharing(questions(engine), 512)
    alone = questions(engine, 7)[5:]
    events = list(engine.generate([*shared[:2], *alone], 1))
    assert [event.key for event in events if isinstance(event, Failed)] == ["0", "1"]
    assert [event.key for event in events if isinstance(event, Finished)] == ["5", "6"]
    assert engine.memory()["kv_bytes"] == 0


def test_a_closed_run_leaves_nothing(engine):
    shared, prefixes = sharing(questions(engine), 512, 1024)
    events = engine.generate(shared, 3)
    for event in events:
        if isinstance(event, Finished):
            break
    assert engine.memory()["kv_bytes"] > 0
    events.close()
    assert engine.memory()["kv_bytes"] == 0
    assert all(prefix.sequence is None for prefix in prefixes)
