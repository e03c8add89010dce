"""Records that outlive a run: torn lines, several processes, what makes two pieces of work the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from magicpig_cli.errors import MagicpigError
from magicpig_cli.evals.modes import Mode
from magicpig_cli.evals.units import Unit, open_kept

UNIT = Unit("niah", "topics", 4096, 0, Mode("topk", 0.02), 0)


def test_records_are_there_again(tmp_path):
    path = tmp_path / "new" / "folder" / "units.jsonl"
    with open_kept(path) as kept:
        assert kept.get("a") is None
        kept.add("a", UNIT, {"x": 1.5})
        assert kept.get("a") == {"x": 1.5}
    with open_kept(path) as kept:
        assert kept.get("a") == {"x": 1.5}
        kept.add("b", UNIT, {"x": 2})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["key"] for line in lines] == ["a", "b"]
    assert lines[0]["unit"]["mode"] == {"name": "topk", "budget": 0.02}
    assert path.stat().st_mode & 0o777 == 0o600
    assert not path.with_name("units.jsonl.lock").exists()


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_line_is_passed_over(tmp_path, cut):
    path = tmp_path / "units.jsonl"
    with open_kept(path) as kept:
        kept.add("a", UNIT, {"x": 1})
        kept.add("b", UNIT, {"x": 2})
    path.write_bytes(path.read_bytes()[:-cut])
    with open_kept(path) as kept:
        assert kept.get("a") == {"x": 1}
        # Without its end alone the last line is whole.
        assert (kept.get("b") is None) == (cut > 1)
        kept.add("c", UNIT, {"x": 3})
    with open_kept(path) as kept:
        assert (kept.get("a"), kept.get("c")) == ({"x": 1}, {"x": 3})


def test_what_is_no_record_is_passed_over(tmp_path):
    path = tmp_path / "units.jsonl"
    path.write_bytes(b'[]\n{}\n{"key": "a"}\n{"key": "b", "record": 3}\n\xff\xfe\n\n')
    with open_kept(path) as kept:
        assert kept.get("a") is None
        assert kept.get("b") is None


def test_fresh_forgets(tmp_path):
    path = tmp_path / "units.jsonl"
    for _ in range(2):
        with open_kept(path, fresh=True) as kept:
            assert kept.get("a") is None
            kept.add("a", UNIT, {})


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "units.jsonl"
    with open_kept(path), pytest.raises(MagicpigError, match="is evaluating into the same file"), open_kept(path):
        pass


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MagicpigError, match="cannot write"), open_kept(tmp_path / "file" / "units.jsonl"):
        pass


def test_everything_that_decides_the_outcome_is_in_the_key():
    about = {"model": "a", "seed": 0}
    changed = [
        replace(UNIT, task="vt"), replace(UNIT, text="b"), replace(UNIT, context=8192), replace(UNIT, sample=1),
        replace(UNIT, mode=Mode("topk", 0.04)), replace(UNIT, mode=Mode("oracle", 0.02)), replace(UNIT, hash_seed=1),
    ]  # fmt: skip
    keys = {UNIT.key(about), UNIT.key({**about, "model": "b"}), *(unit.key(about) for unit in changed)}
    assert len(keys) == 2 + len(changed)
    assert UNIT.key({"seed": 0, "model": "a"}) == UNIT.key(about)
