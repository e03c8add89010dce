"""Finding a profile by name or file, and writing one: whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from magicpig_cli import profiles
from magicpig_cli.config import MAX_K, MAX_L
from magicpig_cli.errors import MagicpigError, UsageError
from magicpig_cli.profiles import BUILT_IN, Match, Profile, TableSize
from magicpig_cli.profiles.schema import FIGURES

TUNED = Profile(
    match=Match(device="cpu", cpu_model="AMD EPYC 7763 64-Core Processor", model="org/model"),
    tables=(TableSize(9, 110, sampled_ratio=0.031),), dense_layers=(0, 7),
    head_shares={1: (0.25, 1.75), 12: (1.0, 1.0)},
    sources={"attention.tables[0]": "measured: tune-kl, 2026-11-30, context 32,768, pydoc_data.topics"},
)  # fmt: skip


def put(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_names_are_found_among_the_user_s_first_then_shipped_then_built_in(own_folder):
    assert profiles.find("h200").chunk == 4096
    put(own_folder, "h200", "run: {chunk: 1k}\n")
    assert profiles.find("h200").chunk == 1024
    assert profiles.find("built-in") is BUILT_IN


def test_files_are_found_by_path(tmp_path, monkeypatch):
    put(tmp_path, "here", "attention: {sink: 5}\n").rename(tmp_path / "here.yml")
    put(tmp_path, "there", "attention: {sink: 6}\n").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [profiles.find(name).sink for name in ("here.yml", "./there", "~/there", str(tmp_path / "there"))] == [
        5,
        6,
        6,
        6,
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("rtx409", "did you mean rtx4090?"),
        ("RTX4090", "did you mean rtx4090?"),
        ("mien", "did you mean mine?"),
        ("there", "for the file here write ./there"),
        ("zzzzzz", "your own lie in"),
        ("", "your own lie in"),
        ("x" * 5000, "your own lie in"),
    ],
)
def test_an_unknown_name_lists_what_there_is(own_folder, tmp_path, monkeypatch, name, hint):
    put(own_folder, "mine", "")
    put(tmp_path, "there", "").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        profiles.find(name)
    assert "a100, built-in, cpu, " in caught.value.message
    assert ", mine, " in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize("name", ["./none.yaml", "none.yaml", "~nobody/none", "\0/x", "x" * 5000 + ".yaml", "/", "."])
def test_a_file_that_is_not_there_is_named(name):
    with pytest.raises(UsageError, match=r"cannot be read|it is no file|it is not YAML"):
        profiles.find(name)


def test_a_broken_user_profile_is_kept_apart(own_folder):
    put(own_folder, "good", "attention: {sink: 9}\n")
    bad = put(own_folder, "bad", "attention: {sink: x}\n")
    (own_folder / "folder.yaml").mkdir()
    put(own_folder, "built-in", "")
    (own_folder / ".good-abc123").write_text("half of a pro")  # what a killed writer leaves
    assert [profile.name for profile in profiles.user_profiles()] == ["good"]
    broken = [problem.message for problem in profiles.broken_user_profiles()]
    assert [message.startswith(f"{own_folder}/") for message in broken] == [True] * 3
    assert f"{bad}: attention.sink is 'x'" in broken[0]
    assert profiles.find("good").sink == 9
    assert profiles.find("cpu").name == "cpu"
    with pytest.raises(UsageError, match=r"attention\.sink is 'x'"):
        profiles.find("bad")


def test_no_user_folder_is_no_profile(own_folder):
    assert not own_folder.exists()
    assert profiles.user_profiles() == profiles.broken_user_profiles() == ()
    own_folder.parent.mkdir(parents=True)
    own_folder.write_text("a file in its place")
    assert profiles.user_profiles() == profiles.broken_user_profiles() == ()


def test_saved_is_found_again(own_folder):
    path = profiles.save(TUNED, "tuned-1.5b")
    assert path == own_folder / "tuned-1.5b.yaml"
    assert profiles.find("tuned-1.5b") == replace(TUNED, name="tuned-1.5b", path=path)
    assert [p.name for p in own_folder.iterdir()] == ["tuned-1.5b.yaml"]
    profiles.save(replace(TUNED, sink=16), "tuned-1.5b")
    assert profiles.find("tuned-1.5b").sink == 16
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["memory"] == {"host_reserve": "1GiB", "device_reserve": "1GiB"}  # as people write it
    assert document["attention"]["auto_lsh_from"] == "4k"


@pytest.mark.parametrize("name", [profile.name for profile in profiles.shipped()])
def test_shipped_ones_survive_being_saved(name):
    shipped = next(profile for profile in profiles.shipped() if profile.name == name)
    path = profiles.save(shipped, "copy")
    assert profiles.load(path) == replace(shipped, name="copy", path=path)


@pytest.mark.parametrize(
    "name",
    [
        "../up",
        "a/b",
        "/tmp/x",
        "",
        ".",
        "..",
        ".hidden",
        "-x",
        "a b",
        "x.yaml",
        "x.yml",
        "built-in",
        "é",
        "x" * 101,
        "a\n",
    ],
)
def test_a_name_that_is_none_is_refused(own_folder, name):
    with pytest.raises(UsageError) as caught:
        profiles.save(TUNED, name)
    assert repr(name) in caught.value.message
    assert caught.value.hint
    assert not own_folder.exists()


@pytest.mark.parametrize(
    "profile",
    [
        replace(TUNED, tables=()),
        replace(TUNED, tables=(TableSize(17, 10),)),
        replace(TUNED, tables=(TableSize(9, 10), TableSize(8, 10))),
        replace(TUNED, sampler="oracle"),
        replace(TUNED, dense_layers=(7, 0)),
        replace(TUNED, sources={"attention.K": "measured: here"}),
        replace(TUNED, match=Match(device="cpu", gpu_name="L20")),
        replace(TUNED, threads=0),
        replace(TUNED, sources={"run.chunk": "measured:\x85here"}),
    ],
)
def test_what_could_not_be_read_back_is_not_written(own_folder, profile):
    before = profiles.save(TUNED, "x").read_bytes()
    with pytest.raises(UsageError):
        profiles.save(profile, "x")
    assert [path.read_bytes() for path in own_folder.iterdir()] == [before]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_save_leaves_what_was_there(own_folder, monkeypatch, moment):
    before = profiles.save(TUNED, "x").read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        profiles.save(replace(TUNED, sink=99), "x")
    assert [path.read_bytes() for path in own_folder.iterdir()] == [before]


def test_a_killed_writer_leaves_a_whole_profile(own_folder):
    """Killed while it writes again and again: the file is one of those, and what else lies there is no profile."""
    code = (
        "from magicpig_cli.profiles import BUILT_IN, save\n"
        "from dataclasses import replace\n"
        "for sink in range(10**9):\n"
        "    save(replace(BUILT_IN, sink=sink % 1000), 'x'); print(flush=True)\n"
    )
    for saves in (1, 4, 9):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ})
        assert writer.stdout is not None
        for _ in range(saves):
            writer.stdout.readline()
        writer.kill()
        writer.wait()
        writer.stdout.close()
        (found,) = profiles.user_profiles()
        assert found == replace(BUILT_IN, name="x", path=own_folder / "x.yaml", sink=found.sink)
        assert profiles.broken_user_profiles() == ()


def test_a_folder_that_cannot_be_written_is_named(own_folder):
    own_folder.parent.mkdir(parents=True)
    own_folder.write_text("a file in its place")
    with pytest.raises(MagicpigError, match=f"cannot write {own_folder}/x.yaml: "):
        profiles.save(TUNED, "x")


SIZES = st.integers(0, 1 << 50) | st.integers(0, 1 << 10).map(lambda n: n << 30)
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\n"), max_size=30)
NAMES = WORDS.map(lambda text: f"a{text}")


@st.composite
def table_rows(draw) -> tuple[TableSize, ...]:
    limits: list[int | None] = sorted(draw(st.sets(st.integers(1, 1 << 50), min_size=1, max_size=4)))
    if draw(st.booleans()):
        limits[-1] = None
    ratio = st.none() | st.floats(0, 1, exclude_min=True)
    return tuple(
        TableSize(draw(st.integers(1, MAX_K)), draw(st.integers(2, MAX_L)), limit, draw(ratio)) for limit in limits
    )


@st.composite
def any_profile(draw) -> Profile:
    low, high = sorted(draw(st.sets(SIZES, min_size=2, max_size=2)))
    on_gpu = draw(st.booleans())
    tables = draw(table_rows())
    keys = [*FIGURES, *(f"attention.tables[{i}]" for i in range(len(tables)))]
    return Profile(
        match=Match(
            device=draw(st.sampled_from([None, "gpu"] if on_gpu else [None, "cpu"])),
            gpu_name=draw(st.none() | NAMES) if on_gpu else None,
            gpu_memory_min=draw(st.sampled_from([None, low])) if on_gpu else None,
            gpu_memory_max=draw(st.sampled_from([None, high])) if on_gpu else None,
            cpu_model=draw(st.none() | NAMES),
            model=draw(st.none() | NAMES),
        ),
        tables=tables,
        dense_layers=tuple(sorted(draw(st.sets(st.integers(0, 999), max_size=6)))),
        sink=draw(st.integers(0, 1 << 20)),
        local=draw(st.integers(1, 1 << 20)),
        auto_lsh_from=draw(SIZES),
        chunk=draw(st.integers(1, 1 << 16)),
        threads=draw(st.none() | st.integers(1, 1024)),
        max_batch=draw(st.none() | st.integers(1, 1024)),
        host_reserve=draw(SIZES),
        device_reserve=draw(SIZES),
        sources=draw(st.dictionaries(st.sampled_from(keys), NAMES)),
    )


@given(any_profile())
def test_any_profile_reads_back_as_it_was_saved(profile):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", folder)
        path = profiles.save(profile, "x")
        assert profiles.load(path) == replace(profile, name="x", path=path)
