"""What `magicpig bench` shows on a terminal: tables of rows and of the comparison, and the plot."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicpig_cli.ui import console

if TYPE_CHECKING:
    from magicpig_cli.bench.report import Results

_KEYS = ("ctx", "batch", "mode")
_GAP = 2  # between columns
_LEAST_COLUMNS, _MOST_COLUMNS = 40, 120  # of a plot


def print_tables(results: Results) -> None:
    """Rows, and the comparison if there is one, on stdout. What all rows have in common is said once."""
    from magicpig_cli.bench import report

    # On a terminal the words stand below the table, once.
    cells = [
        [cell.replace(f" ({report.BEYOND})", "*") for cell in report.cells(results.meta, row)] for row in results.rows
    ]
    same = [i for i, name in enumerate(report.COLUMNS) if name in report.RUN_COLUMNS]
    _print_table(
        [name for i, name in enumerate(report.COLUMNS) if i not in same],
        [[cell for i, cell in enumerate(line) if i not in same] for line in cells],
    )
    print(f"\n* {report.BEYOND}" if any(row["beyond_model_context"] for row in results.rows) else "")
    print(console.printable(" · ".join(f"{report.COLUMNS[i]} {cells[0][i]}" for i in same)))
    if (comparison := results.comparison) is None:
        return
    print(
        f"\ncompared with {console.printable(comparison.path)}" + (f" of {comparison.date}" if comparison.date else "")
    )
    if lines := [report.compared_cells(comparison, row) for row in results.rows if comparison.of(row)]:
        _print_table(report.COMPARED_COLUMNS, lines)
    for note in comparison.notes():
        print(console.printable(note))


def _print_table(columns: Sequence[str], rows: list[list[str]]) -> None:
    """One table, or several below each other where a terminal is too narrow; each names the rows anew."""
    width = console.terminal_columns() if sys.stdout.isatty() else None
    for number, part in enumerate(_parts(columns, rows, width)):
        if number:
            print()
        console.print_table([columns[i] for i in part], [[row[i] for i in part] for row in rows])


def _parts(columns: Sequence[str], rows: list[list[str]], width: int | None) -> list[list[int]]:
    """Numbers of the columns of each table: as many as fit `width`, and from the second table on KEYS first."""
    wide = [_GAP + max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    keys = [i for i, name in enumerate(columns) if name in _KEYS]
    parts: list[list[int]] = [[]]
    for i in range(len(columns)):
        begins = keys if len(parts) > 1 else []
        full = width is not None and sum(wide[c] for c in parts[-1]) + wide[i] - _GAP > width
        if full and len(parts[-1]) > len(begins):
            parts.append([*keys, i] if i not in keys else [*keys])
        elif i not in parts[-1]:
            parts[-1].append(i)
    return parts


def print_plot(results: Results) -> None:
    """The plot on stdout, as wide as the terminal; colours only on a terminal that wants them."""
    from magicpig_cli.bench import plot

    columns = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, console.terminal_columns()))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print("\n" + plot.terminal(results.meta, results.rows, columns, color=color), end="")
