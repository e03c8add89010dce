"""Captures kept for the next run: whole or not at all, found again by what they depend on, bounded."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import torch

from magicpig_cli.tuning import kept
from magicpig_cli.tuning.capture import Capture


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def load(engine, key) -> Capture | None:
    found = [item for item in kept.load(engine, key) if isinstance(item, Capture)]
    return found[0] if found else None


def test_what_was_kept_comes_back_bit_by_bit(engine, captured):
    size = kept.save("one", captured)
    files = list((kept.folder() / "one").iterdir())
    assert size <= sum(file.stat().st_size for file in files) < size + 50_000  # headers and ids
    again = load(engine, "one")
    assert again.sequence.ids == captured.sequence.ids
    assert again.rules == captured.rules
    for name in ("lengths", "offloaded", "sink", "steps", "tokens"):
        assert getattr(again, name) == getattr(captured, name)
    for number in captured.queries:
        mine, theirs = captured.layer(number), again.layer(number)
        assert torch.equal(mine.rows, theirs.rows)
        assert torch.equal(mine.q, theirs.q)


def test_the_key_names_everything_that_matters(make_engine, engine):
    ids = list(range(3, 203)) * 4
    key = kept.capture_key(engine, ids, 4)
    assert kept.capture_key(engine, list(ids), 4) == key
    others = [
        kept.capture_key(engine, [*ids[:-1], 7], 4),
        kept.capture_key(engine, ids, 5),
        kept.capture_key(make_engine(kv_dtype="bfloat16"), ids, 4),
        kept.capture_key(make_engine(kv_dtype="float32", sink=8), ids, 4),
        kept.capture_key(make_engine("qwen2", kv_dtype="float32"), ids, 4),
    ]
    assert len({key, *others}) == 6


def test_other_weights_of_the_same_shape_are_another_model(engine):
    before = kept.capture_key(engine, [3] * 800, 4)
    weight = next(iter(engine.runner.model.parameters()))
    with torch.no_grad():
        weight[0, 0] += 1
        after = kept.capture_key(engine, [3] * 800, 4)
        weight[0, 0] -= 1
    assert before != after
    assert kept.capture_key(engine, [3] * 800, 4) == before


@pytest.mark.parametrize("harm", ["missing", "cut", "no json", "other keys"])
def test_what_is_damaged_counts_as_not_there(engine, captured, harm):
    kept.save("one", captured)
    place = kept.folder() / "one"
    rows, about = place / "layer-001.safetensors", place / "about.json"
    if harm == "missing":
        rows.unlink()
    elif harm == "cut":
        os.truncate(rows, rows.stat().st_size // 2)
    elif harm == "no json":
        about.write_text("{")
    else:
        about.write_text(json.dumps({"lengths": [1]}))
    assert load(engine, "one") is None
    assert kept.save("one", captured) is not None  # and is replaced
    assert load(engine, "one") is not None


def test_an_interrupt_leaves_nothing(engine, captured, monkeypatch):
    written = []

    def interrupted(tensors, path):
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt
        path.write_bytes(b"")

    monkeypatch.setattr(kept, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.save("one", captured)
    assert len(written) == 2
    assert list(kept.folder().iterdir()) == []
    assert load(engine, "one") is None


def test_the_newest_are_kept_up_to_a_size(engine, captured, monkeypatch):
    size = kept.save("a", captured)
    monkeypatch.setattr(kept, "KEPT_BYTES", int(2.5 * size))
    for age, key in enumerate("bcd"):
        os.utime(kept.folder() / chr(ord(key) - 1), (1000 + age, 1000 + age))
        kept.save(key, captured)
    assert sorted(place.name for place in kept.folder().iterdir()) == ["c", "d"]
    os.utime(kept.folder() / "d", (1000, 1000))
    os.utime(kept.folder() / "c", (900, 900))
    assert load(engine, "c") is not None  # used: now the newest
    kept.save("e", captured)
    assert sorted(place.name for place in kept.folder().iterdir()) == ["c", "e"]


def test_nobody_else_can_read_what_a_text_was_made_into(captured):
    kept.save("one", captured)
    assert (kept.folder() / "one").stat().st_mode & 0o077 == 0


def test_what_a_killed_process_left_goes_in_time(captured):
    for name, age_s in (("unfinished-old", 2 * 86400), ("unfinished-now", 60)):
        (kept.folder() / name / "key").mkdir(parents=True)
        os.utime(kept.folder() / name, (time.time() - age_s,) * 2)
    kept.save("one", captured)
    assert sorted(place.name for place in kept.folder().iterdir()) == ["one", "unfinished-now"]


def test_the_two_texts_of_a_run_do_not_drive_out_each_other(captured, monkeypatch):
    size = kept.save("one", captured)
    monkeypatch.setattr(kept, "KEPT_BYTES", int(1.9 * size))
    assert kept.save("two", captured) is None
    assert [place.name for place in kept.folder().iterdir()] == ["one"]


def test_what_is_too_large_or_cannot_be_written_is_not_kept(captured, monkeypatch, own_cache):
    monkeypatch.setattr(kept, "KEPT_BYTES", 1000)
    assert kept.save("one", captured) is None
    assert list(kept.folder().iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_cache / "file"))
    (own_cache / "file").write_text("in the way")
    assert kept.save("one", replace(captured)) is None
