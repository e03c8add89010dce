"""The live view as a Rich renderable: always ROWS rows, whatever there is to show and however wide the terminal is.

    ╭─ SmolLM2-135M-Instruct · lsh K=10 L=150 ───────────────────────────────────╮
    │ answering  123 tokens  ██▌                         context 1,310 / 8,192    │
    │ 41.3 tok/s  last 24.1  p50 24.0  p99 31.2 ms  ▂▂▃▂▂▂▅▂▂▂▂▃▂▂▂▂▂▂▂▂▂▃▂▂▂▂▂▂ │
    │ stages  ██████████████████████  dense 52%  attend 20%  retrieve 12%  …      │
    │ sampled 4.3%  d▃▃▂▄▅▃▂▂▃▄▃▃▃▂▄▅▃▂▂▃▄▃▃▃▂▄▅▃▂  highest 7.1%  d dense         │
    │ memory  K/V 92.1 MiB  index 41.0 MiB  process 1.2 GiB                       │
    ╰─────────────────────────────────────────────────────────────────────────────╯

A row is made of parts. What has no room is left out, the least important first; bars take the room that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from magicpig_cli.ui.console import printable
from magicpig_cli.ui.live_state import LiveState, Slot, Work
from magicpig_cli.units import format_bytes, format_seconds

ROWS = 7
MIN_WIDTH, MAX_WIDTH = 20, 80  # all has its place; a wider frame would be wrapped by more resizes (decision 009)
_FRAME_CELLS = 4  # border and padding at both sides
_GAP = 2
_CALM = 1.5  # steps that differ by less than this factor do not fill the height of the sparkline
_MOST_LAYERS = 32  # that keep a cell each where that costs other parts of the row their room
_MIN_BAR, _LONG_BAR = 6, 14

_STAGE_COLOURS = {
    "dense": "blue", "hash": "cyan", "retrieve": "green", "attend": "yellow", "merge": "magenta", "window": "red",
    "other": "bright_black",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """What the terminal can show. Without colours a stage is drawn with its initial; without UTF-8 all is ASCII."""

    colour: bool = True
    utf8: bool = True

    @property
    def levels(self) -> str:
        return "▁▂▃▄▅▆▇█" if self.utf8 else ".:-=+*%#"

    @property
    def full(self) -> str:
        return "█" if self.utf8 else "#"

    @property
    def empty(self) -> str:
        return "░" if self.utf8 else "."

    @property
    def box(self) -> box.Box:
        return box.ROUNDED if self.utf8 else box.ASCII

    def said(self, text: str) -> str:
        """Text that names no glyph of ours, as this terminal can show it."""
        text = printable(text).replace("\n", " ").replace("\t", " ")
        return text if self.utf8 else text.replace("·", "-").encode("ascii", "replace").decode()


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a row: fixed text, or something that is drawn into the cells that are left. Rank 0 stays longest."""

    rank: int
    text: Text | None = None
    draw: Callable[[int], Text] | None = None
    want: int = _MIN_BAR  # cells of what is drawn, before less important parts get any

    def cells(self, room: int) -> int:
        """Cells that it takes of those that are left."""
        return max(_MIN_BAR, min(self.want, room)) if self.text is None else self.text.cell_len


def render(state: LiveState, width: int, look: Look | None = None) -> Panel:
    """A panel of ROWS rows and `width` cells, MIN_WIDTH or more."""
    look = look or Look()
    inner = width - _FRAME_CELLS
    makers = (_task, _speed, _stages, _layers, _memory)
    rows = [_fit(maker(state, look), inner) for maker in makers]
    title = Text(look.said(state.setup.title), style="bold", no_wrap=True)
    title.truncate(max(1, width - 6), overflow="ellipsis" if look.utf8 else "crop")
    return Panel(
        Group(*rows), box=look.box, width=width, title=title, title_align="left", border_style="dim",
        padding=(0, 1), safe_box=False,
    )  # fmt: skip


