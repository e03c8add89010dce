"""Output lines, as any reader of OpenAI Batch results takes them."""

from __future__ import annotations

import time
import uuid
from typing import Any

from magicpig_cli.batch.line import LineError
from magicpig_cli.events import Finished


def answer_record(custom_id: str, model: str, finished: Finished) -> dict[str, Any]:
    """The line of an answer. Times are in milliseconds, `tpot_ms` is the mean over its decode steps."""
    name = uuid.uuid4().hex
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
            "seed": finished.seed,
        },
    }
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": None}


def error_record(problem: LineError) -> dict[str, Any]:
    """The line of a failure."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": problem.custom_id,
        "response": None,
        "error": {"code": problem.code, "message": problem.message, "line": problem.number},
    }
