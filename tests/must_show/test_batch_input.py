"""What `magicpig batch` takes from others: ten thousand lines of which few are good, and published example lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from magicpig_cli.events import MEASURING
from magicpig_cli.speeds import MAX_TRIES

LINES = 10_000
GOOD_EVERY = 1000
MOST_ABOVE_MODEL = 300 * 1000**2  # bytes
BAD = (  # physical lines, and the code of their record; None = blank, no record
    (b'{"prompt": "x"', "invalid_json"), (b'{"prompt": "x"}{"prompt": "y"}', "invalid_json"), (b"", None),
    (b'{"prompt": 7}', "invalid_request"), (b'{"prompt": "\xff"}', "invalid_utf8"), (b"[1, 2]", "invalid_request"),
    (b'{"prompt": "x", "max_tokens": -1}', "invalid_request"), (b'{"prompt": "x", "file": "none"}', "invalid_file"),
    (b'{"body": {"messages": []}, "custom_id": ""}', "invalid_request"), (b'{"prompt": NaN}', "invalid_json"),
)  # fmt: skip


def batch(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, summary, stderr) of a run on the demo model."""
    command = [sys.executable, "-m", "magicpig_cli", "batch", *arguments, "-m", "demo", "--json", "--temperature", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def test_ten_thousand_lines_of_which_few_are_good(demo_available, tmp_path):
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    good = b'{"prompt": "Say hi.", "max_tokens": 3}'
    one.write_bytes(good + b"\n")
    expected, lines, number = {}, [], 0
    while len(expected) < LINES - LINES // GOOD_EVERY:
        number += 1
        if number % GOOD_EVERY == 0:
            lines.append(good)
            continue
        line, code = BAD[number % len(BAD)]
        lines.append(line)
        if code:
            expected[number] = code
    many.write_bytes(b"\n".join(lines) + b"\n")
    for _ in range(MAX_TRIES + 1):  # a run that measures the machine first may hold more for that than for the model
        code, alone, said = batch(str(one), "--overwrite")
        assert code == 0
        if MEASURING not in said:
            break
    code, summary, said = batch(str(many))
    assert code == 3
    assert summary["total"] == len(expected) + number // GOOD_EVERY
    assert (summary["ok"], summary["failed"]) == (number // GOOD_EVERY, len(expected))
    records = [json.loads(line) for line in (tmp_path / "many.out.errors.jsonl").read_text().splitlines()]
    assert {record["error"]["line"]: record["error"]["code"] for record in records} == expected
    assert len(records) == len(expected)
    assert all(record["custom_id"] == f"line-{record['error']['line']}" for record in records)
    above = summary["peak_rss_bytes"] - alone["peak_rss_bytes"]
    print(f"{len(expected):,} bad lines: {above / 1e6:.1f} MB above a run of one line")
    assert above <= MOST_ABOVE_MODEL
    assert len(said) < 10_000  # not a screenful per line


def request(custom_id: str, model: str, system: str, user: str, **parameters: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": model, "messages": messages, **parameters}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


# The example lines of the OpenAI Batch guide and API reference, and of vLLM's page on the batch file format.
HELPFUL, UNHELPFUL = "You are a helpful assistant.", "You are an unhelpful assistant."
GPT, LLAMA = "gpt-3.5-turbo-0125", "meta-llama/Meta-Llama-3-8B-Instruct"
PUBLISHED = {
    "openai-guide": [
        request("request-1", GPT, HELPFUL, "Hello world!", max_tokens=1000),
        request("request-2", GPT, UNHELPFUL, "Hello world!", max_tokens=1000),
    ],
    "openai-reference": [request("request-1", "gpt-4o-mini", HELPFUL, "What is 2+2?")],
    "vllm": [
        request("request-1", LLAMA, HELPFUL, "Hello world!", max_completion_tokens=1000),
        request("request-2", LLAMA, UNHELPFUL, "Hello world!", max_completion_tokens=1000),
    ],
}


def read_answers(path: Path) -> dict[str, str]:
    """As scripts read results of OpenAI's Batch API: what did not succeed is passed over."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["error"] is None and record["response"]["status_code"] == 200:
            found[record["custom_id"]] = record["response"]["body"]["choices"][0]["message"]["content"]
    return found


@pytest.mark.slow
def test_published_example_lines_run_unchanged(demo_available, tmp_path):
    for name, lines in PUBLISHED.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, summary, said = batch(str(path))
        assert (code, summary["ok"], summary["failed"]) == (0, len(lines), 0), said
        answers = read_answers(tmp_path / f"{name}.out.jsonl")
        assert answers.keys() == {line["custom_id"] for line in lines}
        assert all(text.strip() for text in answers.values())
        usages = [json.loads(line)["response"]["body"]["usage"]
                  for line in (tmp_path / f"{name}.out.jsonl").read_text().splitlines()]  # fmt: skip
        for usage in usages:
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
        assert f"lines name the model {lines[0]['body']['model']}; demo answers all of them" in said
        assert "ignored keys" not in said
