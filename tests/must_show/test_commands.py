"""What a newcomer meets: the commands of the roadmap's first step, run as processes on the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from magicpig_cli.config import AttentionOptions, GenerationOptions, ModelOptions, Settings
from magicpig_cli.engine.engine import Engine
from magicpig_cli.events import Finished
from tests import warm

PARITY = ("--dtype", "float32", "--kv-dtype", "float32", "--quantize", "none", "--attention", "exact")


ENVIRONMENT = {**os.environ, "NO_COLOR": "", "HF_HUB_OFFLINE": "1"}


def magicpig(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return warm.run(*arguments, input=stdin, env=ENVIRONMENT)


def magicpig_from_the_start(*arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "magicpig_cli", *arguments], capture_output=True, text=True, env=ENVIRONMENT,
        timeout=timeout, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def test_chat_gives_what_transformers_generates(demo_available):
    """Token by token in this process, and as text through the command."""
    question = "Name three colours."
    options = ModelOptions("demo", dtype="float32", quantize="none")
    engine = Engine.load(Settings(options, AttentionOptions("exact", kv_dtype="float32")))
    ids = engine.codec.encode_chat([{"role": "user", "content": question}])
    request = engine.request("a", ids, GenerationOptions(max_tokens=48, temperature=0.0))
    (finished,) = (event for event in engine.generate([request]) if isinstance(event, Finished))
    model = engine.runner.model
    model.set_attn_implementation("eager")
    tokens = torch.tensor([ids])
    generated = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=48, pad_token_id=0
    )
    wanted = generated[0, len(ids) :].tolist()
    assert list(finished.token_ids) == wanted
    done = magicpig_from_the_start(
        "chat", "-m", "demo", *PARITY, "--temperature", "0", "--max-tokens", "48", "--json", question
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["text"] == engine.tokenizer.decode(wanted, skip_special_tokens=True)
    assert document["usage"] == {"prompt_tokens": len(ids), "completion_tokens": len(wanted), "reused_tokens": 0}
    assert set(document) == {
        "model", "text", "finish_reason", "usage", "timing", "attention", "memory", "device", "isa", "threads", "seed",
    }  # fmt: skip
    assert set(document["timing"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "tpot_ms"}
    assert set(document["timing"]["tpot_ms"]) == {"mean", "p50", "p90", "p99"}
    assert set(document["attention"]) == {
        "mode", "sampler", "K", "L", "budget", "tail", "bits", "target_error", "sink", "local", "dense_layers",
        "sampled_ratio", "budget_used", "attn_error_estimate", "segments",
    }  # fmt: skip
    assert set(document["memory"]) == {"kv_bytes", "index_bytes", "rss_bytes", "vram_bytes"}


def test_piped_question_leaves_plain_text(demo_available):
    done = magicpig("chat", "-m", "demo", "--max-tokens", "24", stdin="Say hi\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "\x1b" not in done.stdout
    assert "tok/s" in done.stderr


def test_documents_from_stdin_and_files(demo_available, tmp_path):
    path = tmp_path / "notes [INST].txt"
    path.write_text("The ferry leaves at seven. [/'A', 1] is not markup.\n", encoding="utf-8")
    done = magicpig(
        "chat", "-m", "demo", "--max-tokens", "4", "--json", "-f", str(path), "-f", "-", "When does the ferry leave?",
        stdin="A second document.\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] > 40


def test_piped_text_beside_a_question_is_a_document(demo_available):
    def prompt_tokens(stdin: str | None, *arguments: str) -> int:
        done = magicpig("chat", "-m", "demo", "-n", "1", "--json", *arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["usage"]["prompt_tokens"]

    alone = prompt_tokens(None, "What is it?")
    assert prompt_tokens("A long document of many words.\n", "What is it?") >= alone + 6
    # Documents alone are one turn as well, not a conversation on a stdin that has ended.
    assert prompt_tokens("A long document of many words.\n", "-f", "-") > 30


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (["chat", "-m", "no/such-model", "hi", "--offline"], None, 1, "no/such-model"),
        (["chat", "-m", "demo"], "", 2, "empty"),
        (["chat", "-m", "demo"], None, 2, "empty"),
        (["chat", "-m", "demo", ""], None, 2, "empty"),
        (["chat", "-m", "demo", "-f", "-", "hi"], "", 1, "stdin is empty"),
        (["chat", "-m", "demo", "-f", "LICENSE", "--json"], "\0", 1, "not UTF-8"),
        (["bench", "-m", "demo", "--output", "/no/such/place"], None, 2, "/no/such/place"),
        (["chat", "-m", "demo", "-f", "no/such/file", "hi"], None, 1, "no/such/file"),
        (["chat", "-m", "demo", "-n", "9000", "hi"], None, 1, "8,192"),
        (["chat", "-m", "demo", "-c", "9k", "hi"], None, 1, "9,216"),
        (["chat", "-m", "demo", "-c", "9q", "hi"], None, 2, "9q"),
        (["bench", "-m", "demo", "--context", "64"], None, 2, "64"),
        (["bench", "-m", "demo", "--attention", "magic"], None, 2, "magic"),
        (["bench", "-m", "demo", "--context", "9k", "--fill", "real"], None, 1, "8,192"),
    ],
)
def test_wrong_use_is_one_line_and_a_hint(demo_available, arguments, stdin, code, message):
    done = magicpig(*arguments, stdin=stdin)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert lines[-2].startswith("error: ")
    assert message in lines[-2]
    assert lines[-1].startswith("hint: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_bench_from_8k_to_96k(demo_available):
    """In one run, beyond the model's own context: of what a long context adds to a step, sampling adds a part only."""
    done = magicpig_from_the_start(
        "bench", "-m", "demo", "--contexts", "8k,32k,96k", "--fill", "tiled", "--gen-tokens", "16", "--reps", "3",
        "--output-format", "json", timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {(row["mode"], row["context"]): row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {(mode, n) for mode in ("exact", "lsh") for n in (8192, 32768, 98304)}
    for (_, context), row in rows.items():
        assert row["fill"] == "tiled" or context == 8192  # which a fast machine reads in the time that filling may take
        assert row["beyond_model_context"] == (context > 8192)
        assert set(row["stages_ms"]) == {"dense", "hash", "retrieve", "attend", "merge", "window", "other"}
        assert sum(row["stages_ms"].values()) == pytest.approx(row["tpot_ms"]["mean"], rel=0.01)
        assert len(row["samples_ms"]) == 48
        assert row["memory"]["kv_bytes"] > (context - 300) * 30 * 3 * 256
    for context in (8192, 32768, 98304):
        lsh = rows["lsh", context]
        assert 0.005 < lsh["sampled_ratio"]["mean"] < 0.15
        assert lsh["sampled_ratio"]["per_layer"][0] is None  # layer 0 is dense
        assert lsh["memory"]["index_bytes"] > (context - 300) * 29 * 3 * 2 * 150
        assert 0 < lsh["attn_error"]["p50"] < 0.5
    assert rows["lsh", 32768]["speedup_vs_exact"] > 1

    def growth(mode: str) -> float:
        return rows[mode, 98304]["tpot_ms"]["p50"] - rows[mode, 8192]["tpot_ms"]["p50"]

    print(f"8k to 96k: exact {growth('exact'):.1f} ms, lsh {growth('lsh'):.1f} ms")
    assert growth("lsh") <= 0.4 * growth("exact")
