"""Plots: which points belong together, files that are what they are called, text on a terminal."""

from __future__ import annotations

import importlib.util

import pytest

from magicpig_cli.bench import plot
from magicpig_cli.errors import UsageError
from tests.bench.rows import META, row, steady

ROWS = [
    row("lsh", 32768, steady(60)), row("lsh", 8192, steady(40)),
    row("exact", 8192, steady(50)), row("exact", 32768, steady(100)),
    row("lsh", 8192, steady(90), batch=4),
]  # fmt: skip


def test_curves_are_by_mode_and_batch_ascending():
    found = plot.curves(ROWS)
    assert [curve.label for curve in found] == ["lsh K=10 L=150, batch 1", "exact, batch 1", "lsh K=10 L=150, batch 4"]
    assert found[0].contexts == (8192, 32768)
    assert found[0].p50 == (ROWS[1]["tpot_ms"]["p50"], ROWS[0]["tpot_ms"]["p50"])
    assert found[0].p99 == (ROWS[1]["tpot_ms"]["p99"], ROWS[0]["tpot_ms"]["p99"])
    assert found[0].beyond == (False, True)


def test_times_get_a_logarithmic_axis_where_they_span_much():
    assert not plot.is_logarithmic(plot.curves(ROWS))
    assert plot.is_logarithmic(plot.curves([*ROWS, row("exact", 98304, steady(500))]))


@pytest.mark.parametrize(
    ("suffix", "begin"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".pdf", b"%PDF-")]
)  # fmt: skip
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1]], ids=["several", "one"])
def test_images(suffix, begin, rows):
    content = plot.image({**META, "model": "a$b^{$ [/x]"}, rows, suffix)
    assert content.startswith(begin)
    assert len(content) > 5000


def test_text_in_an_image_is_no_formula(monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    content = plot.image({**META, "model": "a$b$c"}, ROWS, ".svg").decode()
    assert "a$b$c · float32" in content
    for text in ("lsh K=10 L=150, batch 4", "8k", "32k", "hollow: beyond"):
        assert text in content


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_terminal(columns):
    text = plot.terminal(META, ROWS, columns, color=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) == 20
    for sign, curve in zip("*+o", plot.curves(ROWS), strict=True):
        assert f"{sign}{sign} {curve.label}" in text
    assert "32k" in lines[-2]
    assert "\x1b[" in plot.terminal(META, ROWS, columns, color=True)


def test_one_plot_does_not_show_in_the_next():
    first = plot.terminal(META, ROWS, 80, color=False)
    plot.terminal(META, [row("exact", 1024, steady(5000))], 80, color=False)
    assert plot.terminal(META, ROWS, 80, color=False) == first


@pytest.mark.parametrize(("where", "package"), [("a.png", "matplotlib"), ("-", "plotext")])
def test_a_missing_package_is_answered_with_the_install_command(monkeypatch, where, package):
    plot.refuse(where)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(UsageError, match=package) as caught:
        plot.refuse(where)
    assert caught.value.hint == "pip install 'magicpig-cli[plot]'"


@pytest.mark.parametrize("where", ["a.txt", "a", "png", ".png/x"])
def test_an_unknown_form_is_refused(where):
    with pytest.raises(UsageError, match="does not end in"):
        plot.refuse(where)
