"""The panel has the same number of rows at every width, each of exactly that width, whatever there is to show."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from magicpig_cli.events import STAGES, PrefillProgress, StepStats, TokenEvent
from magicpig_cli.ui.live_panel import ROWS, Look, render
from magicpig_cli.ui.live_state import LiveState, Setup, Work

LAYERS = ("dense", *("sampled",) * 6, "window", *("sampled",) * 22)
LOOKS = {"full": Look(), "no colour": Look(colour=False), "ascii": Look(colour=False, utf8=False)}


def empty(title: str = "a model · lsh K=10 L=150") -> LiveState:
    return LiveState(Setup(title, LAYERS, slots=4, context=8192))


def answering(state: LiveState | None = None) -> LiveState:
    """Forty steps; layer n sampled n keys of 1,000 in each."""
    state = state or empty()
    state.update(PrefillProgress("a", 4000, 4000, 8.0))
    sampled = {layer: layer for layer, kind in enumerate(LAYERS) if kind == "sampled"}
    for number in range(40):
        wall_ms = 20.0 + number % 5
        stages = {stage: wall_ms * share for stage, share in zip(STAGES, (50, 4, 12, 20, 1, 5, 8), strict=True)}
        stages = {stage: ms / 100 for stage, ms in stages.items()}
        state.update(StepStats(1, wall_ms, stages, sampled, dict.fromkeys(sampled, 1000)))
        state.update(TokenEvent("a", 1, "x"))
    state.memory = {"kv_bytes": 92 << 20, "index_bytes": 41 << 20, "rss_bytes": 1200 << 20, "vram_bytes": 9 << 30}
    return state


def reading() -> LiveState:
    state = empty()
    state.update(PrefillProgress("a", 0, 1_000_000, 0.0))
    state.update(PrefillProgress("a", 123_456, 1_000_000, 3.0))
    return state


def batch() -> LiveState:
    state = answering()
    state.update(PrefillProgress("b", 10, 900, 0.1))
    state.work = Work("reading a prompt", 12, 40_000, "lines", "10 of 900 tokens", 3, 70.0, 3)
    return state


def signatures() -> LiveState:
    """The error that the sampler itself estimates: layer 1 off by 3%, layer 2 by 5%."""
    state = empty("a model · lsh K=10 L=150")
    state.update(StepStats(1, 20.0, {"other": 20.0}, {1: 20, 2: 20}, {1: 1000, 2: 1000}, {1: 0.0009, 2: 0.0025}, 0.02))
    return state


def exact() -> LiveState:
    state = empty()
    state.update(StepStats(1, 20.0, {"dense": 20.0}))
    return state


STATES = {
    "empty": empty,
    "answering": answering,
    "reading": reading,
    "batch": batch,
    "exact": exact,
    "signatures": signatures,
}


def lines(state: LiveState, width: int, look: Look | None = None) -> list[str]:
    """The rows as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, markup=False)
    console.print(render(state, width, look))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("name", STATES)
def test_every_width_has_the_same_rows(name, look):
    state = STATES[name]()
    for width in range(20, 201):
        rows = lines(state, width, look)
        assert len(rows) == ROWS, width
        assert [cell_len(row) for row in rows] == [width] * ROWS, width


@pytest.mark.parametrize("name", STATES)
def test_ascii_where_the_terminal_knows_no_more(name):
    text = "\n".join(lines(STATES[name](), 100, LOOKS["ascii"]))
    assert text.isascii()
    assert "a model - lsh" in text


def test_the_most_important_figures_stay_at_the_narrowest():
    text = "\n".join(lines(answering(), 20))
    for figure in ("40 tokens", "45.3 tok/s", "sampled 1.5%", "K/V 92.0 MiB"):
        assert figure in text


def test_everything_has_its_place_at_100():
    text = "\n".join(lines(answering(), 100))
    for figure in (
        "context 4,040 / 8,192", "last 24.0", "p50 22.0", "p99 24.0 ms", "dense 50%", "attend 20%", "sampled 1.5%",
        "highest 2.9%", "d dense", "w window", "index 41.0 MiB", "GPU 9.0 GiB", "process 1.2 GiB",
    ):  # fmt: skip
        assert figure in text
    assert "no key sampled" in "\n".join(lines(exact(), 100))


def test_a_cell_per_layer_with_dense_and_windowed_ones_marked():
    row = next(row for row in lines(answering(), 100) if "sampled" in row)
    cells = row.split("  ")[1]
    assert len(cells) == len(LAYERS)
    assert [place for place, cell in enumerate(cells) if cell == "d"] == [0]
    assert [place for place, cell in enumerate(cells) if cell == "w"] == [7]
    heights = ["▁▂▃▄▅▆▇█".index(cell) for cell in cells if cell not in "dw"]
    assert heights == sorted(heights)  # layer n sampled n keys
    assert heights[0] == 0
    assert heights[-1] == 7


def test_stages_fill_their_bar_in_proportion():
    row = next(row for row in lines(answering(), 200, LOOKS["no colour"]) if "stages" in row)
    bar = next(part for part in row.split("  ") if part.startswith("dd"))
    shares = {stage: bar.count(stage[0]) / len(bar) for stage in STAGES}
    assert shares["dense"] == pytest.approx(0.50, abs=1 / len(bar))
    assert shares["attend"] == pytest.approx(0.20, abs=1 / len(bar))
    assert sum(shares.values()) == 1
    assert bar == "".join(stage[0] * bar.count(stage[0]) for stage in STAGES)  # in their order


def test_prompt_and_batch_say_how_far_they_are():
    text = "\n".join(lines(reading(), 100))
    assert "reading the prompt" in text
    assert "123,456 / 1,000,000 tok" in text
    assert "ETA 21.3 s" in text  # 876,544 tokens at 41,152 per second
    text = "\n".join(lines(batch(), 100))
    assert "12 / 40,000 lines" in text
    assert "▶◐··" in text
    assert "3 failed" in text


@pytest.mark.parametrize("strange", ["[/INST]", "[bold]x[/bold]", ":smile:", "a\x1b[2Jb", "a\nb", "é" * 300])
def test_names_are_neither_markup_nor_codes(strange):
    rows = lines(empty(strange), 80)
    assert len(rows) == ROWS
    shown = strange.replace("\x1b", "\\x1b").replace("\n", " ")
    assert shown[:40] in rows[0]
    assert "\x1b" not in "".join(rows)


def test_the_estimated_error_stands_beside_what_was_sampled():
    (row,) = (line for line in lines(signatures(), 80) if "sampled" in line)
    assert "sampled 2.0%" in row
    assert "error 4.0%" in row
    assert not any("error" in line for line in lines(answering(), 80))  # nobody has estimated it
