"""Timing: variants take turns, every call is preceded by what makes caches cold, medians over the right samples."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

from magicpig_cli.bench.timing import ColdCache, Timed, interleave, l3_bytes, median_ns, no_collection


def test_variants_take_turns_and_each_call_starts_cold():
    seen: list[object] = []
    variants = {name: lambda rep, name=name: seen.append((name, rep)) or f"{name}{rep}" for name in "ab"}
    samples = interleave(variants, reps=2, between=lambda name: seen.append(f"before {name}"), warmup=1)
    calls = [call for call in seen if isinstance(call, tuple)]
    assert calls == [("a", 0), ("b", 0), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert seen[::2] == ["before a", "before b"] * 3
    assert {name: [sample.result for sample in of] for name, of in samples.items()} == {
        "a": ["a0", "a1"],
        "b": ["b0", "b1"],
    }


def test_what_happens_between_is_not_timed():
    samples = interleave({"a": lambda rep: None}, reps=1, between=lambda _: time.sleep(0.05), warmup=0)
    assert 0 <= samples["a"][0].ns < 50_000_000


def test_median():
    assert median_ns([Timed(ns, None) for ns in (1, 100, 3)]) == 3


def test_collector_is_put_back():
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_cold_cache_writes_the_whole_buffer():
    cold = ColdCache(1 << 20)
    cold()
    cold()
    assert cold._buffer.nbytes == 1 << 20
    np.testing.assert_array_equal(cold._buffer, 2)


@pytest.mark.parametrize(("text", "wanted"), [("32768K\n", 32 << 20), ("2M\n", 2 << 20), ("odd", 64 << 20)])
def test_l3_as_the_system_writes_it(tmp_path, text, wanted):
    file = tmp_path / "sys/devices/system/cpu/cpu0/cache/index3/size"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert l3_bytes(tmp_path) == wanted


def test_l3_unknown(tmp_path):
    assert l3_bytes(tmp_path) == 64 << 20
