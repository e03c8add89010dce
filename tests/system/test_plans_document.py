"""docs/plans.md is what the planner says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_plans_is_the_planners_own(tmp_path):
    command = [sys.executable, "scripts/plan_table.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line for line in (ROOT / "docs" / "plans.md").read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    assert any(" refused: " in row for row in rows)
