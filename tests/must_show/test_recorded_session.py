"""Issue 6, must show 5: README holds a session that a script has recorded, and the script still can."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.record_session import BEGIN, END, TYPED, write_between_markers

ROOT = Path(__file__).parents[2]


def is_a_session(text: str) -> bool:
    """Whether all that is typed stands there, with what must be answered."""
    asked = all(f"> {line}\n" in text for line in TYPED)
    return asked and "did you mean /context?" in text and "took back the last turn" in text


def reused(text: str) -> list[int]:
    return [int(count.replace(",", "")) for count in re.findall(r"\(([\d,]+) reused\)", text)]


def test_readme_holds_one():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition(BEGIN)[2].partition(END)[0]
    assert is_a_session(block)
    assert block.strip().startswith("```\n$ magicpig chat -m demo")


@pytest.mark.slow
def test_it_can_be_recorded_again(demo_available):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "record_session.py")], capture_output=True, text=True, timeout=500
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert is_a_session(done.stdout)
    assert reused(done.stdout)[0] > 2000  # of the document


def test_only_what_is_between_the_markers_changes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_between_markers(page, ["> hi", "there"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n```\n$ magicpig chat")
    assert text.endswith(f"> hi\nthere\n```\n{END}\nafter\n")
    assert "old" not in text
    page.write_text("nothing")
    with pytest.raises(SystemExit):
        write_between_markers(page, [])
