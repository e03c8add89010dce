"""A Markdown table, drawn once when its last row is there."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from magicpig_cli.ui.console import printable
from magicpig_cli.ui.inline import inline
from magicpig_cli.ui.styles import Piece

_DELIMITERS = re.compile(r"\s*\|?(\s*:?-+:?\s*\|)*\s*:?-+:?\s*\|?\s*")
_BETWEEN_CELLS = re.compile(r"(?<!\\)\|")


def table_pieces(lines: Sequence[str], columns: int) -> list[Piece]:
    """The lines of a table as pieces that end with a newline; as they are if they are no table."""
    if len(lines) < 2 or not _DELIMITERS.fullmatch(lines[1]):
        return [("".join(f"{line}\n" for line in lines), "")]
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", border_style="dim")
    heads = _cells(lines[0])
    for head, delimiter in zip(heads, _padded(_cells(lines[1]), len(heads)), strict=True):
        table.add_column(_text(head), justify=_justify(delimiter), overflow="fold")
    for line in lines[2:]:
        table.add_row(*map(_text, _padded(_cells(line), len(heads))))
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", markup=False, highlight=False, emoji=False,
        width=max(columns - 1, 1), legacy_windows=False,
    )  # fmt: skip
    pieces: list[Piece] = []
    for row in console.render_lines(table, pad=False):
        cells = [(segment.text, str(segment.style or "")) for segment in row if not segment.control]
        while cells and not cells[-1][0].strip():  # spaces that would only wrap when the terminal gets narrower
            cells.pop()
        if cells:
            pieces += [*((text, "" if style == "none" else style) for text, style in cells), ("\n", "")]
    return pieces


def _cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|")
    parts = _BETWEEN_CELLS.split(inside)
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    return [part.strip().replace("\\|", "|") for part in parts]


def _padded(cells: list[str], count: int) -> list[str]:
    """As many cells as the table has columns; what is too much goes into the last one."""
    if len(cells) > count:
        cells = [*cells[: count - 1], " | ".join(cells[count - 1 :])]
    return cells + [""] * (count - len(cells))


def _justify(delimiter: str):  # type: ignore[no-untyped-def]  # a Literal of Rich
    if delimiter.endswith(":"):
        return "center" if delimiter.startswith(":") else "right"
    return "left"


def _text(cell: str):  # type: ignore[no-untyped-def]  # a Text of Rich, which is imported late
    from rich.text import Text

    return Text.assemble(*((printable(text), style) for text, style in inline(cell)))
