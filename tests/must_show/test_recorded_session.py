"""Issue 6, must show 5: README holds a session and a panel that a script has recorded, and the script still can."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.record_session import PANEL, SESSION, TYPED, Recording, write_between_markers

ROOT = Path(__file__).parents[2]


def is_a_session(text: str) -> bool:
    """Whether all that is typed stands there, with what must be answered."""
    asked = all(f"> {line}\n" in text for line in TYPED)
    return asked and "did you mean /context?" in text and "took back the last turn" in text


def is_a_panel(text: str) -> bool:
    """Whether a whole one stands there, of an answer from sampled keys."""
    return re.search(r"╭─ demo · lsh .*answering .*sampled .*memory .*╰─", text, re.DOTALL) is not None


def reused(text: str) -> list[int]:
    return [int(count.replace(",", "")) for count in re.findall(r"\(([\d,]+) reused\)", text)]


@pytest.mark.parametrize(("recording", "is_one"), [(SESSION, is_a_session), (PANEL, is_a_panel)])
def test_readme_holds_one(recording: Recording, is_one: Callable[[str], bool]):
    begin, end = recording.markers
    block = (ROOT / "README.md").read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert is_one(block)
    assert block.strip().startswith(f"```\n$ {recording.command}\n")


@pytest.mark.slow
def test_they_can_be_recorded_again(demo_available):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "record_session.py")], capture_output=True, text=True, timeout=500
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert is_a_session(done.stdout)
    assert is_a_panel(done.stdout)
    assert reused(done.stdout)[0] > 2000  # of the document


def test_only_what_is_between_the_markers_changes(tmp_path):
    page, (begin, end) = tmp_path / "page.md", SESSION.markers
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    write_between_markers(page, SESSION, ["> hi", "there"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{begin}\n```\n$ magicpig chat")
    assert text.endswith(f"> hi\nthere\n```\n{end}\nafter\n")
    assert "old" not in text
    with pytest.raises(SystemExit):
        write_between_markers(page, PANEL, [])
