"""What `magicpig bench` shows on a terminal: tables of rows and of the comparison, and the plot."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from magicpig_cli.ui import console

if TYPE_CHECKING:
    from magicpig_cli.bench.report import Results

_LEAST_COLUMNS, _MOST_COLUMNS = 40, 120  # of a plot


def print_tables(results: Results) -> None:
    """Rows, and the comparison if there is one, on stdout. What all rows have in common is said once."""
    from magicpig_cli.bench import report

    cells = [report.cells(results.meta, row) for row in results.rows]
    same = {i for i, name in enumerate(report.COLUMNS) if name in report.RUN_COLUMNS}
    console.print_table(
        [name for i, name in enumerate(report.COLUMNS) if i not in same],
        [[cell for i, cell in enumerate(line) if i not in same] for line in cells],
    )
    print("\n" + console.printable(" · ".join(f"{report.COLUMNS[i]} {cells[0][i]}" for i in sorted(same))))
    if (comparison := results.comparison) is None:
        return
    print(
        f"\ncompared with {console.printable(comparison.path)}" + (f" of {comparison.date}" if comparison.date else "")
    )
    if lines := [report.compared_cells(comparison, row) for row in results.rows if comparison.of(row)]:
        console.print_table(report.COMPARED_COLUMNS, lines)
    for note in comparison.notes():
        print(console.printable(note))


def print_plot(results: Results) -> None:
    """The plot on stdout, as wide as the terminal; colours only on a terminal that wants them."""
    from magicpig_cli.bench import plot

    columns = min(_MOST_COLUMNS, max(_LEAST_COLUMNS, console.terminal_columns()))
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print("\n" + plot.terminal(results.meta, results.rows, columns, color=color), end="")
