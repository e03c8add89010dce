"""`magicpig tune-kl` on the demo model as the roadmap states it: predictions, real tables, text not tuned on."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import pytest

from tests import tolerances

LIMIT_S = 360  # of the roadmap, on 2 cores


@pytest.mark.slow
def test_tuning_the_demo_model(demo_available, tmp_path):
    """A cache of its own, so that nothing of an earlier run helps; the converted model is where it always is."""
    from magicpig_cli.model.source import cache_folder

    cache = tmp_path / "cache" / "magicpig-cli"
    cache.mkdir(parents=True)
    (cache / "demo").symlink_to(cache_folder() / "demo", target_is_directory=True)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "magicpig_cli", "tune-kl", "-m", "demo", "--context", "4k", "--target-error", "0.08",
         "--json"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=3 * LIMIT_S,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    taken_s = time.monotonic() - begin
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    verified = [candidate for candidate in document["candidates"] if candidate["verified"]]
    by_sampler = {name: [c for c in verified if c["sampler"] == name] for name in ("lsh", "rabitq")}
    assert len(by_sampler["lsh"]) == 3
    assert 1 <= len(by_sampler["rabitq"]) <= 3
    for sampler, candidates in by_sampler.items():
        factors = [c["measured"]["error"] / c["predicted"]["error"] for c in candidates]
        calibration = statistics.geometric_mean(factors)
        if sampler == document["chosen"]["sampler"]:
            assert document["calibration"] == pytest.approx(calibration)
        for candidate, factor in zip(candidates, factors, strict=True):
            print({key: value for key, value in candidate.items() if key != "dense_layers"})
            ratio = candidate["predicted"]["ratio"]
            assert candidate["measured"]["ratio"] == pytest.approx(ratio, rel=tolerances.SAMPLED_RATIO)
            assert factor == pytest.approx(calibration, rel=tolerances.PREDICTED_ERROR)
    assert document["met"] == (document["held_out"]["error"] <= 0.08)
    print(f"chosen {document['chosen']}, held out {document['held_out']}, met {document['met']}, {taken_s:.0f} s")
