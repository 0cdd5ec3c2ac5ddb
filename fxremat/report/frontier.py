"""The memory-time curve of a model: the least step time at every budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fxremat.errors import BudgetError
from fxremat.units import format_bytes, format_seconds, parse_bytes

TOLD = 8
"""Points that are told, evenly among all."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A plan that no other beats in both peak and time.

    Attributes:
        peak_bytes: the exact peak of a step.
        predicted_s: seconds of a step.
    """

    peak_bytes: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """The least step time at every budget, by recomputation alone: no transfers are in it.

    Attributes:
        points: by ascending peak and descending time; the last one recomputes nothing.
    """

    points: tuple[FrontierPoint, ...]

    @property
    def least_budget_bytes(self) -> int:
        """The least feasible budget, in bytes."""
        return self.points[0].peak_bytes

    @property
    def baseline(self) -> FrontierPoint:
        """The point of the step with everything kept: the highest peak, the least time."""
        return self.points[-1]

    def at(self, budget: int | str) -> FrontierPoint | None:
        """The fastest step within a budget; ``None`` below the least feasible one.

        Args:
            budget: bytes as an int, or as text such as ``"6 GiB"``.

        Raises:
            BudgetError: it is no number of bytes.
        """
        nbytes = parse_bytes(budget) if isinstance(budget, str) else budget
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)):
            raise BudgetError(
                f"budget is {budget!r}, a {type(budget).__name__}: a frontier is asked for bytes, "
                "as '6 GiB' or an int"
            )
        within = [point for point in self.points if point.peak_bytes <= nbytes]
        return within[-1] if within else None

    def delayed(self, seconds: float) -> Frontier:
        """This frontier with ``seconds`` added to the time of every point."""
        return Frontier(tuple(replace(p, predicted_s=p.predicted_s + seconds) for p in self.points))

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Peak, seconds, and seconds beyond everything kept, of some points from least to most."""
        last, kept_s = len(self.points) - 1, self.baseline.predicted_s or 1.0
        places = sorted({round(i * last / (TOLD - 1)) for i in range(TOLD)})
        return tuple(
            (
                format_bytes(self.points[place].peak_bytes),
                format_seconds(self.points[place].predicted_s),
                "" if place == last else f"{self.points[place].predicted_s / kept_s - 1:+.1%}",
            )
            for place in places
        )

    def __repr__(self) -> str:
        """Some of the points; all of them are in ``points``."""
        count = len(self.points)
        told = "\n".join(f"  {peak:>11} {time:>8} {more:>7}" for peak, time, more in self.rows())
        return (
            f"Frontier of {count} plan{'s' * (count != 1)}: budget, step, and beyond everything "
            f"kept\n{told}\n  more: points, at(budget_bytes), plot(path)"
        )

    def _repr_html_(self) -> str:
        """A table of some points, for a notebook."""
        heads = "".join(f"<th>{name}</th>" for name in ("budget", "step", "beyond everything kept"))
        rows = ("".join(f"<td>{text}</td>" for text in row) for row in self.rows())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><tr>{heads}</tr>{body}</table>"

    def plot(self, path: str | Path) -> None:
        """Draw the curve into a file (PNG, SVG or PDF, by its suffix).

        Raises:
            ImportError: matplotlib is not installed (``pip install fxremat[plot]``).
        """
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'fxremat[plot]'") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        mib = [point.peak_bytes / 2**20 for point in self.points]
        more = [100 * (p.predicted_s / self.baseline.predicted_s - 1) for p in self.points]
        axes.step(mib, more, where="post")
        axes.plot(mib[-1:], more[-1:], "o", label="nothing recomputed")
        axes.axvline(mib[0], linestyle=":", color="gray")
        axes.set_xlabel("budget (MiB)")
        axes.set_ylabel("predicted step time beyond no recomputation (%)")
        axes.set_title(f"least feasible: {format_bytes(self.least_budget_bytes)}")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(path)


def frontier_of(pairs: list[tuple[int, float]]) -> Frontier:
    """The best among pairs of peak bytes and seconds; the lowest peak among the fastest."""
    points: list[FrontierPoint] = []
    for peak_bytes, seconds in sorted(pairs):
        if not points or seconds < points[-1].predicted_s:
            points.append(FrontierPoint(peak_bytes, seconds))
    return Frontier(tuple(points))
