"""Tables and comparisons of result files. The figures are computed apart from how they are shown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

from .record import Row, measured
from .timing import ratio

# Two runs of the same code on one H200 differed by 1.2 % at the median and 16 % at worst, so a comparison of files
# calls nothing below this a difference.
NOISE = 0.03


@dataclass(frozen=True)
class Entry:
    """``ratio``: baseline over this one, in time or memory; above 1 is better than the baseline."""

    value: float
    ratio: float | None


@dataclass
class Table:
    """One suite, pass and dtype: entries by case name and implementation; ``geomeans`` of the ratios."""

    title: str
    unit: str
    implementations: list[str] = field(default_factory=list)
    entries: dict[str, dict[str, Entry]] = field(default_factory=dict)

    @property
    def geomeans(self) -> dict[str, tuple[float, int]]:
        """(geometric mean of the ratios, number of cells) by implementation."""
        found: dict[str, list[float]] = defaultdict(list)
        for by_name in self.entries.values():
            for name, entry in by_name.items():
                if entry.ratio is not None:
                    found[name].append(entry.ratio)
        return {name: (geomean(ratios), len(ratios)) for name, ratios in found.items()}


@dataclass(frozen=True)
class Change:
    """One cell in two files. ``ratio``: a over b; above 1, b is better. ``verdict``: "better", "worse" or ""."""

    cell: tuple[str, str, str, str, str]
    unit: str
    a: float
    b: float
    ratio: float
    verdict: str


def geomean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def ratio_between(base: Row, row: Row) -> float:
    """Median of the ratios round by round where both were measured side by side, else the ratio of the medians."""
    if row.get("median_ms") is None:
        return base["peak_mib"] / row["peak_mib"]
    if base["env"] == row["env"] and len(base["round_ms"]) == len(row["round_ms"]):
        return ratio(base["round_ms"], row["round_ms"])
    return base["median_ms"] / row["median_ms"]


def _value(row: Row) -> tuple[float, str]:
    if row.get("median_ms") is None:
        return row["peak_mib"], "MiB"
    if row["mode"] == "host":
        return row["median_ms"] * 1e3, "us"
    if row["device"] == "cpu":
        return row["tflops"] * 1e3, "GFLOP/s"
    return row["tflops"], "TFLOP/s"


def tables(rows: Sequence[Row], baseline: str | None = None) -> list[Table]:
    """Ratio tables by suite, pass, dtype and unit, in the order of the file.

    ``baseline``: default the one that the run used. Cells without it have no ratio.
    """
    cells = measured(rows)
    found: dict[tuple[Any, ...], Table] = {}
    for (case, dtype, device, name, implementation), row in cells.items():
        value, unit = _value(row)
        key = (row["suite"], name, dtype, device, unit)
        table = found.setdefault(key, Table(f"{row['suite']}, {name}, {dtype}, {device}", unit))
        against = baseline or row.get("baseline")
        base = cells.get((case, dtype, device, name, against)) if against else None
        entry = Entry(value, ratio_between(base, row) if base and _value(base)[1] == unit else None)
        table.entries.setdefault(case, {})[implementation] = entry
        if implementation not in table.implementations:
            table.implementations.append(implementation)
    return list(found.values())


def unmeasured(rows: Sequence[Row]) -> list[str]:
    """Failures and refusals, in words."""
    said = [r for r in rows if r["status"] in ("refused", "failed")]
    return [f"{r['case']} {r['impl']} {r['status']}: {r['reason']}" for r in said]


def comparison(a: Sequence[Row], b: Sequence[Row], noise: float = NOISE) -> list[Change]:
    """Cells that both files have. A verdict needs a ratio beyond ``noise`` and p10-p90 ranges that do not meet."""
    old, new = measured(a), measured(b)
    changes = []
    for key, before in old.items():
        after = new.get(key)
        if after is None or (before.get("median_ms") is None) != (after.get("median_ms") is None):
            continue
        timed = before.get("median_ms") is not None
        x, y = (before["median_ms"], after["median_ms"]) if timed else (before["peak_mib"], after["peak_mib"])
        apart = not timed or before["p10_ms"] > after["p90_ms"] or after["p10_ms"] > before["p90_ms"]
        beyond = apart and abs(log(x / y)) > log(1 + noise)
        verdict = ("better" if x > y else "worse") if beyond else ""
        changes.append(Change(key, "ms" if timed else "MiB", x, y, x / y, verdict))
    return changes


def comparison_geomeans(changes: Sequence[Change]) -> dict[tuple[str, str, str], tuple[float, int]]:
    """(geomean of the ratios, cells) by (implementation, pass, unit)."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for change in changes:
        groups[change.cell[4], change.cell[3], change.unit].append(change.ratio)
    return {key: (geomean(ratios), len(ratios)) for key, ratios in groups.items()}


def _rich() -> tuple[Any, Any]:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        raise SystemExit("Tables are printed with rich: pip install 'speedlight[demo]' (or rich alone)") from None
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a file or pipe has no width to keep to
    return console, RichTable


def print_tables(rows: Sequence[Row], baseline: str | None = None) -> None:
    console, rich_table = _rich()
    for table in tables(rows, baseline):
        console.print(f"\n{table.title}: {table.unit}, and ratio to {baseline or 'the baseline'} (above 1 is better)")
        shown = rich_table()
        shown.add_column("case")
        for name in table.implementations:
            shown.add_column(name, justify="right", no_wrap=True)
        for case, entries in table.entries.items():
            shown.add_row(case, *(_cell_text(entries.get(name)) for name in table.implementations))
        means = table.geomeans
        if means:
            shown.add_section()
            texts = [f"{means[n][0]:.3f}x of {means[n][1]}" if n in means else "" for n in table.implementations]
            shown.add_row("geomean", *texts, style="bold")
        console.print(shown)
    for line in unmeasured(rows):
        console.print(line, markup=False)


def _cell_text(entry: Entry | None) -> str:
    if entry is None:
        return ""
    digits = 1 if entry.value < 100 else 0
    return f"{entry.value:.{digits}f}" + (f"  {entry.ratio:.3f}x" if entry.ratio is not None else "")


def print_comparison(a: Sequence[Row], b: Sequence[Row], noise: float = NOISE) -> None:
    console, rich_table = _rich()
    changes = comparison(a, b, noise)
    console.print("A against B: above 1, B is better")
    shown = rich_table()
    for name in ("case", "dtype", "device", "pass", "implementation"):
        shown.add_column(name)
    for name in ("A", "B", "A / B", ""):
        shown.add_column(name, justify="right", no_wrap=True)
    colour = {"better": "green", "worse": "red", "": ""}
    for change in changes:
        shown.add_row(
            *change.cell, f"{change.a:.4g} {change.unit}", f"{change.b:.4g} {change.unit}", f"{change.ratio:.3f}",
            change.verdict, style=colour[change.verdict],
        )  # fmt: skip
    console.print(shown)
    for (implementation, name, unit), (mean, count) in comparison_geomeans(changes).items():
        console.print(f"geomean {implementation} {name} ({unit}): {mean:.3f} over {count} cells")
    only = len(measured(a)) + len(measured(b)) - 2 * len(changes)
    if only:
        console.print(f"{only} cells are in one file only")
    console.print(
        f"Marked: beyond {noise:.0%} and with separate p10-p90 ranges. The two files were not measured side by side; "
        "for claims of a few per cent put both into one run."
    )
