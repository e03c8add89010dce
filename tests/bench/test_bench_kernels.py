"""scripts/bench_kernels.py at tiny sizes: the keys of CLI.md, goals judged, mistakes answered."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from magicpig_cli.bench.kernel_run import KernelBench, summary
from magicpig_cli.bench.kernel_sizes import CASES, QUICK
from tests.bench.scripts import SCRIPTS, load_script

SCRIPT = SCRIPTS / "bench_kernels.py"

script = load_script("bench_kernels")


@pytest.fixture(scope="module")
def document(demo_available, tmp_path_factory):
    captures = tmp_path_factory.mktemp("captures") / "tiny.safetensors"
    whole = KernelBench(QUICK, captures).run()
    assert captures.exists()
    return whole


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *args], capture_output=True, text=True, cwd=SCRIPT.parent.parent
    )


def test_keys_are_those_of_the_contract(document):
    assert set(document) == {"meta", "cases", "bandwidth", "scaling_2_threads", "build", "append", "int8"}
    assert [case["case"] for case in document["cases"]] == list(CASES)
    for case in document["cases"]:
        assert {"case", "d", "n", "g", "sampled", "us_per_head", "stage_us"} <= set(case)
        assert {"lsh", "rabitq", "exact", "sdpa_f32", "sdpa_bf16"} <= set(case["us_per_head"])
        assert {"retrieve", "attend", "scan"} <= set(case["stage_us"])
    assert {"sequential_gb_s", "sorted_row_gb_s", "exact_fraction", "gather_fraction"} <= set(document["bandwidth"])
    assert {"index_s", "sort_speedup", "index_bytes_per_token", "rabitq_speedup", "rabitq_bytes_per_token"} <= set(
        document["build"]
    )
    assert {"step_ratio", "worst_over_median"} <= set(document["append"])
    assert {"speedup", "rel_error"} <= set(document["int8"])
    json.dumps(document, allow_nan=False)


def test_every_figure_is_a_positive_number(document):
    def walk(value, where):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(inner, f"{where}.{key}")
        elif isinstance(value, float):
            # one segment and one piece: nothing to merge, and the reference does not time it
            assert value > 0 or (value == 0 and where.endswith((".merge", ".window"))), where

    for key in set(document) - {"meta"}:
        walk(document[key] if key != "cases" else dict(enumerate(document[key])), key)


def test_ratios_of_the_cases(document):
    by_name = {case["case"]: case for case in document["cases"]}
    for name in CASES[:2]:
        assert 0.018 <= by_name[name]["sampled"] <= 0.022
    assert by_name["d64_n24k_real"]["n"] == 3 * by_name["d64_n8k_real"]["n"]
    assert by_name["d64_n8k_real"]["layers"] == len(QUICK.real_layers)
    assert by_name["d128_n96k_2pct"]["n"] == QUICK.long


def test_every_goal_finds_its_figure(document):
    for goal in script.GOALS:
        assert goal.value(document) is not None, goal.text
    shown = script.table(document)
    assert "not measured" not in shown
    assert all(goal.text in shown for goal in script.GOALS)


def test_goals_are_judged_by_direction():
    fast, small = script.speedup("case", "exact", 6), script.Goal("bytes", 2.2, False, lambda d: d["bytes"])
    document = {"cases": [{"case": "case", "speedup": {"exact": 6.5}}], "bytes": 2.5}
    assert fast.met(fast.value(document))
    assert not small.met(small.value(document))
    assert fast.value({"cases": []}) is None


def test_medians_are_taken_over_layers_after_the_ratio():
    from magicpig_cli.bench.attend_case import AttendTimes

    times = [AttendTimes(0.02, 0.02, {"lsh": lsh, "exact": 10.0}, {"attend": lsh}) for lsh in (1.0, 2.0, 10.0)]
    got = summary(times)
    assert got["speedup"] == {"exact": 5.0}
    assert got["us_per_head"] == {"lsh": 2.0, "exact": 10.0}
    assert got["stage_us"] == {"attend": 2.0}


def test_one_part_alone_as_json(tmp_path):
    """The document is the last line of stdout and the file; everything else goes to stderr."""
    done = run_script("--quick", "--json", "--case", "build", "--isa", "portable", "--output", str(tmp_path / "o.json"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads((tmp_path / "o.json").read_text())
    assert document["meta"]["isa"] == "portable"
    assert document["meta"]["torch_isa"] == "DEFAULT"  # or it would be compared with another machine
    assert document["meta"]["parts"] == ["build"]
    assert document["build"]["index_s"] > 0
    assert document["int8"] is None
    assert document["cases"] == []
    assert "counting sort over torch.sort" in done.stderr
    assert len(done.stdout.splitlines()) == 1


def run_interrupted_at(part, monkeypatch, output):
    """Exit status of a run of two parts, building and appending."""

    def interrupted(bench):
        raise KeyboardInterrupt

    monkeypatch.setattr(KernelBench, part, interrupted)
    arguments = ["--quick", "--json", "--case", "append", "--case", "build", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", *arguments])
    return script.main()


def test_an_interrupted_run_shows_what_it_has(monkeypatch, capsys, tmp_path):
    output = tmp_path / "o.json"
    assert run_interrupted_at("_append", monkeypatch, output) == 130
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document == json.loads(output.read_text())
    assert document["meta"]["parts"] == ["build"]
    assert document["build"]["index_s"] > 0
    assert document["append"] is None
    assert "interrupted\n" in err


def test_a_run_interrupted_before_its_first_figure_says_so(monkeypatch, capsys, tmp_path):
    output = tmp_path / "o.json"
    assert run_interrupted_at("_build", monkeypatch, output) == 130
    assert capsys.readouterr().out == ""
    assert not output.exists()


def test_a_reader_that_has_gone_is_no_traceback():
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--case", "build"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--case", "nothing"], "--case nothing is unknown"),
        (["--reps", "0"], "--reps 0 measures nothing"),
        (["--isa", "mmx", "--case", "build"], "MAGICPIG_ISA=mmx is not an instruction set"),
    ],
)
def test_mistakes_are_answered(args, said):
    done = run_script(*args)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}\nhint: ")
    assert done.stdout == ""
