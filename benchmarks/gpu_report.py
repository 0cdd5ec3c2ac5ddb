"""The table and the figure of ``benchmarks.gpu``, from its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import Spread, ratios
from benchmarks.rows import Row
from fxremat.units import format_bytes

COLUMNS = ("", "budget", "peak", "step ms", "÷ base", "predicted ÷", "overlap", "waits", "note")


def line(row: Row) -> list[str]:
    """A line of the table."""
    for why in ("skipped", "failed"):
        if why in row:
            return [row["what"], *[""] * 7, row[why][:70]]
    spread = Spread.of(row["seconds"])
    budget = format_bytes(row["budget_bytes"]) if "budget_bytes" in row else ""
    peak = format_bytes(row["peak_bytes"]) + ("" if row.get("kept", True) else " OVER")
    predicted = f"{row['predicted_s'] / spread.median:.2f}" if "predicted_s" in row else ""
    overlap = f"{row['overlap']:.0%}" if "overlap" in row else ""
    waits = str(sum(row["host_waits"].values())) if "host_waits" in row else ""
    note = f"base: {row['base']}" if row.get("base", "eager") != "eager" else ""
    return [
        row["what"], budget, peak, spread.text(1e3), _against(row), predicted, overlap, waits, note
    ]  # fmt: skip


def _against(row: Row) -> str:
    """Step time over that of the base, whose steps were timed in turns with these."""
    if "base_seconds" not in row:
        return ""
    values = {"own": row["seconds"], "base": row["base_seconds"]}
    return f"{ratios(values, 'own', 'base').median:.2f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Step time over peak, a panel for each network."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no figure: matplotlib is not installed")
        return
    measured: dict[str, list[Row]] = {}
    for row in rows:
        if "seconds" in row:
            measured.setdefault(row["network"], []).append(row)
    if not measured:
        return
    figure = Figure(figsize=(5 * len(measured), 4.5), layout="constrained")
    panels = figure.subplots(1, len(measured), squeeze=False)[0]
    for axes, (network, own) in zip(panels, measured.items(), strict=True):
        for kind, points in _series(own):
            points.sort()
            style = "s" if len(points) == 1 else "o-"
            axes.plot([x for x, _ in points], [y for _, y in points], style, label=kind)
        axes.set_xlabel("peak (GiB)")
        axes.set_ylabel("step (ms)")
        axes.set_title(network, fontsize="small")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path)
    print(f"wrote {path}")


def _series(rows: Sequence[Row]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        kind = row["what"].split(",")[0]
        point = (row["peak_bytes"] / 2**30, Spread.of(row["seconds"]).median * 1e3)
        found.setdefault(kind, []).append(point)
    yield from found.items()
