"""Twelve lines of mixed form and length through the demo model: each answer equals the single run (CASES 14, 27)."""

from __future__ import annotations

import json
from pathlib import Path

from magicpig_cli.cli import app
from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.engine.conversation import Conversation
from magicpig_cli.engine.documents import document_message
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import Finished

DOCUMENT = "The ferry to the island leaves at seven in the morning and comes back at noon. " * 12
SYSTEM = "You are a helpful assistant."
QUESTIONS = {  # id → (system, question), answered one by one below
    "colours": (None, "Name three colours."), "hi": (SYSTEM, "Say hi."), "vllm-1": (SYSTEM, "Hello world!"),
    "vllm-2": ("You are an unhelpful assistant.", "Hello world!"), "line-5": (None, "Why?"),
    "line-6": (None, "Count: " + "one, two, three, " * 40), "line-9": (None, "What is 2 + 2?"),
    "ferry": (None, document_message([("ferry.txt", DOCUMENT)], "When does the ferry leave?")),
    "line-11": (None, "好"), "parts": (None, "First.\nSecond."), "line-14": (None, "The end"),
}  # fmt: skip


def openai(custom_id: str, system: str, question: str) -> dict:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": "some/model", "messages": messages, "max_completion_tokens": 8}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def lines() -> list[bytes]:
    """Physical lines: number 8 is bad, two are blank."""
    values = [
        {"id": "colours", "prompt": QUESTIONS["colours"][1]},
        {"id": "hi", "system": SYSTEM, "prompt": "Say hi."},
        openai("vllm-1", *QUESTIONS["vllm-1"]),
        openai("vllm-2", *QUESTIONS["vllm-2"]),
        {"messages": [{"role": "user", "content": "Why?"}]},
        {"prompt": QUESTIONS["line-6"][1]},
        None,
        "bad",
        {"body": {"prompt": "What is 2 + 2?"}, "max_tokens": 8},
        {"id": "ferry", "prompt": "When does the ferry leave?", "file": "ferry.txt"},
        {"prompt": "好"},
        {"id": "parts", "messages": [{"role": "user", "content": [
            {"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]}]},
        None,
        {"prompt": "The end"},
    ]  # fmt: skip
    raw = {None: b"", "bad": b'{"prompt": "x"}{"prompt": "y"}'}
    return [raw[v] if not isinstance(v, dict) else json.dumps(v, ensure_ascii=False).encode() for v in values]


def single_answers() -> dict[str, str]:
    """Each question alone, one engine, float32 rows, exact attention, greedy."""
    engine = Engine.load(
        Settings(ModelOptions("demo", dtype="float32", quantize="none"), AttentionOptions("exact", kv_dtype="float32"))
    )  # fmt: skip
    found = {}
    for key, (system, question) in QUESTIONS.items():
        conversation = Conversation(engine.codec, system)
        conversation.add_user(question)
        options = GenerationOptions(max_tokens=8, temperature=0.0)
        (finished,) = (
            event
            for event in engine.generate([engine.request(key, conversation.prompt_ids(), options)])
            if isinstance(event, Finished)
        )
        found[key] = finished.text
    return found


def test_every_answer_equals_the_single_run(demo_available, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("ferry.txt").write_text(DOCUMENT)
    Path("in.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines()) + b"\r\n\r\n")
    code = app.run(
        ["batch", "in.jsonl", "-m", "demo", "--dtype", "float32", "--kv-dtype", "float32", "--quantize", "none",
         "--attention", "exact", "--temperature", "0", "--max-tokens", "8", "--batch-size", "4", "--json"]
    )  # fmt: skip
    assert code == 3
    summary = json.loads(capsys.readouterr().out)
    assert (summary["total"], summary["ok"], summary["failed"], summary["batch_size"]) == (12, 11, 1, 4)
    (failed,) = [json.loads(line) for line in Path("in.out.errors.jsonl").read_text().splitlines()]
    assert (failed["error"]["line"], failed["custom_id"]) == (8, "line-8")
    records = [json.loads(line) for line in Path("in.out.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = {r["custom_id"]: r["response"]["body"]["choices"][0]["message"]["content"] for r in records}
    assert len(records) == 11
    assert texts == single_answers()
    lengths = {record["response"]["body"]["usage"]["prompt_tokens"] for record in records}
    assert max(lengths) > 5 * min(lengths)  # ragged
    assert len(set(texts.values())) > 6  # the model does read its prompt
