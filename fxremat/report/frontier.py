"""Curves of a model: the least step time at every budget, and the batches that fit a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxremat.errors import BudgetError
from fxremat.units import bytes_in, format_bytes, format_seconds

SHOWN = 8
"""The number of points that a frontier displays, spread evenly."""

WIDTH = 100
"""The width of a table in columns if the output is not a terminal."""


def _figure() -> tuple[Any, Any]:
    """Return a new figure of matplotlib, and its axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("plotting requires matplotlib: pip install 'fxremat[plot]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3)
    return figure, axes


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A plan that no other plan beats in both peak and time.

    Attributes:
        peak_bytes: the exact peak of a step in bytes.
        predicted_s: predicted seconds of a step.
    """

    peak_bytes: int
    predicted_s: float


@dataclass(frozen=True, slots=True)
class Frontier:
    """The least step time at every budget, with recomputation only and no transfers.

    Attributes:
        points: points by ascending peak and descending time. The last one recomputes nothing.
    """

    points: tuple[FrontierPoint, ...]

    @property
    def least_budget_bytes(self) -> int:
        """The least feasible budget, in bytes."""
        return self.points[0].peak_bytes

    @property
    def baseline(self) -> FrontierPoint:
        """The point of the step with everything kept: the highest peak and the least time."""
        return self.points[-1]

    def at(self, budget: int | str) -> FrontierPoint | None:
        """Return the fastest point within a budget, or ``None`` below the least feasible budget.

        Args:
            budget: bytes as an int, or as text such as ``"6 GiB"``.

        Raises:
            BudgetError: ``budget`` is not a number of bytes.
        """
        nbytes = bytes_in(budget)
        if nbytes is None:
            raise BudgetError(
                f"budget must be bytes, as '6 GiB' or an int, but got {budget!r} of type "
                f"{type(budget).__name__}",
                code="FXR001",
            )
        within = [point for point in self.points if point.peak_bytes <= nbytes]
        return within[-1] if within else None

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Return the rows of a table of some points, by ascending peak.

        Each row has the peak, the seconds, and the seconds relative to everything kept.
        """
        last, kept_s = len(self.points) - 1, self.baseline.predicted_s or 1.0
        places = sorted({round(i * last / (SHOWN - 1)) for i in range(SHOWN)})
        return tuple(
            (
                format_bytes(self.points[place].peak_bytes),
                format_seconds(self.points[place].predicted_s),
                "" if place == last else f"{self.points[place].predicted_s / kept_s - 1:+.1%}",
            )
            for place in places
        )

    def __repr__(self) -> str:
        """Return a table of some of the points."""
        count = len(self.points)
        rows = "\n".join(f"  {peak:>11} {time:>8} {more:>7}" for peak, time, more in self.rows())
        return (
            f"Frontier of {count} plan{'s' * (count != 1)}: budget, step time, and time over "
            f"everything kept\n{rows}\n  more: points, at(budget_bytes), plot(path)"
        )

    def _repr_html_(self) -> str:
        """Return a table of some of the points as HTML, for a notebook."""
        names = ("budget", "step time", "over everything kept")
        heads = "".join(f"<th>{name}</th>" for name in names)
        rows = ("".join(f"<td>{text}</td>" for text in row) for row in self.rows())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><tr>{heads}</tr>{body}</table>"

    def plot(self, path: str | Path) -> None:
        """Plot the frontier to a file (PNG, SVG or PDF, by its suffix).

        Raises:
            ImportError: matplotlib is not installed (``pip install fxremat[plot]``).
        """
        figure, axes = _figure()
        mib = [point.peak_bytes / 2**20 for point in self.points]
        kept_s = self.baseline.predicted_s or 1.0
        more = [100 * (p.predicted_s / kept_s - 1) for p in self.points]
        axes.step(mib, more, where="post")
        axes.plot(mib[-1:], more[-1:], "o", label="nothing recomputed")
        axes.axvline(mib[0], linestyle=":", color="gray")
        axes.set_xlabel("budget (MiB)")
        axes.set_ylabel("predicted step time over no recomputation (%)")
        axes.set_title(f"least feasible: {format_bytes(self.least_budget_bytes)}")
        axes.legend()
        figure.savefig(path)


def frontier_of(pairs: list[tuple[int, float]]) -> Frontier:
    """Return the frontier of pairs of peak bytes and seconds: those that no other pair beats."""
    points: list[FrontierPoint] = []
    for peak_bytes, seconds in sorted(pairs):
        if not points or seconds < points[-1].predicted_s:
            points.append(FrontierPoint(peak_bytes, seconds))
    return Frontier(tuple(points))


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One size of the batch that fits the budget.

    Attributes:
        size: size of the batch dimension, that is the number of samples of a step.
        least_bytes: the least budget in bytes that a step of this size fits.
        predicted_s: predicted seconds of a step of this size within the budget.
    """

    size: int
    least_bytes: int
    predicted_s: float

    @property
    def seconds_a_sample(self) -> float:
        """Predicted seconds of a step divided by its number of samples."""
        return self.predicted_s / self.size


@dataclass(frozen=True, slots=True, repr=False)
class Batches:
    """Sizes of a batch that fit a byte budget, as returned by :func:`fxremat.max_batch`.

    Attributes:
        budget_bytes: the budget in bytes.
        name: name of the batch dimension, such as ``args[0].shape[0]``.
        points: points by ascending size. The last one is the largest size that fits.
    """

    budget_bytes: int
    name: str
    points: tuple[BatchPoint, ...]

    @property
    def largest(self) -> BatchPoint:
        """The point of the largest size."""
        return self.points[-1]

    @property
    def fastest(self) -> BatchPoint:
        """The point with the most samples per second, as predicted."""
        return min(self.points, key=lambda point: point.seconds_a_sample)

    def __repr__(self) -> str:
        return (
            f"Batches({self.name} within {format_bytes(self.budget_bytes)}: "
            f"largest {self.largest.size}, fastest {self.fastest.size})"
        )

    def show(self) -> str:
        """Print the points as a table, and return the printed text without colors.

        Raises:
            ImportError: rich is not installed.
        """
        # Only now: rich may be missing, and draws a random number when it is imported.
        from fxremat.console import SIMPLE_HEAD, Table, show  # noqa: PLC0415

        table = Table(box=SIMPLE_HEAD, title=repr(self))
        for name in (self.name, "least budget", "step time", "per sample", ""):
            table.add_column(name, justify="left" if not name else "right")
        for point in self.points:
            marks = [
                mark
                for mark, best in (("largest", self.largest), ("fastest", self.fastest))
                if best == point
            ]
            table.add_row(
                str(point.size),
                format_bytes(point.least_bytes),
                format_seconds(point.predicted_s),
                format_seconds(point.seconds_a_sample),
                ", ".join(marks),
            )
        return "\n".join(line.rstrip() for line in show(table, width=WIDTH).splitlines())

    def plot(self, path: str | Path) -> None:
        """Plot least bytes and seconds per sample over the size (PNG, SVG or PDF, by the suffix).

        Raises:
            ImportError: matplotlib is not installed (``pip install fxremat[plot]``).
        """
        figure, axes = _figure()
        axes.set_title(f"within {format_bytes(self.budget_bytes)}")
        sizes = [p.size for p in self.points]
        axes.plot(sizes, [p.least_bytes / 2**20 for p in self.points], "o-")
        axes.axhline(self.budget_bytes / 2**20, linestyle=":", color="gray")
        axes.set_xlabel(self.name)
        axes.set_ylabel("least budget (MiB)")
        other = axes.twinx()
        other.plot(sizes, [1e3 * p.seconds_a_sample for p in self.points], "s--", color="C1")
        other.set_ylabel("predicted milliseconds per sample", color="C1")
        figure.savefig(path)
