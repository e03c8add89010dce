"""Time per token against context, a line for each mode and batch size, its band from p50 to p99.

matplotlib writes files and plotext draws on a terminal; both come with the extra `plot` and are imported when drawing.
"""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.bench.compare import mode_words
from magicpig_cli.errors import UsageError
from magicpig_cli.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
INSTALL = "pip install 'magicpig-cli[plot]'"
_LOG_FROM = 10.0  # largest over smallest time from which the axis of times is logarithmic
_SIZE_INCHES = (8.0, 5.0)
_DPI = 150
_TERMINAL_LINES = 20
_COLORS = ("blue+", "orange", "green+", "red+", "magenta+", "cyan+")  # on a terminal
_SIGNS = ("*", "+", "o", "x", "#", "%")


@dataclass(frozen=True, slots=True)
class Curve:
    """Figures of one mode at one batch size by context, ascending; times in milliseconds."""

    label: str
    contexts: tuple[int, ...]
    p50: tuple[float, ...]
    p99: tuple[float, ...]
    beyond: tuple[bool, ...]  # beyond the model's context: speed only


def refuse(where: str) -> None:
    """Raise UsageError for a place or form in which no plot can be made here. `-`: the terminal."""
    suffix = Path(where).suffix.lower()
    if where != "-" and suffix not in SUFFIXES:
        raise UsageError(f"--plot {where} does not end in {', '.join(SUFFIXES)}", hint="--plot bench.png, or --plot -")
    package = "plotext" if where == "-" else "matplotlib"
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--plot {where} needs {package}, which is not installed", hint=INSTALL)


def curves(rows: list[dict[str, Any]]) -> list[Curve]:
    """Rows of a bench document by mode, tables and batch size, in the order in which these first appear."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(f"{mode_words(row)}, batch {row['batch']}", {})[row["context"]] = row
    return [_curve(label, by_context) for label, by_context in groups.items()]


def _curve(label: str, by_context: dict[int, dict[str, Any]]) -> Curve:
    ordered = [by_context[context] for context in sorted(by_context)]
    return Curve(
        label=label,
        contexts=tuple(row["context"] for row in ordered),
        p50=tuple(row["tpot_ms"]["p50"] for row in ordered),
        p99=tuple(row["tpot_ms"]["p99"] for row in ordered),
        beyond=tuple(row["beyond_model_context"] for row in ordered),
    )


def title(meta: dict[str, Any]) -> str:
    threads = "1 thread" if meta["threads"] == 1 else f"{meta['threads']} threads"
    return f"{meta['model']} · {meta['dtype']} · {meta['device']} · {meta['isa']} · {threads}"


def is_logarithmic(found: list[Curve]) -> bool:
    """Whether times span so much that the smallest would lie on the axis."""
    times = [ms for curve in found for ms in (*curve.p50, *curve.p99)]
    return max(times) / min(times) > _LOG_FROM


def image(meta: dict[str, Any], rows: list[dict[str, Any]], suffix: str) -> bytes:
    """The plot as the content of a file with this suffix, one of SUFFIXES."""
    from matplotlib.figure import Figure  # without pyplot: no window system is looked for

    found = curves(rows)
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(found):
        _draw(axes, curve, f"C{number % 10}")
    _scale_axes(axes, found)
    axes.set_title(title(meta), fontsize="medium", parse_math=False)
    axes.legend()
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip("."))
    return content.getvalue()


def _draw(axes: Axes, curve: Curve, color: str) -> None:
    """A line with its band; where there is one point only, a bar is all that can be seen of the band."""
    contexts = list(curve.contexts)
    axes.plot(contexts, list(curve.p50), color=color, label=curve.label)
    faces = ["white" if beyond else color for beyond in curve.beyond]
    axes.scatter(contexts, list(curve.p50), edgecolors=color, facecolors=faces, zorder=3)
    if len(contexts) > 1:
        axes.fill_between(contexts, list(curve.p50), list(curve.p99), color=color, alpha=0.2, linewidth=0)
    else:
        axes.vlines(contexts, list(curve.p50), list(curve.p99), color=color, alpha=0.4, linewidth=4)


def _scale_axes(axes: Axes, found: list[Curve]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    contexts = sorted({context for curve in found for context in curve.contexts})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([format_tokens(context) for context in contexts])
    beyond = any(any(curve.beyond) for curve in found)
    axes.set_xlabel("context, tokens" + (" (hollow: beyond the model's own, speed only)" if beyond else ""))
    if is_logarithmic(found):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.set_ylabel("ms per token: p50, band to p99")
    axes.grid(True, alpha=0.3)


def terminal(meta: dict[str, Any], rows: list[dict[str, Any]], columns: int, *, color: bool) -> str:
    """The plot as lines of text, at most `columns` wide; contexts are spaced by their logarithm."""
    import plotext

    found = curves(rows)
    contexts = sorted({context for curve in found for context in curve.contexts})
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(columns, _TERMINAL_LINES)
    for number, curve in enumerate(found):
        _draw_lines(curve, _COLORS[number % len(_COLORS)], None if color else _SIGNS[number % len(_SIGNS)])
    plotext.xscale("log")
    plotext.xticks(contexts, [format_tokens(context) for context in contexts])
    if is_logarithmic(found):
        plotext.yscale("log")
    else:
        plotext.ylim(0, None)
    plotext.title(title(meta))
    plotext.xlabel("context")
    plotext.ylabel("ms/token, p50, bar to p99")
    text = str(plotext.build())
    return "\n".join(line.rstrip() for line in (text if color else plotext.uncolorize(text)).splitlines()) + "\n"


def _draw_lines(curve: Curve, color: str, sign: str | None) -> None:
    """A line, a bar from p50 to p99 at each of its points, and the points above both. sign: where no colours are."""
    import plotext

    for context, low, high in zip(curve.contexts, curve.p50, curve.p99, strict=True):
        plotext.plot([context, context], [low, high], marker="│", color=color)
    contexts, times = list(curve.contexts), list(curve.p50)
    plotext.plot(contexts, times, marker=sign or "hd", color=color, label=curve.label)
    plotext.scatter(contexts, times, marker=sign or "●", color=color)
