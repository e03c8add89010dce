"""The comparison with llama.cpp: who is measured where, the line, the document; and the real thing, tiny."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from magicpig_cli.bench import llama_cpp
from magicpig_cli.bench.peers import Line, PeersRequest, document, measure
from magicpig_cli.errors import MagicpigError
from tests.bench.scripts import SCRIPTS, load_script

SCRIPT = SCRIPTS / "bench_peers.py"
REQUEST = PeersRequest(
    contexts=(2048, 6144, 16384, 32768), points=(1024, 2048, 4096, 8192), real=8192, prefill=6144,
    gen_tokens=4, rounds=3,
)  # fmt: skip
TEXT = list(range(5000)) + list(range(3192))


class FakeTool:
    """Takes base + slope·(tokens before the first generated one) milliseconds per token, and writes down its calls."""

    def __init__(self, name: str, weights: str, base: float, slope: float, prefill_s: float) -> None:
        self.name, self.weights, self.base, self.slope, self.prefill_s = name, weights, base, slope, prefill_s
        self.calls: list[tuple[int, int]] = []

    def prefill(self, ids: list[int]) -> float:
        self.calls.append((len(ids), 0))
        return self.prefill_s

    def decode(self, ids: list[int], count: int) -> float:
        assert ids[:5000] == TEXT[: min(5000, len(ids))]
        self.calls.append((len(ids), count))
        return self.base + self.slope * len(ids)


class FakePeer(FakeTool):
    def __init__(self, flash: bool, *rest: float) -> None:
        super().__init__("llama.cpp", "Q4_1", *rest)
        self.flash = flash


@pytest.fixture
def tools():
    ours = [FakeTool("magicpig", "f32", 30.0, 0.001, 50.0), FakeTool("magicpig", "int8", 10.0, 0.001, 40.0)]
    return ours, [FakePeer(True, 10.0, 0.009, 80.0), FakePeer(False, 12.0, 0.008, 90.0)]


def run(tools):
    ours, peers = tools
    *progress, measured = measure(ours, peers, TEXT, REQUEST)
    assert all(isinstance(line, str) for line in progress)
    return document({"model": "demo"}, ours, peers, measured, REQUEST)


def test_line_goes_through_points_on_a_line_and_between_others():
    line = Line.through({1000: 19.0, 2000: 28.0, 8000: 82.0})
    assert line.at(32000) == pytest.approx(298.0)
    assert line.base_ms == pytest.approx(10.0)
    off = Line.through({0: 1.0, 1: 3.0, 2: 2.0})  # least squares: slope 1/2, mean 2 at 1
    assert (off.at(1), off.ms_per_token) == (pytest.approx(2.0), pytest.approx(0.5))


def test_the_faster_variant_counts_and_the_line_is_read_beyond_the_model(tools):
    found = run(tools)
    peer = {row["context"]: row for row in found["rows"] if row["tool"] == "llama.cpp"}
    assert {c: row["fitted"] for c, row in peer.items()} == {
        1024: False, 2048: False, 4096: False, 6144: False, 8192: False, 16384: True, 32768: True,
    }  # fmt: skip
    assert peer[1024]["tpot_ms"] == peer[1024]["variants_ms"]["flash_on"] == pytest.approx(10 + 0.009 * 1019)
    assert peer[32768]["tpot_ms"] == peer[32768]["variants_ms"]["flash_off"] == pytest.approx(12 + 0.008 * 32763)
    assert set(peer[2048]) == {"tool", "weights", "context", "tpot_ms", "fitted", "variants_ms"}


def test_document_has_the_keys_of_the_contract(tools):
    found = run(tools)
    assert set(found) == {"meta", "rows", "ratio", "ratios", "prefill"}
    mine = [row for row in found["rows"] if row["tool"] == "magicpig"]
    assert [(row["weights"], row["context"], row["fill"], row["fitted"]) for row in mine] == [
        (weights, context, fill, False)
        for weights in ("f32", "int8")
        for context, fill in ((2048, "real"), (6144, "real"), (16384, "tiled"), (32768, "tiled"))
    ]
    assert list(found["ratio"])[:3] == ["2k", "6k", "32k"]
    assert found["ratio"] == {key: found["ratios"]["int8"][key] for key in found["ratio"]}
    assert found["ratio"]["6k"] == pytest.approx((12 + 0.008 * 6139) / (10 + 0.001 * 6139))
    assert found["meta"] == {"model": "demo", "gen_tokens": 4, "rounds": 3, "ratio_weights": "int8"}
    assert found["prefill"]["tokens"] == 6139
    assert found["prefill"]["ratio"] == {"f32": pytest.approx(80 / 50), "int8": pytest.approx(2.0)}
    assert json.loads(json.dumps(found)) == found


def test_tools_take_turns_and_read_no_token_twice(tools):
    run(tools)
    (mine, *_), (peer, *_) = tools
    rounds = [(n - 5, 4) for n in (16384, 32768, 6144, 2048) for _ in range(REQUEST.rounds)]
    assert [call for call in mine.calls if call[1] == 4] == rounds
    assert peer.calls[:2] == [(128, 0), (6139, 0)]
    lengths = [n for n, _ in peer.calls[2:]]
    assert lengths == sorted(lengths, reverse=True)  # each a beginning of the one before
    assert max(lengths) == 8192 - 5


def test_contexts_that_are_not_asked_for_have_no_ratio(tools):
    ours, peers = tools
    request = PeersRequest((512,), (256, 512), real=8192, prefill=512, gen_tokens=4, rounds=1)
    *_, measured = measure(ours, peers, TEXT, request)
    ratio = document({}, ours, peers, measured, request)["ratio"]
    assert {key: ratio[key] for key in ("2k", "6k", "32k")} == {"2k": None, "6k": None, "32k": None}
    assert ratio["512"] > 0


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, **environment},
    )  # fmt: skip


def test_without_the_wheel_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(llama_cpp, "WHEEL", "no_such_wheel_of_llama_cpp")
    with pytest.raises(MagicpigError) as caught:
        llama_cpp.require()
    assert caught.value.exit_code == 1
    assert caught.value.hint == "pip install no_such_wheel_of_llama_cpp"


@pytest.fixture
def wheel(demo_available: None) -> None:
    pytest.importorskip("xllamacpp", reason="the extra `peers` is not installed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "f31"], "f31"),
        (["--points", "1k"], "two points"),
        (["--prefill", "9k"], "8,192"),
        (["--gen-tokens", "2000", "--points", "1k,8k"], "2000"),
    ],
)
def test_wrong_use_is_one_line_and_a_hint(wheel, arguments, message):
    done = script(*arguments)
    assert done.returncode == 2, done.stderr
    error, hint = done.stderr.strip().splitlines()[-2:]
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


def test_weights_are_ordered_by_their_size_however_they_were_asked_for():
    """The last of them, the nearest to llama.cpp's, gives `ratio`."""
    bench_peers = load_script("bench_peers")
    asked = bench_peers._options(["--weights", "int4,f32,int8"])
    assert bench_peers._weights(asked) == ["f32", "int8", "int4"]


def test_both_programs_on_tiny_contexts(wheel):
    """Real text at 256 tokens, repeated rows at 8,256; tokens are counted alike."""
    done = script(
        "--json", "--contexts", "256,8256", "--points", "128,256", "--prefill", "256", "--gen-tokens", "2",
        "--rounds", "1", "--weights", "f32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["meta"]["same_token_count"] is True
    assert "AVX2 = 1" in found["meta"]["llama_cpp_system"] or "NEON" in found["meta"]["llama_cpp_system"]
    rows = {(row["tool"], row["context"]): row for row in found["rows"]}
    assert set(rows) == {
        ("magicpig", 256), ("magicpig", 8256), ("llama.cpp", 128), ("llama.cpp", 256), ("llama.cpp", 8256),
    }  # fmt: skip
    assert rows["magicpig", 8256]["fill"] == "tiled"
    assert rows["llama.cpp", 8256]["fitted"] is True
    assert rows["llama.cpp", 256]["tpot_ms"] > 0
    assert [row["variant"] for row in found["prefill"]["rows"]] == [None, "flash_on", "flash_off"]
    assert all(row["tok_s"] > 0 for row in found["prefill"]["rows"])
