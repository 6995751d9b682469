"""Show the results: a table for the terminal, and one HTML file with charts that opens offline.

The charts are SVG inside the page. They are drawn in placeholder colours that become CSS variables, so that the same
chart follows the reader's light or dark mode.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from rich.table import Table

from . import NAMES, Results
from .measure import MIB, Point
from .train import MARKOV_ORDER

METHODS = ("speedlight", "standard")
SAME_CURVE = 0.01  # bits per nucleotide: a twentieth of the steps between batches, not to be seen in the chart
NO_BREAK = "\u00a0"
SMALLEST = 1e-17  # where an error of 0 is drawn on a log axis
PLACEHOLDERS = {
    "speedlight": "#010203",
    "standard": "#010204",
    "ink": "#010205",
    "muted": "#010206",
    "grid": "#010207",
    "card": "#010208",
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "axes.edgecolor": PLACEHOLDERS["grid"],
    "axes.labelcolor": PLACEHOLDERS["muted"],
    "axes.titlecolor": PLACEHOLDERS["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": PLACEHOLDERS["ink"],
    "xtick.color": PLACEHOLDERS["muted"],
    "ytick.color": PLACEHOLDERS["muted"],
    "grid.color": PLACEHOLDERS["grid"],
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}


def write(results: Results, folder: Path) -> Path:
    """Write results.json and report.html into `folder`; returns the report's path."""
    (folder / "results.json").write_text(json.dumps(as_json(results), indent=1) + "\n", encoding="utf-8")
    path = folder / "report.html"
    path.write_text(render(results), encoding="utf-8")
    return path


def as_json(results: Results) -> dict[str, Any]:
    """Everything measured, without the genome; times in seconds, memory in bytes, losses in bits per nucleotide."""
    genome = {name: value for name, value in vars(results.genome).items() if name != "tokens"}
    training = asdict(results.training)
    training["largest_difference"] = max(results.training.differences)
    training["nucleotides_per_second"] = {method: results.training.tokens_per_second(method) for method in METHODS}
    return {
        "command": results.command,
        "started": results.started.isoformat(timespec="seconds"),
        "total_seconds": results.total_seconds,
        "machine": results.machine,
        "genome": genome,
        "training": training,
        "errors": [asdict(row) for row in results.errors],
        "budget_mib": results.budget_mib,
        "points": [_without_nan(asdict(point)) for point in results.points],
        "choice": asdict(results.choice),
    }


def _without_nan(fields: dict[str, Any]) -> dict[str, Any]:
    """NaN is no JSON; a value that is not known is null."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}


def render(results: Results) -> str:
    """The report as one HTML page."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("speedlight.demo", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"memory": memory, "duration": duration, "scientific": scientific}
    with matplotlib.rc_context(_STYLE):
        charts: dict[str, Any] = {
            "loss": _chart(_draw_loss, results, (6.4, 3.9), "Training loss of both methods by step"),
            "clock": _chart(_draw_clock, results, (6.4, 3.9), "Training loss of both methods by training time"),
            "errors": {
                dtype: _chart(partial(_draw_errors, dtype=dtype), results, (6.4, 2.7), f"Largest error in {dtype}")
                for dtype in dict.fromkeys(row.dtype for row in results.errors)
            },
            "time": _chart(_draw_time, results, (6.4, 3.6), "Time of one attention layer by sequence length"),
        }
        if any(point.measured and point.peak_bytes for point in results.points):
            label = "Peak memory of one attention layer by sequence length"
            charts["memory"] = _chart(_draw_memory, results, (6.4, 3.6), label)
    return environment.get_template("report.html.j2").render(
        results=results,
        names=NAMES,
        summary=Summary(results),
        charts=charts,
        rows=scaling_rows(results),
        markov_order=MARKOV_ORDER,
    )


class Summary:
    """The sentences and key numbers that table and report share."""

    def __init__(self, results: Results) -> None:
        training = results.training
        self.largest_difference = max(training.differences)
        self.same = self.largest_difference <= SAME_CURVE
        self.speed = compare(training.speedup)
        self.clock = "sooner" if training.speedup >= 1 else "later"
        self.final = {method: run.validation[-1][1] for method, run in training.runs.items()}
        self.rate = {method: training.tokens_per_second(method) for method in METHODS}
        self.within = {method: _longest(results, method) for method in METHODS}
        self.common = common_point(results.points)

    @property
    def headline(self) -> str:
        """What this run shows, in one line; each half only as far as it is true."""
        curve = "The same loss curve" if self.same else f"Losses within {self.largest_difference:.2f} bits"
        headline = f"{curve}, {self.speed} training"
        if self.memory_ratio and self.common:
            headline += f", {self.memory_ratio} memory at {self.common[0].seqlen:,} nucleotides"
        return headline

    @property
    def memory_ratio(self) -> str:
        """How much less memory Speedlight takes at the longest length both ran, as words."""
        if self.common is None:
            return ""
        ours, theirs = (point.peak_bytes for point in self.common)
        if not ours or not theirs:
            return ""
        return f"{theirs / ours:,.0f}× less" if theirs >= ours else f"{ours / theirs:,.1f}× more"


