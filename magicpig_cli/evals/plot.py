"""What error a mode has for what it samples and for what its index takes. matplotlib comes with the extra `plot`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicpig_cli.bench import plot as bench_plot
from magicpig_cli.errors import UsageError
from magicpig_cli.units import format_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

_SIZE_INCHES = (11.0, 8.0)
_DPI = 150
_LOWEST = 0.1  # of a value: how far a bar goes down at most, where 0 would be infinitely far
_MARKERS = "osD^vP*X"
_METRICS = {"kl_mean": "KL(exact ‖ mode), nats per token", "attn_error": "relative error of attention outputs"}
_COSTS = {
    "sampled_ratio": "sampled, % of keys",
    "index_bytes_per_token": "index, bytes per token and KV head",
}

Row = dict[str, Any]
Series = dict[tuple[str, str, int], list[Row]]  # by mode, text and context: a point per budget


def refuse(where: Path) -> None:
    """Raise UsageError for a file that cannot be drawn here."""
    if str(where) == "-":
        raise UsageError("--plot - is no file, and these plots are not drawn on a terminal", hint="--plot eval.png")
    bench_plot.refuse(str(where))


def series(rows: list[Row], metric: str, cost: str) -> Series:
    """Rows of this metric that have this cost and are above 0, by ascending cost."""
    found: Series = {}
    for row in rows:
        if row["metric"] == metric and row[cost] and row["value"] > 0:
            found.setdefault((row["mode"], row["text"], row["context"]), []).append(row)
    return {key: sorted(points, key=lambda row: float(row[cost])) for key, points in found.items()}


def image(meta: dict[str, Any], rows: list[Row], suffix: str) -> bytes:
    """The plot as the content of a file with this suffix, one of `bench.plot.SUFFIXES`."""
    from matplotlib.figure import Figure  # without pyplot: no window system is looked for

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(_METRICS), len(_COSTS), sharey="row", squeeze=False)
    for metric, line in zip(_METRICS, panels, strict=True):
        for cost, axes in zip(_COSTS, line, strict=True):
            _draw(axes, series(rows, metric, cost), meta, metric, cost)
    handles, names = panels[0][0].get_legend_handles_labels()  # everything that the other panels show is here
    if handles:
        figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize="small")
    figure.suptitle(bench_plot.title(meta), fontsize="medium", parse_math=False)
    content = io.BytesIO()
    figure.savefig(content, format=suffix.lstrip("."))
    return content.getvalue()


def _draw(axes: Axes, found: Series, meta: dict[str, Any], metric: str, cost: str) -> None:
    """Colours are modes, markers texts and contexts; intervals as bars."""
    modes = list(dict.fromkeys(mode for mode, _, _ in found))
    places = list(dict.fromkeys((text, context) for _, text, context in found))
    for (mode, text, context), points in found.items():
        x = [(100 if cost == "sampled_ratio" else 1) * row[cost] for row in points]
        y = [row["value"] for row in points]
        ends = [row["ci95"] or (value, value) for row, value in zip(points, y, strict=True)]
        bars = [
            [value - max(low, value * _LOWEST) for value, (low, _) in zip(y, ends, strict=True)],
            [high - value for value, (_, high) in zip(y, ends, strict=True)],
        ]
        full = " (full scores)" if mode in meta["full_scores"] else ""
        axes.errorbar(
            x, y, yerr=bars, color=f"C{modes.index(mode) % 10}", capsize=2, linewidth=1,
            marker=_MARKERS[places.index((text, context)) % len(_MARKERS)], linestyle=":" if full else "-",
            label=f"{mode}{full}, {text}, {format_tokens(context)}".replace("$", r"\$"),
        )  # fmt: skip
    if found:
        _scale_axes(axes, cost)
    axes.set_xlabel(_COSTS[cost])
    axes.set_ylabel(_METRICS[metric])
    axes.grid(True, alpha=0.3)


def _scale_axes(axes: Axes, cost: str) -> None:
    """Errors and sizes span orders of magnitude, ratios do not."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    logarithmic: list[Axis] = [axes.yaxis]
    axes.set_yscale("log")
    if cost == "sampled_ratio":
        axes.set_xlim(left=0)
    else:
        axes.set_xscale("log")
        logarithmic.append(axes.xaxis)
    for axis in logarithmic:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FormatStrFormatter("%g"))
