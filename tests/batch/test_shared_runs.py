"""Runs over a scripted engine whose lines begin alike: what is read once, in which order, and what fails alone."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from magicpig_cli.batch.check import check
from magicpig_cli.batch.runner import BatchRunner
from magicpig_cli.batch.writer import Output
from magicpig_cli.config import GenerationOptions
from magicpig_cli.events import Failed
from tests.batch.fakes import FakeEngine

CHUNK = 4
DOCUMENT = "0123456789"  # two chunks and a bit
LINES = (  # alone, about the document, nested in it, alone, about the document
    {"id": "alone", "prompt": "zzzzzzzzz"},
    {"id": "doc-1", "prompt": DOCUMENT + "one"},
    {"id": "part-1", "prompt": DOCUMENT + "twotwotwo"},
    {"id": "other", "prompt": "y"},
    {"id": "part-2", "prompt": DOCUMENT + "twotwotwa"},
    {"id": "doc-2", "prompt": DOCUMENT[:8] + "x"},
)


class Answered(frozenset):
    """Places that an earlier run has answered."""

    failed = 0

    @property
    def answered(self) -> int:
        return len(self)


@pytest.fixture
def run(source, maker):
    """`run(*lines, …)`: all of it; what came out, and the engine."""

    def start(
        *lines, share: bool = True, ordered: bool = False, batch_size: int = 1, places: Iterable[int] | None = None,
        engine: FakeEngine | None = None, between=lambda: None,
    ) -> SimpleNamespace:  # fmt: skip
        opened = source(*lines)
        chosen = maker(raw=True, chunk=CHUNK, defaults=GenerationOptions(max_tokens=2))
        checked = check(opened, chosen, lambda lines, done: None, share=share)
        between()
        stream, engine = io.BytesIO(), engine or FakeEngine()
        kept = Answered() if places is None else Answered(set(range(len(lines))) - set(places))
        runner = BatchRunner(
            opened, checked, chosen, Output.to_stream(stream), ordered=ordered, stop=lambda: False, kept=kept
        )
        for _ in runner.run(engine, batch_size):
            pass
        records = [json.loads(line) for line in stream.getvalue().splitlines()]
        return SimpleNamespace(
            ids=[record["custom_id"] for record in records], engine=engine, checked=checked,
            records={record["custom_id"]: record for record in records},
        )  # fmt: skip

    return start


def cached(found: SimpleNamespace) -> dict[str, int]:
    """id → reused prompt tokens of its answer."""
    usages = {key: record["response"]["body"]["usage"] for key, record in found.records.items()}
    return {key: usage["prompt_tokens_details"]["cached_tokens"] for key, usage in usages.items()}


def test_what_lines_share_is_read_once_and_said(run):
    found = run(*LINES)
    assert found.ids == ["alone", "doc-1", "part-1", "part-2", "doc-2", "other"]
    assert cached(found) == {"alone": 0, "doc-1": 8, "part-1": 16, "part-2": 16, "doc-2": 8, "other": 0}
    assert found.engine.read_tokens == found.checked.prompt_tokens - found.checked.sharing.saved_tokens()
    assert found.checked.sharing.saved_tokens() == 3 * 8 + 8
    assert found.engine.read == {}  # all given back
    assert found.engine.most_prefixes == 2


def test_without_sharing_everything_is_read_in_the_order_of_the_input(run):
    found = run(*LINES, share=False)
    assert found.ids == [line["id"] for line in LINES]
    assert set(cached(found).values()) == {0}
    assert found.engine.read_tokens == found.checked.prompt_tokens


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_the_same_with_and_without_and_in_order_if_wanted(run, batch_size):
    found = [run(*LINES, share=share, ordered=True, batch_size=batch_size) for share in (True, False)]
    assert [job.ids for job in found] == [[line["id"] for line in LINES]] * 2
    texts = [{key: r["response"]["body"]["choices"] for key, r in job.records.items()} for job in found]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("places", [{1}, {2, 5}, {0, 2, 4}, set(), {0, 1, 2, 3, 4, 5}])
def test_only_lines_that_run_count_but_all_decide_what_is_shared(run, places):
    whole, part = run(*LINES), run(*LINES, places=places)
    assert set(part.ids) == {LINES[place]["id"] for place in places}
    assert part.ids == [key for key in whole.ids if key in part.ids]
    assert cached(part) == {key: tokens for key, tokens in cached(whole).items() if key in part.ids}
    assert part.engine.read == {}


def test_a_line_that_fails_leaves_its_prefix_to_the_others(run):
    failing = [{"id": "no", "prompt": "x2345678no"}, {"id": "nor", "prompt": "x2345678nor"}]
    found = run(*LINES, *failing, engine=FakeEngine(fails=frozenset({ord("x")})))
    assert {key for key, record in found.records.items() if record["error"]} == {"no", "nor"}
    assert found.engine.read == {}


def test_a_document_that_changes_after_the_check_fails_its_lines_alone(run, tmp_path):
    path, other = tmp_path / "d.txt", tmp_path / "e.txt"
    path.write_text(DOCUMENT)
    other.write_text(DOCUMENT)
    lines = [{"id": f"{name}-{n}", "prompt": f"q{n}", "file": f"{name}.txt"} for n in range(2) for name in "de"]
    for changed in ("9123456789", DOCUMENT + " ", DOCUMENT[:-1] + "x"):  # in the prefix, longer, after it
        found = run(*lines, between=lambda text=changed: path.write_text(text))
        errors = {key: record["error"] for key, record in found.records.items() if record["error"]}
        assert {key: (error["code"], error["line"]) for key, error in errors.items()} == {
            "d-0": ("input_changed", 1), "d-1": ("input_changed", 3),
        }  # fmt: skip
        assert "document has changed" in errors["d-0"]["message"]
        assert {key for key, record in found.records.items() if not record["error"]} == {"e-0", "e-1"}
        assert found.engine.read == {}
        path.write_text(DOCUMENT)


def test_memory_that_is_short_at_run_time_has_the_same_code_as_at_the_check(run):
    class Short(FakeEngine):
        def generate(self, requests, batch_size, max_delay_s):
            for request in requests:
                yield Failed(request.key, "MemoryBudgetError", "a sequence takes 2.0 GiB, but 1.0 GiB are free")

    found = run({"id": "a", "prompt": "x"}, engine=Short())
    assert found.records["a"]["error"]["code"] == "insufficient_memory"
    assert "2.0 GiB" in found.records["a"]["error"]["message"]
