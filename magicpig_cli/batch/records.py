"""Output lines, as any reader of OpenAI Batch results takes them.

A record's `id` begins with the key of what was asked (RequestMaker.key), by which a later run knows what it answers:
readers take an id for any text, and key and answer are written, copied and lost together.
"""

from __future__ import annotations

import re
import secrets
import time
from typing import Any

from magicpig_cli.batch.line import LineError
from magicpig_cli.events import Finished

_KEY_BYTES = 16
_ID = re.compile(r"batch_req_([0-9a-f]{32})[0-9a-f]{16}")


def answer_record(custom_id: str, key: bytes, model: str, finished: Finished) -> dict[str, Any]:
    """The line of an answer. Times are in milliseconds, `tpot_ms` is the mean over its decode steps."""
    name = secrets.token_hex(16)
    completion_tokens = len(finished.token_ids)
    timing = finished.timing
    body = {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": finished.text},
                "finish_reason": finished.reason,
            }
        ],
        "usage": {
            "prompt_tokens": finished.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": finished.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": finished.reused_tokens},
        },
        "magicpig": {
            "ttft_ms": timing.ttft_s * 1000,
            "tpot_ms": sum(timing.tpot_ms) / len(timing.tpot_ms) if timing.tpot_ms else None,
            "sampled_ratio": finished.sampled_ratio,
            "attn_error_estimate": finished.error_estimate,
            "budget_used": finished.budget,
            "seed": finished.seed,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": _record_id(key), "custom_id": custom_id, "response": response, "error": None}


def error_record(problem: LineError, key: bytes | None = None) -> dict[str, Any]:
    """The line of a failure. key: of a line that could be read, and failed all the same."""
    return {
        "id": _record_id(key or secrets.token_bytes(_KEY_BYTES)),
        "custom_id": problem.custom_id,
        "response": None,
        "error": error_of(problem),
    }


def error_of(problem: LineError) -> dict[str, Any]:
    """What a record says of a failure."""
    return {"code": problem.code, "message": problem.message, "line": problem.number}


def key_of(record: dict[str, Any]) -> bytes | None:
    """The key of what the record answers; None where it is none of ours."""
    found = _ID.fullmatch(record["id"]) if isinstance(record.get("id"), str) else None
    return bytes.fromhex(found[1]) if found else None


def _record_id(key: bytes) -> str:
    return f"batch_req_{key.hex()}{secrets.token_hex(8)}"
