"""One chart of a result file: throughput over sequence length, a panel for each pass and kind of problem."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .record import Row, measured

# Mid tones that keep their contrast on white and on near-black; the background stays transparent.
COLOURS = ("#2f81f7", "#e0702a", "#1f9d5f", "#c2459a", "#8a6df0", "#0f9aa8", "#d14b4b", "#9a8412")
INK = "#767c85"
PASSES = {"fwd": "forward", "bwd": "backward", "fwdbwd": "forward + backward"}


def draw(rows: Sequence[Row], path: Path, pattern: str = "grid/*/causal/*") -> None:
    """Write an SVG (or whatever the suffix says) of the timed cases that match ``pattern``.

    Columns are kinds of problems (case names without their last part), rows are passes.
    """
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Charts are drawn with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [r for r in measured(rows).values() if fnmatchcase(r["case"], pattern) and r.get("tflops") is not None]
    if not found:
        raise SystemExit(f"no timed case in this file matches {pattern!r}")
    kinds = list(dict.fromkeys((_kind(r), r["dtype"]) for r in found))
    passes = [p for p in PASSES if any(r["pass"] == p for r in found)]
    names = list(dict.fromkeys(r["impl"] for r in found))
    ours = {r["impl"] for r in found if r["ours"]}
    on_cpu = all(r["device"] == "cpu" for r in found)
    unit, scale = ("GFLOP/s", 1e3) if on_cpu else ("TFLOP/s", 1.0)

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "speedlight", "font.family": "sans-serif", "font.size": 10,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with plt.rc_context(style):
        size = 1.2 + 3.6 * len(kinds), 1.3 + 2.6 * len(passes)
        figure, axes = plt.subplots(len(passes), len(kinds), figsize=size, squeeze=False, sharex="col")
        for line, name in enumerate(passes):
            for column, (kind, dtype) in enumerate(kinds):
                axis = axes[line][column]
                ticks: set[int] = set()
                for order, implementation in enumerate(names):
                    points = sorted(
                        (r["seqlen"], r["tflops"] * scale)
                        for r in found
                        if (r["impl"], r["pass"], _kind(r), r["dtype"]) == (implementation, name, kind, dtype)
                    )
                    if not points:
                        continue
                    ticks.update(x for x, _ in points)
                    own = implementation in ours
                    prefix = "speedlight " if own and implementation != "speedlight" else ""
                    axis.plot(
                        *zip(*points, strict=True), label=prefix + implementation,
                        color=COLOURS[order % len(COLOURS)], marker="o", markersize=4 if own else 3,
                        linewidth=2.4 if own else 1.3, linestyle="-" if own else "--",
                    )  # fmt: skip
                axis.set_title(f"{PASSES[name]}, {kind.split('/', 1)[-1].replace('/', ' ')}, {dtype}", fontsize=10)
                axis.set_xscale("log", base=2)
                axis.set_xticks(sorted(ticks), [f"{x // 1024}k" if x % 1024 == 0 else str(x) for x in sorted(ticks)])
                axis.minorticks_off()
                axis.set_ylim(bottom=0)
                axis.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
                if column == 0:
                    axis.set_ylabel(unit)
                if line == len(passes) - 1:
                    axis.set_xlabel("sequence length")
        by_label: dict[Any, Any] = {}
        for axis in axes.flat:
            by_label.update((label, line) for line, label in zip(*axis.get_legend_handles_labels(), strict=True))
        per_line = 4 if len(kinds) > 1 else 2
        figure.legend(list(by_label.values()), list(by_label), loc="upper center", ncols=per_line, frameon=False)
        env = found[-1]["env"]
        where = env.get("cpu" if on_cpu else "gpu")
        figure.text(0.99, 0.005, f"{where}, torch {env['torch']}, {env['date'][:10]}, medians", ha="right", fontsize=8)
        legend_inches = 0.1 + 0.22 * -(-len(by_label) // per_line)
        figure.tight_layout(rect=(0, 0.02, 1, 1 - legend_inches / figure.get_figheight()))
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def _kind(row: Row) -> str:
    return row["case"].rsplit("/", 1)[0]
