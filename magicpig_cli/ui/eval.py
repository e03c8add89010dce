"""What `magicpig eval` shows: its tables, and below them what they mean."""

from __future__ import annotations

from typing import Any

from magicpig_cli.evals import report
from magicpig_cli.ui import console


def print_tables(rows: list[dict[str, Any]]) -> None:
    """On stdout."""
    tables = (
        (report.TASK_COLUMNS, report.TASK_RIGHT, report.task_cells(rows)),
        (report.TEXT_COLUMNS, report.TEXT_RIGHT, report.text_cells(rows)),
    )
    for columns, right, lines in tables:
        if lines:
            console.print_table(columns, lines, right=right)
            print()
    for line in report.notes(rows):
        print(console.printable(line))