def _longest(results: Results, method: str) -> Point | None:
    """The longest point of `method` that was measured and kept the budget."""
    kept = [
        point
        for point in results.points
        if point.method == method and point.measured and (point.peak_bytes or 0) <= results.budget_mib * MIB
    ]
    return kept[-1] if kept else None


def common_point(points: list[Point]) -> tuple[Point, Point] | None:
    """(Speedlight, standard) at the longest length that both ran."""
    ours, theirs = ({p.seqlen: p for p in points if p.method == method and p.measured} for method in METHODS)
    shared = ours.keys() & theirs.keys()
    return (ours[max(shared)], theirs[max(shared)]) if shared else None


def compare(ratio: float) -> str:
    """A speed ratio as words: '2.1× faster', '1.3× slower'."""
    return f"{ratio:.1f}× faster" if ratio >= 1 else f"{1 / ratio:.1f}× slower"


def scaling_rows(results: Results) -> list[dict[str, Any]]:
    """One row per sequence length with the point of each method, if there is one."""
    by_key = {(point.seqlen, point.method): point for point in results.points}
    lengths = sorted({seqlen for seqlen, _ in by_key})
    return [{"seqlen": n, **{method: by_key.get((n, method)) for method in METHODS}} for n in lengths]


def memory(value: float | None) -> str:
    """Bytes for a reader: 99.0 MiB, 3.1 GiB."""
    if value is None:
        return "not measurable here"
    if value < 1024 * MIB:
        return f"{value / MIB:.1f}{NO_BREAK}MiB"
    return f"{value / MIB / 1024:.1f}{NO_BREAK}GiB"


def duration(seconds: float) -> str:
    """Seconds for a reader: 8.1 ms, 1.23 s, 12.3 s."""
    if math.isnan(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1e3:.1f}{NO_BREAK}ms"
    return f"{seconds:.{2 if seconds < 10 else 1}f}{NO_BREAK}s"


def scientific(value: float) -> str:
    """A small number with one decimal: 3.4e-07, or 0."""
    return f"{value:.1e}" if value else "0"


def table(results: Results) -> Table:
    """The results in short, for the terminal."""
    summary = Summary(results)
    training = results.training
    grid = Table(title="Speedlight and standard attention", title_justify="left", title_style="bold")
    grid.add_column("")
    for name in NAMES.values():
        grid.add_column(name[0].upper() + name[1:], justify="right")
    final = (training.runs[method].losses[-1] for method in METHODS)
    grid.add_row("Training loss, last step, bits/nt", *(f"{loss:.5f}" for loss in final))
    grid.add_row("Validation loss, bits/nt", *(f"{summary.final[method]:.5f}" for method in METHODS))
    grid.add_row(f"Training speed, nt/s ({summary.speed})", *(f"{summary.rate[method]:,.0f}" for method in METHODS))
    for row in results.errors:
        if row.tensor in ("out", "dq"):
            label = f"Error of {row.tensor} against fp64, {row.dtype}"
            grid.add_row(label, scientific(row.speedlight), scientific(row.standard))
    if summary.common:
        seqlen = summary.common[0].seqlen
        grid.add_row(f"Forward + backward at {seqlen:,} nt", *(duration(point.seconds) for point in summary.common))
        grid.add_row(f"Peak memory at {seqlen:,} nt", *(memory(point.peak_bytes) for point in summary.common))
    longest = (f"{point.seqlen:,} nt" if point else "none" for point in (summary.within[method] for method in METHODS))
    grid.add_row(f"Longest run within {memory(results.budget_mib * MIB)}", *longest)
    grid.caption = (
        f"Losses differ by at most {scientific(summary.largest_difference)} bits/nt in {training.steps} steps. "
        f"Backend: {results.choice.backend}. {results.total_seconds:.0f} s in all."
    )
    grid.caption_justify = "left"
    return grid


