"""A conversation about a long document that goes on, over turns and over days, on the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from magicpig_cli import kernels
from magicpig_cli.cache.index import LshIndex
from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.corpus import natural_text
from magicpig_cli.engine.conversation import Conversation
from magicpig_cli.engine.documents import document_message
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import Finished
from magicpig_cli.sessions import Sessions
from magicpig_cli.ui.chat.state import Chat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

BOOK = natural_text()[:25_000]  # 5.9k tokens of the demo model
GREEDY = GenerationOptions(max_tokens=24, temperature=0.0)


def load(**attention) -> Engine:
    """float32 throughout, as the determinism contract has it."""
    options = AttentionOptions(**{"mode": "exact", "kv_dtype": "float32", **attention})
    return Engine.load(Settings(ModelOptions("demo", dtype="float32", quantize="none"), options, GREEDY))


def answer(engine: Engine, conversation: Conversation, sequence=None) -> Finished:
    request = engine.request("a", conversation.prompt_ids(), GREEDY, sequence)
    (finished,) = (event for event in engine.generate([request]) if isinstance(event, Finished))
    return finished


def test_a_second_turn_reads_only_its_own_tokens(demo_available, record_property):
    engine = load()
    conversation, sequence = Conversation(engine.codec), engine.new_sequence()
    conversation.add_user(document_message([("book", BOOK)], "What is an assert statement?"))
    first = answer(engine, conversation, sequence)
    assert first.prompt_tokens > 5_500
    conversation.add_assistant(first.text)
    conversation.add_user("And which operators are there?")
    second = answer(engine, conversation, sequence)
    own = second.prompt_tokens - second.reused_tokens
    assert own <= 30  # the question, what the template puts around it, and the last token of the answer before
    ratio = second.timing.ttft_s / first.timing.ttft_s
    print(f"first {first.timing.ttft_s:.2f} s, second {second.timing.ttft_s:.3f} s for {own} tokens: {ratio:.3f}")
    record_property("second_turn_ttft", ratio)
    assert ratio <= 0.1
    assert answer(engine, conversation).token_ids == second.token_ids  # read from the start


def test_an_index_grown_over_turns_equals_one_built_at_once(demo_available):
    """From the same rows with the same mean: every query finds the same keys."""
    engine = load(mode="lsh")
    conversation, sequence = Conversation(engine.codec), engine.new_sequence()
    conversation.add_user(document_message([("book", BOOK)], "What is an assert statement?"))
    for question in ("And then?", "Which operators are there?", "What did I ask first?"):
        conversation.add_assistant(answer(engine, conversation, sequence).text)
        conversation.add_user(question)
    engine.runner.build_index(sequence)
    queries = np.random.default_rng(0).integers(0, 1 << engine.plan.K, (1, engine.shape.heads, engine.plan.L))
    for cache in sequence.layers:
        grown = cache.index
        if grown is None:
            continue
        at_once = LshIndex(grown._hasher, cache.store, engine.threads, mean=grown.mean)
        at_once.extend()
        assert grown.length == at_once.length == cache.store.length
        found = [kernels.lsh_sample(queries.astype(np.uint16), [index.sampled_rows()])[0] for index in (grown, at_once)]
        assert sum(map(len, found[0])) > 0
        assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def chat(book: Path, cache: Path, *arguments: str, model: str = "demo") -> tuple[dict, str]:
    done = subprocess.run(
        [
            sys.executable, "-m", "magicpig_cli", "chat", "-m", model, "--temperature", "0", "-n", "8", "--json", "-f",
            str(book), "--prompt-cache", str(cache), "--attention", "lsh", *arguments,
        ],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return json.loads(done.stdout) if done.returncode == 0 else {"returncode": done.returncode}, done.stderr


def test_a_prompt_cache_starts_in_seconds(demo_available, tmp_path, record_property):
    book, cache = tmp_path / "book.txt", tmp_path / "book.cache"
    book.write_text(BOOK, encoding="utf-8")
    first, said = chat(book, cache, "What is an assert statement?")
    assert first["usage"]["reused_tokens"] == 0, said
    second, said = chat(book, cache, "Which operators are there?")
    assert second["usage"]["prompt_tokens"] - second["usage"]["reused_tokens"] <= 30
    ratio = second["timing"]["ttft_s"] / first["timing"]["ttft_s"]
    print(f"first {first['timing']['ttft_s']:.2f} s, from the cache {second['timing']['ttft_s']:.2f} s: {ratio:.3f}")
    record_property("prompt_cache_ttft", ratio)
    assert ratio <= 0.15
    assert second["attention"]["segments"] >= 1

    rebuilt, said = chat(book, cache, "Which operators are there?", "-K", "8", "-L", "75")
    assert rebuilt["usage"]["reused_tokens"] == second["usage"]["reused_tokens"]
    assert [line for line in said.splitlines() if "K 8 here, 10 in the file; L 75 here, 150 in the file" in line]

    refused, said = chat(book, cache, "?", "--kv-dtype", "int8")
    assert refused == {"returncode": 1}
    assert [line for line in said.splitlines() if "number type of K/V int8 here, bfloat16 in the file" in line]

    book.write_text(BOOK[:12_000] + " EDITED " + BOOK[12_000:], encoding="utf-8")
    edited, said = chat(book, cache, "Which operators are there?")
    assert 0.4 < edited["usage"]["reused_tokens"] / second["usage"]["reused_tokens"] < 0.6
    assert [line for line in said.splitlines() if "the text is another than in the file" in line]


def test_another_model_is_refused(demo_available, tmp_path):
    from tests.tiny import tiny_model

    tiny_model("llama", vocab_size=49152).save_pretrained(tmp_path / "other")
    Engine.load(Settings()).tokenizer.save_pretrained(tmp_path / "other")
    book, cache = tmp_path / "book.txt", tmp_path / "book.cache"
    book.write_text(BOOK[:3000], encoding="utf-8")
    chat(book, cache, "?")
    refused, said = chat(book, cache, "?", model=str(tmp_path / "other"))
    assert refused == {"returncode": 1}
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert "model other (weights" in line
    assert "model demo" not in line.split("here")[0]
    assert "in the file" in line


def test_two_hundred_turns(demo_available, tmp_path, monkeypatch, record_property):
    """Memory grows by keys, values and index of the tokens alone; a step is as fast as on a sequence just as long."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    engine = Engine.load(Settings(ModelOptions("demo"), AttentionOptions(mode="lsh")))
    settings = replace(engine.settings, generation=GenerationOptions(max_tokens=8, temperature=0.0))
    sessions = Sessions(lambda _: None, lambda _: None)
    one = Chat(engine, settings, quiet=True, live=False, sessions=sessions)
    sessions.open("long", one)
    one.conversation.add_user(document_message([("book", BOOK[:4000])], "Read this."))
    one.conversation.add_assistant("I have.")
    process = psutil.Process()

    def memory() -> np.ndarray:
        """RSS; bytes of keys, values and index, with segments that are being made beside those they replace."""
        indexes = [layer.index for layer in one.sequence.layers if layer.index is not None]
        held = engine.memory()
        making = sum(index.making_bytes for index in indexes)
        return np.array([process.memory_info().rss, held["kv_bytes"] + held["index_bytes"] + making])

    for number in range(20):
        assert one.turn(f"Number {number}?") is None
    before = memory()
    for number in range(20, 200):
        assert one.turn(f"Number {number}?") is None
    grown, explained = (memory() - before).tolist()
    ids = list(one.sequence.ids)
    sessions.leave(one)
    fresh = engine.new_sequence()
    for _ in engine.runner.prefill(fresh, ids):
        pass
    times: dict[bool, list[float]] = {True: [], False: []}
    for token in ids[-64:]:  # in turns: what else the machine does meets both
        for grew, sequence in ((True, one.sequence), (False, fresh)):
            times[grew].append(engine.runner.decode([sequence], [token]).stats.wall_ms)
    slower = float(np.median(times[True]) / np.median(times[False]))
    print(f"{len(ids):,} tokens: RSS grew by {grown / 2**20:.0f} MiB, K/V and index by {explained / 2**20:.0f} MiB; "
          f"step {slower:.2f} × that of a fresh sequence")  # fmt: skip
    record_property("rss_over_kv_and_index", grown / explained)
    record_property("step_after_200_turns", slower)
    assert len(ids) < engine.context
    assert grown <= explained + (16 << 20)  # messages, and what allocators keep
    assert slower <= 1.25
