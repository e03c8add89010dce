"""Tables of a bench on terminals of any width: every column once, every part names its rows, nothing too wide."""

from __future__ import annotations

import pytest

from magicpig_cli.bench.compare import Earlier, compare, key
from magicpig_cli.bench.report import COLUMNS, COMPARED_COLUMNS, RUN_COLUMNS, Results
from magicpig_cli.ui import bench as page
from magicpig_cli.ui import console
from tests.bench.rows import META, row, steady

ROWS = [row("exact", 8192, steady(50)), row("lsh", 8192, steady(40)), row("lsh", 98304, steady(60), fill="real")]


@pytest.fixture
def results():
    earlier = Earlier("old.json", META, {key(one): one for one in ROWS})
    return Results(META, ROWS, compare(earlier, META, ROWS))


@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
def test_a_terminal_of_any_width(results, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert console.terminal_columns() == width
    page.print_tables(results)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if line.startswith(("ctx", "8192", "98304"))) <= width
    headers = [line for line in lines if line.startswith("ctx")]
    assert all({"ctx", "batch", "mode"} <= set(header.split()) for header in headers)
    words = " ".join(headers).split()
    for name in {*COLUMNS, *COMPARED_COLUMNS} - {*RUN_COLUMNS, "ctx", "batch", "mode"}:
        assert set(name.split()) <= set(words), name
    assert words.count("sampled") == words.count("verdict") == 1
    assert "* beyond the model's context: speed only" in lines
    assert sum(line.startswith("98304") for line in lines) == len(headers)


def test_a_file_gets_two_tables_whole(results, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    page.print_tables(results)
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("ctx")]) == 2
    assert "1.00× (0.99–1.01)" in out
