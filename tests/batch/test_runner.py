"""A run over a scripted engine: which records come out, in which order, and what is left when it ends early."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from magicpig_cli.batch.reader import JsonlSource
from magicpig_cli.batch.records import answer_record
from magicpig_cli.batch.runner import BatchRunner, Progress
from magicpig_cli.batch.writer import Output
from magicpig_cli.config import GenerationOptions
from magicpig_cli.events import Finished, Timing
from tests.batch.fakes import FakeEngine

LINES = (
    {"id": "long", "prompt": "a", "max_tokens": 9},
    {"id": "bad", "prompt": 1},
    {"id": "short", "prompt": "bc", "max_tokens": 2},
    {"id": "middle", "prompt": "def", "max_tokens": 4},
)


class Run:
    """One run into memory."""

    def __init__(self, opened: JsonlSource, checked, maker, **options: Any) -> None:
        self.stream = io.BytesIO()
        self.stopped = False
        chosen = maker(raw=True, defaults=options.pop("defaults", GenerationOptions()))
        self.runner = BatchRunner(
            opened, checked(opened, chosen), chosen, Output.to_stream(self.stream),
            ordered=options.pop("ordered", False), stop=lambda: self.stopped,
        )  # fmt: skip

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    @property
    def ids(self) -> list[str]:
        return [record["custom_id"] for record in self.records]

    def all(self, engine: FakeEngine | None, batch_size: int = 2) -> Progress:
        for _ in self.runner.run(engine, batch_size):
            pass
        return self.runner.progress


@pytest.fixture
def run(source, checked, maker):
    return lambda *lines, **options: Run(source(*lines), checked, maker, **options)


def test_failures_first_then_answers_as_they_are_finished(run):
    job = run(*LINES)
    progress = job.all(FakeEngine())
    assert job.ids == ["bad", "short", "middle", "long"]
    assert (progress.total, progress.done, progress.ok, progress.failed) == (4, 4, 3, 1)
    assert (progress.prompt_tokens, progress.completion_tokens) == (6, 15)
    assert progress.reading is None


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_ordered_keeps_the_order_of_the_input(run, batch_size):
    job = run(*LINES, ordered=True)
    job.all(FakeEngine(), batch_size)
    assert job.ids == ["long", "bad", "short", "middle"]


def test_records_are_written_while_the_run_goes_on(run):
    job = run(*LINES)
    seen = [len(job.records) for _ in job.runner.run(FakeEngine(), 2)]
    assert seen[0] == 1
    assert sorted(seen) == seen
    assert set(seen) == {1, 2, 3, 4}


def test_several_are_decoded_together_and_taken_when_there_is_room(run):
    engine = FakeEngine()
    job = run(*LINES)
    pulled = [list(engine.pulled) for _ in job.runner.run(engine, 2)]
    assert max(engine.batches) == 2
    assert len(engine.batches) == 8  # the steps of the long one
    assert ["0", "2"] in pulled  # the third one waits
    progress = job.runner.progress
    assert progress.decode_tokens == sum(engine.batches) == 12
    assert progress.decode_tok_s == pytest.approx(12 / 0.08)


def test_answer_record_has_the_documented_form(run):
    job = run({"id": "a", "prompt": "bc", "max_tokens": 3, "seed": 7})
    job.all(FakeEngine())
    (record,) = job.records
    body = record["response"]["body"]
    assert set(record) == {"id", "custom_id", "response", "error"}
    assert set(record["response"]) == {"status_code", "request_id", "body"}
    assert set(body) == {"id", "object", "created", "model", "choices", "usage", "magicpig"}
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    assert isinstance(body["created"], int)
    assert body["created"] > 1.7e9
    message = {"role": "assistant", "content": "98 99 0"}
    assert body["choices"] == [{"index": 0, "message": message, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert body["magicpig"] == {
        "ttft_ms": 125.0, "tpot_ms": 10.0, "sampled_ratio": 0.25, "attn_error_estimate": None, "budget_used": None,
        "seed": 7,
    }  # fmt: skip


def test_one_token_answers_have_no_time_per_token():
    finished = Finished("0", "stop", (5,), "x", "", 2, 0, Timing(0.1, 0.1, ()), sampled=0, offloaded=0, seed=1)
    body = answer_record("a", b"k" * 16, "fake", finished)["response"]["body"]
    assert body["magicpig"]["tpot_ms"] is None
    assert body["magicpig"]["sampled_ratio"] is None  # exact attention
    assert body["choices"][0]["finish_reason"] == "stop"


def test_error_record_has_the_documented_form(run):
    job = run(b"", {"prompt": 1})
    job.all(None)
    (record,) = job.records
    assert set(record) == {"id", "custom_id", "response", "error"}
    assert (record["custom_id"], record["response"]) == ("line-2", None)
    assert set(record["error"]) == {"code", "message", "line"}
    assert (record["error"]["code"], record["error"]["line"]) == ("invalid_request", 2)


def test_request_ids_are_unique(run):
    job = run(*({"prompt": "same", "max_tokens": 1} for _ in range(20)))
    job.all(FakeEngine())
    for key in ("id", "response"):
        found = {json.dumps(record[key] if key == "id" else record[key]["request_id"]) for record in job.records}
        assert len(found) == 20


def test_a_request_that_the_engine_refuses_fails_alone(run):
    job = run({"id": "no", "prompt": "xa"}, {"id": "yes", "prompt": "b"})
    progress = job.all(FakeEngine(fails=frozenset({ord("x")})))
    assert (progress.ok, progress.failed) == (1, 1)
    failed = next(record for record in job.records if record["custom_id"] == "no")
    assert failed["error"] == {"code": "request_failed", "message": "it would not", "line": 1}
    smaller = run({"id": "no", "prompt": "abc"}, {"id": "yes", "prompt": "b"})
    assert smaller.all(FakeEngine(context=3)).failed == 1
    assert smaller.records[0]["error"]["code"] == "request_failed"


@pytest.mark.parametrize("ordered", [False, True])
def test_an_input_that_changes_meanwhile_fails_its_lines(source, run, tmp_path, ordered):
    document, path = tmp_path / "d.txt", tmp_path / "in.jsonl"
    document.write_text("text")
    job = run(
        {"id": "a", "prompt": "xx"}, {"id": "b", "prompt": "yy"}, {"id": "c", "prompt": "zz", "file": "d.txt"},
        ordered=ordered,
    )  # fmt: skip
    document.unlink()
    path.write_bytes(path.read_bytes().replace(b"yy", b"zz"))
    progress = job.all(FakeEngine(), 1)
    assert (progress.ok, progress.failed) == (1, 2)
    errors = {record["custom_id"]: record["error"] for record in job.records}
    assert errors["a"] is None
    assert (errors["b"]["code"], errors["b"]["line"]) == ("input_changed", 2)
    assert (errors["c"]["code"], errors["c"]["line"]) == ("invalid_file", 3)
    if ordered:
        assert job.ids == ["a", "b", "c"]


@pytest.mark.parametrize("ordered", [False, True])
def test_stopping_keeps_what_is_finished(run, ordered):
    job = run(*LINES, ordered=ordered)
    engine = FakeEngine()
    for _ in job.runner.run(engine, 2):
        job.stopped = engine.finished == ["2"]
    assert job.ids == ["bad", "short"]
    assert job.runner.progress.done == 2 < job.runner.progress.total
    assert engine.pulled == ["0", "2"]  # nothing new is begun


def test_a_device_that_breaks_keeps_what_is_finished(run):
    job = run(*LINES, ordered=True)
    with pytest.raises(RuntimeError, match="gone"):
        job.all(FakeEngine(breaks_at=6))
    assert job.ids == ["bad", "short", "middle"]
    assert job.runner.progress.ok == 2


def test_seeds_and_parameters_reach_the_engine(run):
    job = run({"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "max_tokens": 3}, defaults=GenerationOptions(5))
    job.all(FakeEngine())
    usage = {record["custom_id"]: record["response"]["body"] for record in job.records}
    assert usage["a"]["usage"]["completion_tokens"] == 5
    assert usage["b"]["usage"]["completion_tokens"] == 3
    assert usage["a"]["magicpig"]["seed"] != usage["b"]["magicpig"]["seed"]