def _chart(draw: Callable[[Figure, Results], None], results: Results, size: tuple[float, float], label: str) -> str:
    """Draw on a figure of `size` inches and return it as SVG for the page; `label` is what a screen reader says."""
    figure = Figure(figsize=size, layout="constrained")
    draw(figure, results)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": label}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', f'role="img" aria-label="{label}"', svg, count=1)
    svg = re.sub(r" font-family:[^;\"]*;?", "", svg)  # the page's own font
    for name, placeholder in PLACEHOLDERS.items():
        svg = svg.replace(placeholder, f"var(--{name})")
    return svg


def _colour(method: str) -> dict[str, Any]:
    """Standard attention is the broad line below, Speedlight the fine one above: both show where they coincide."""
    if method == "standard":
        return {"color": PLACEHOLDERS["standard"], "linewidth": 4.5, "alpha": 0.55, "zorder": 2}
    return {"color": PLACEHOLDERS["speedlight"], "linewidth": 1.6, "zorder": 3}


def _draw_loss(figure: Figure, results: Results) -> None:
    training = results.training
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 1.1))
    steps = range(training.steps)  # a step's loss is the one before its update, as a validation's
    for method in reversed(METHODS):
        run = training.runs[method]
        top.plot(steps, run.losses, label=f"{NAMES[method]}, training", **_colour(method))
        marks = {"s": 62, "alpha": 0.55} if method == "standard" else {"s": 16}
        where = [step for step, _ in run.validation]
        top.scatter(
            where,
            [loss for _, loss in run.validation],
            color=PLACEHOLDERS[method],
            zorder=4,
            linewidth=0,
            marker="D",
            label=f"{NAMES[method]}, validation",
            **marks,
        )
    _chance(top)
    _limit_loss(top, training.runs["standard"].losses)
    top.set_ylabel("bits per nucleotide")
    top.legend(fontsize=9.5, loc="upper right", ncols=2, labelcolor=PLACEHOLDERS["ink"])
    shown = [(step, value) for step, value in zip(steps, training.differences, strict=True) if value > 0]
    if shown:
        bottom.plot(*zip(*shown, strict=True), color=PLACEHOLDERS["ink"], linewidth=1, marker="o", markersize=2)
        bottom.set_yscale("log")
        low, high = min(value for _, value in shown), max(value for _, value in shown)
        bottom.set_ylim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 0.01))
        bottom.yaxis.set_major_locator(LogLocator(numticks=4))
        bottom.yaxis.set_minor_locator(NullLocator())
        bottom.yaxis.set_major_formatter(FuncFormatter(lambda value, _: power_tick(value)))
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_clock(figure: Figure, results: Results) -> None:
    training = results.training
    axes = figure.subplots()
    for method in reversed(METHODS):
        run = training.runs[method]
        clock = [sum(run.step_seconds[: i + 1]) for i in range(len(run.losses))]
        axes.plot(clock, run.losses, color=PLACEHOLDERS[method], linewidth=1.6, label=NAMES[method])
        axes.scatter(clock[-1:], run.losses[-1:], color=PLACEHOLDERS[method], s=34, zorder=4)
        axes.annotate(
            f"{clock[-1]:.1f} s",
            (clock[-1], run.losses[-1]),
            xytext=(7, -3),
            textcoords="offset points",
            color=PLACEHOLDERS[method],
            weight="bold",
            bbox={"facecolor": PLACEHOLDERS["card"], "edgecolor": "none", "pad": 1},
        )
    _chance(axes)
    _limit_loss(axes, training.runs["standard"].losses)
    axes.set_xlim(0, 1.12 * max(run.seconds for run in training.runs.values()))  # room for the last label
    axes.set_xlabel("seconds spent in the method's own training steps")
    axes.set_ylabel("bits per nucleotide")
    axes.legend(fontsize=9.5, labelcolor=PLACEHOLDERS["ink"])


def _chance(axes: Axes) -> None:
    style: dict[str, Any] = {"color": PLACEHOLDERS["muted"], "linewidth": 0.9, "linestyle": (0, (4, 3))}
    axes.axhline(2.0, **style, zorder=1, label="chance, 2 bits")


def _limit_loss(axes: Axes, losses: list[float]) -> None:
    """Leave room for the legend above the curves."""
    low, high = min([*losses, 2.0]), max([*losses, 2.0])
    axes.set_ylim(low - 0.12 * (high - low), high + 0.25 * (high - low))