def _fit(parts: Sequence[_Part], width: int) -> Text:
    """Parts in one row of exactly `width` cells."""
    room = width
    kept: list[_Part] = []
    for part in sorted(parts, key=lambda part: part.rank):
        gap = _GAP if kept else 0
        needed = part.cells(room - gap) + gap
        if not kept or needed <= room:
            room -= needed
            kept.append(part)
    row = Text(no_wrap=True, overflow="crop", end="\n")
    for part in parts:
        if part not in kept:
            continue
        if row.cell_len:
            row.append(" " * _GAP)
        if part.text is not None:
            row.append_text(part.text)
        elif part.draw is not None:
            others = sum(other.cells(0) + _GAP for other in kept if other is not part)
            row.append_text(part.draw(width - others))
    row.truncate(width, overflow="crop", pad=True)
    return row


def _fixed(rank: int, text: str, style: str = "") -> _Part:
    return _Part(rank, Text(text, style))


def _bar(share: float, look: Look) -> Callable[[int], Text]:
    def draw(cells: int) -> Text:
        full = round(min(1.0, max(0.0, share)) * cells)
        return Text.assemble((look.full * full, "green"), (look.empty * (cells - full), "dim"))

    return draw


# The rows, from top to bottom


def _task(state: LiveState, look: Look) -> list[_Part]:
    if state.work is not None:
        return _work(state, state.work, look)
    if state.reading is not None:
        return _prompt(state.reading, look)
    slot = next(iter(state.slots.values()), None)
    if slot is None:
        return [_fixed(0, "starting")]
    parts = [_fixed(1, "answering", "bold"), _fixed(0, f"{slot.generated:,} tokens")]
    if context := state.setup.context:
        parts += [
            _Part(3, draw=_bar(slot.tokens / context, look)),
            _fixed(2, f"context {slot.tokens:,} / {context:,}"),
        ]
    return parts


def _prompt(slot: Slot, look: Look) -> list[_Part]:
    parts = [
        _fixed(1, "reading the prompt", "bold"),
        _Part(2, draw=_bar(slot.read / slot.to_read if slot.to_read else 0.0, look)),
        _fixed(0, f"{slot.read:,} / {slot.to_read:,} tok"),
    ]
    if speed := slot.read_tok_s:
        left = (slot.to_read - slot.read) / speed
        parts += [_fixed(3, f"{speed:,.0f} tok/s"), _fixed(4, f"ETA {format_seconds(left)}")]
    return parts


def _work(state: LiveState, work: Work, look: Look) -> list[_Part]:
    unit = f" {work.unit}" if work.unit else ""
    parts = [_fixed(1, look.said(work.what), "bold"), _fixed(0, f"{work.done:,} / {work.total:,}{unit}")]
    if state.setup.slots > 1 and state.slots:
        parts.append(_Part(2, _slots(state, look)))
    parts.append(_Part(4, draw=_bar(work.done / work.total if work.total else 0.0, look)))
    if work.failed:
        parts.append(_fixed(2, f"{work.failed:,} failed", "red"))
    if work.detail:
        parts.append(_fixed(5, look.said(work.detail)))
    if (eta := work.eta_s) is not None:
        parts.append(_fixed(3, f"ETA {format_seconds(eta)}"))
    return parts


def _slots(state: LiveState, look: Look) -> Text:
    """One cell per slot: answering, reading, free."""
    running, reads, free = "▶◐·" if look.utf8 else ">r."
    slots = list(state.slots.values())
    text = Text()
    for slot in slots:
        text.append(reads if slot.reading else running, "yellow" if slot.reading else "green")
    text.append(free * max(0, state.setup.slots - len(slots)), "dim")
    return text


def _speed(state: LiveState, look: Look) -> list[_Part]:
    speed = state.tok_s
    if speed is None:
        return [_fixed(0, "no token yet", "dim")]
    p50, p99 = state.percentiles(50, 99)
    return [
        _fixed(0, f"{speed:.1f} tok/s", "bold"),
        _fixed(3, f"last {state.wall_ms[-1]:.1f}"),
        _fixed(2, f"p50 {p50:.1f}"),
        _fixed(1, f"p99 {p99:.1f} ms"),
        _Part(4, draw=lambda cells: _sparkline(list(state.wall_ms)[-cells:], cells, look)),
    ]


