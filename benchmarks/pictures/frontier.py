"""Step time over peak memory, fxremat and torch's own means: the picture of the README.

It is drawn from the figures that ``benchmarks.frontier`` recorded; nothing is measured.
Run: python -m benchmarks.pictures.frontier [model]
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import median
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.pictures.style import GRAY, OURS, THEIRS, new_picture, write

Point = tuple[float, float]
"""Peak of a step in MiB, and its time divided by that of a step that keeps everything."""


def points_of(rows: list[dict[str, Any]], who: str, peak: str) -> list[Point]:
    """Return the measured points of ``"ours"`` or ``"theirs"``, by ascending peak.

    Rounds of settings that took the same peak are pooled: they ran the same step.
    """
    rounds: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        times = zip(row["seconds"][who], row["seconds"]["kept"], strict=True)
        rounds[row[peak]] += [time / kept for time, kept in times]
    return [(nbytes / 2**20, median(rounds[nbytes])) for nbytes in sorted(rounds)]


def best_of(points: list[Point]) -> list[Point]:
    """Return the points that no point of at most the same peak undercuts, by ascending peak."""
    found: list[Point] = []
    for peak, time in points:
        if not found or time < found[-1][1]:
            found.append((peak, time))
    return found


def draw(name: str) -> tuple[Any, Any]:
    """Return the figure of one model's recorded points, and its axes without labels."""
    recorded = json.loads((RESULTS / f"frontier/{name}.json").read_text())["results"]["points"]
    rows = [row for row in recorded if "seconds" in row]
    ours = points_of(rows, "ours", "peak_bytes")
    budgets = [r for r in rows if r["policy"].startswith("activation_memory_budget")]
    others = [r for r in rows if not r["policy"].startswith("activation_memory_budget")]
    budgets_at = points_of(budgets, "theirs", "peer_peak_bytes")
    others_at = points_of(others, "theirs", "peer_peak_bytes")
    torch_best = best_of(sorted(budgets_at + others_at))
    right = max(peak for peak, _ in ours + budgets_at + others_at)
    figure, axes = new_picture(3.6)
    axes.axhline(1, color="#b9bec6", linewidth=1)
    axes.text(3, 1.005, "nothing\nrecomputed", va="bottom", color=GRAY, fontsize=10)
    _step(axes, torch_best, right, THEIRS)
    axes.plot(*zip(*budgets_at, strict=True), "^", color=THEIRS, markersize=6, alpha=0.8)
    axes.plot(*zip(*others_at, strict=True), "s", color=THEIRS, markersize=6, alpha=0.8)
    _step(axes, best_of(ours), right, OURS)
    axes.plot(*zip(*ours, strict=True), "o", color=OURS, markersize=6)
    return figure, axes


def _step(axes: Any, best: list[Point], right: float, color: str) -> None:
    """Draw the least time at each peak up to ``right``."""
    ends = [*best, (right, best[-1][1])]
    axes.step(*zip(*ends, strict=True), where="post", color=color, linewidth=2.4)


def label(axes: Any) -> None:
    """Name the lines and groups of points of the picture of ``gpt16``."""
    axes.set_xlim(0, 360)
    axes.set_ylim(0.9, 1.58)
    axes.set_xticks([0, 50, 100, 150, 200, 250, 300, 350])
    axes.set_yticks([1.0, 1.2, 1.4], ["1.0 ×", "1.2 ×", "1.4 ×"])
    axes.set_xlabel("peak memory of a training step (MiB)")
    axes.set_ylabel("time of the step, relative")
    axes.text(64, 1.155, "fxremat", color=OURS, fontsize=14, weight="bold", ha="left")
    axes.text(228, 1.17, "torch, its best setting\nat each peak", color=THEIRS, fontsize=11,
              weight="bold", va="bottom")  # fmt: skip
    axes.text(48, 1.325, "checkpoint", color=THEIRS, fontsize=11, va="bottom")
    axes.text(150, 1.52, "activation_memory_budget", color=THEIRS, fontsize=11, ha="center")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="gpt16")
    options = parser.parse_args()
    figure, axes = draw(options.model)
    label(axes)
    write(figure, "frontier" if options.model == "gpt16" else f"frontier-{options.model}")


if __name__ == "__main__":
    main()