def _draw_errors(figure: Figure, results: Results, dtype: str) -> None:
    axes = figure.subplots()
    rows = [row for row in results.errors if row.dtype == dtype]
    heights = range(len(rows), 0, -1)
    for method in reversed(METHODS):
        values = [max(getattr(row, method), SMALLEST) for row in rows]
        size = 110 if method == "standard" else 44
        axes.scatter(values, heights, size, PLACEHOLDERS[method], label=NAMES[method], zorder=3, linewidth=0)
    for row, height in zip(rows, heights, strict=True):
        pair = [max(row.speedlight, SMALLEST), max(row.standard, SMALLEST)]
        axes.plot(pair, [height] * 2, color=PLACEHOLDERS["muted"], linewidth=1, zorder=1)
    axes.set_xscale("log")
    _widen(axes, [value for row in rows for value in (row.speedlight, row.standard)])
    axes.set_yticks(list(heights), [row.tensor for row in rows])
    axes.set_ylim(0.4, len(rows) + 0.6)
    axes.set_xlabel("largest error ÷ largest value (left is better)")
    axes.grid(axis="y", visible=False)
    axes.legend(fontsize=9.5, labelcolor=PLACEHOLDERS["ink"], loc="best")


def _widen(axes: Axes, values: Iterable[float]) -> None:
    """At least whole decades on a log axis, so that near-equal errors look near-equal."""
    logs = [math.log10(max(value, SMALLEST)) for value in values]
    axes.set_xlim(10 ** (math.floor(min(logs) - 0.2)), 10 ** (math.ceil(max(logs) + 0.2)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_tick(value)))


def _draw_time(figure: Figure, results: Results) -> None:
    axes = figure.subplots()
    _lines(axes, results, lambda point: point.seconds, base=10)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration_tick(value)))
    axes.set_ylabel("forward + backward")


def _draw_memory(figure: Figure, results: Results) -> None:
    axes = figure.subplots()
    _lines(axes, results, lambda point: None if point.peak_bytes is None else point.peak_bytes / MIB, base=4)
    axes.axhline(results.budget_mib, color=PLACEHOLDERS["ink"], linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"budget {memory(results.budget_mib * MIB)}",
        (0.995, results.budget_mib),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=9.5,
        ha="right",
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: memory_tick(value)))
    axes.set_ylabel("peak memory above the inputs")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 8)  # room for the legend above the budget


def _lines(axes: Axes, results: Results, value_of: Callable[[Point], float | None], base: int) -> None:
    """Both methods on log-log axes: measured points filled, an extrapolated one hollow at the end of a dotted line.

    The vertical axis has its ticks at powers of `base`.
    """
    for method in reversed(METHODS):
        points = [(p, v) for p in results.points if p.method == method and (v := value_of(p)) and not math.isnan(v)]
        measured = [(p.seqlen, v) for p, v in points if p.measured]
        if not measured:
            continue
        colour = PLACEHOLDERS[method]
        style: dict[str, Any] = {"color": colour, "linewidth": 2, "marker": "o", "markersize": 5}
        axes.plot(*zip(*measured, strict=True), **style, label=NAMES[method])
        for point, value in points:
            if not point.measured:
                last = measured[-1]
                axes.plot([last[0], point.seqlen], [last[1], value], color=colour, linewidth=1.4, linestyle=":")
                axes.plot(
                    point.seqlen,
                    value,
                    color=colour,
                    marker="o",
                    markersize=6,
                    markerfacecolor="none",
                    linestyle="",
                    label="not run, extrapolated" if method == "standard" else None,
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=base)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.set_xticks([row["seqlen"] for row in _spaced(scaling_rows(results))])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("sequence length in nucleotides")
    axes.legend(fontsize=9.5, labelcolor=PLACEHOLDERS["ink"], loc="upper left")


def _spaced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lengths with room for a label: the last always, and no power of two just before it."""
    return [
        row
        for row, following in zip(rows, [*rows[1:], None], strict=True)
        if following is None or following["seqlen"] / row["seqlen"] > 1.6
    ]


def duration_tick(seconds: float) -> str:
    """8 ms, 100 ms, 10 s."""
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"


def memory_tick(mib: float) -> str:
    """4 MiB, 256 MiB, 1 GiB."""
    return f"{mib:g} MiB" if mib < 1024 else f"{mib / 1024:g} GiB"


def power_tick(value: float) -> str:
    """10⁻⁷, in plain characters: mathtext would place every digit by itself, for a font the page does not use."""
    exponent = round(math.log10(value))
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
