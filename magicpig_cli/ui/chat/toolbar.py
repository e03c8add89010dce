"""The line below the prompt: model, context, K and L or the budget, sampled share, speed, memory.

What has no room is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prompt_toolkit.application import get_app
from rich.cells import cell_len, set_cell_size

from magicpig_cli.ui.console import printable
from magicpig_cli.units import format_bytes

if TYPE_CHECKING:
    from magicpig_cli.ui.chat.state import Chat

_GAP = " · "


class Toolbar:
    """The text is made once per prompt: while people type nothing of it changes but the width."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, str]] = []

    def update(self, chat: Chat) -> None:
        """Look at the state anew."""
        self._parts = parts(chat)

    def __call__(self) -> str:
        return fit(self._parts, get_app().output.get_size().columns - 1)


def parts(chat: Chat) -> list[tuple[int, str]]:
    """(rank, text) of each part in their order; 0 stays longest."""
    engine, last = chat.engine, chat.totals.last
    used, total = chat.used_tokens, engine.context
    memory = engine.memory()
    name = printable(engine.model_name).replace("\n", " ")
    made = [(2, name), (0, f"context {used:,}/{total:,} ({used / total:.0%})")]
    made.append((3, engine.plan.title))
    if last is not None and last.sampled_ratio is not None:
        made.append((4, f"sampled {last.sampled_ratio:.1%}"))
    if chat.totals.tok_s is not None:
        made.append((1, f"{chat.totals.tok_s:.1f} tok/s"))
    made.append((5, f"K/V {format_bytes(memory['kv_bytes'])}, index {format_bytes(memory['index_bytes'])}"))
    if memory["vram_bytes"]:
        made.append((6, f"GPU {format_bytes(memory['vram_bytes'])}"))
    return made


def fit(parts: list[tuple[int, str]], columns: int) -> str:
    """The most important parts that have room, in their order."""
    kept: list[tuple[int, str]] = []
    for part in sorted(parts):
        wanted = [text for _, text in (*kept, part)]
        if not kept or cell_len(_GAP.join(wanted)) <= columns:
            kept.append(part)
    text = _GAP.join(text for rank, text in parts if (rank, text) in kept)
    return text if cell_len(text) <= columns else set_cell_size(text, max(columns, 0))