def _sparkline(values: list[float], cells: int, look: Look) -> Text:
    """The newest value at the right; from the smallest shown to the largest, or half as much again if that is more."""
    low = min(values)
    top = max(max(values), low * _CALM)
    return Text("".join(_level(value - low, top - low, look) for value in values).rjust(cells), "cyan")


def _level(value: float, top: float, look: Look) -> str:
    """The mark of a value between 0 and `top`."""
    levels = look.levels
    return levels[min(len(levels) - 1, int(value / top * len(levels)))] if top > 0 else levels[0]


def _stages(state: LiveState, look: Look) -> list[_Part]:
    shares = state.stage_shares()
    if not shares:
        return [_fixed(0, "stages", "dim")]
    shown = [stage for stage, share in shares.items() if share >= 0.005]
    by_size = sorted(shown, key=lambda stage: -shares[stage])
    legend = [
        _fixed(2 + by_size.index(stage), f"{stage} {shares[stage]:.0%}", _STAGE_COLOURS.get(stage, ""))
        for stage in shown
    ]
    bar = _Part(0, draw=lambda cells: _stacked(shares, cells, look), want=_LONG_BAR)
    return [_fixed(20, "stages", "dim"), bar, *legend]


def _stacked(shares: dict[str, float], cells: int, look: Look) -> Text:
    """Each stage as many cells as its share; edges are rounded, so the cells add up."""
    text, reached, drawn = Text(), 0.0, 0
    for stage, share in shares.items():
        reached += share
        end = round(reached * cells)
        mark = look.full if look.colour and look.utf8 else stage[0]
        text.append(mark * (end - drawn), _STAGE_COLOURS.get(stage, ""))
        drawn = end
    return text


def _layers(state: LiveState, look: Look) -> list[_Part]:
    ratio = state.sampled_ratio
    if ratio is None:
        return [_fixed(0, "no key sampled: exact attention" if state.steps else "sampled", "dim")]
    ratios = state.layer_ratios()
    top = max((r for r in ratios if r is not None), default=0.0)
    kinds = [kind for kind in ("dense", "window") if kind in state.setup.layers]
    return [
        _fixed(0, f"sampled {ratio:.1%}"),
        _Part(1, draw=lambda cells: _layer_cells(state, ratios, top, cells, look), want=min(len(ratios), _MOST_LAYERS)),
        _fixed(3, f"highest {top:.1%}"),
        *([_fixed(2, f"error {error:.1%}")] if (error := state.error_estimate) is not None else []),
        *(_fixed(4, f"{kind[0]} {kind}", "dim") for kind in kinds),
    ]


def _layer_cells(state: LiveState, ratios: list[float | None], top: float, cells: int, look: Look) -> Text:
    """A cell per layer, as high as its ratio of `top`; with less room than layers, a cell is the mean of neighbours."""
    kinds = state.setup.layers
    count = min(cells, len(kinds))
    marks: list[tuple[str, str]] = []  # (mark, style)
    for cell in range(count):
        here = range(cell * len(kinds) // count, (cell + 1) * len(kinds) // count)
        known = [ratio for layer in here if (ratio := ratios[layer]) is not None]
        kind = kinds[here[0]]
        if known:
            marks.append((_level(sum(known) / len(known), top, look), "green"))
        else:
            marks.append(("." if kind == "sampled" else kind[0], "dim"))
    runs = ((style, "".join(mark for mark, _ in run)) for style, run in groupby(marks, key=lambda mark: mark[1]))
    return Text.assemble(*((run, style) for style, run in runs))


def _memory(state: LiveState, look: Look) -> list[_Part]:
    memory = state.memory
    parts = [
        _fixed(2, "memory", "dim"),
        _fixed(0, f"K/V {format_bytes(memory.get('kv_bytes', 0))}"),
        _fixed(1, f"index {format_bytes(memory.get('index_bytes', 0))}"),
    ]
    if vram := memory.get("vram_bytes"):
        parts.append(_fixed(3, f"GPU {format_bytes(vram)}"))
    if rss := memory.get("rss_bytes"):
        parts.append(_fixed(4, f"process {format_bytes(rss)}"))
    return parts
