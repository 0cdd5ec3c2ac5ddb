"""How large a batch may be within a budget, and how fast each size is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fxremat.units import format_bytes, format_seconds

WIDTH = 100
"""Columns where the output is no terminal."""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """One size of the batch that fits the budget; where several dimensions vary, one size of each.

    Attributes:
        sizes: the size of each dimension that was asked for, in that order.
        least_bytes: the least budget, in bytes, within which a step of them was found to fit.
        predicted_s: seconds of a step of these sizes within the budget, as predicted.
    """

    sizes: tuple[int, ...]
    least_bytes: int
    predicted_s: float

    @property
    def size(self) -> int:
        """The size of the first dimension that was asked for."""
        return self.sizes[0]

    @property
    def count(self) -> int:
        """Samples of one step: the size, or the product of all sizes where several vary."""
        return math.prod(self.sizes)

    @property
    def seconds_a_sample(self) -> float:
        """Predicted seconds of a step, divided by its samples."""
        return self.predicted_s / self.count


@dataclass(frozen=True, slots=True, repr=False)
class Batches:
    """Sizes of a batch that fit a byte budget, as :func:`fxremat.max_batch` finds them.

    Attributes:
        budget_bytes: the budget, in bytes.
        names: the dimensions that were asked for, named as ``args[0].shape[0]``.
        points: of one dimension, by ascending size, the largest that fits at the end. Of
            several, the frontier: by ascending sizes of all but the first, the largest of it.
    """

    budget_bytes: int
    names: tuple[str, ...]
    points: tuple[BatchPoint, ...]

    @property
    def curve(self) -> tuple[BatchPoint, ...]:
        """All points, to draw least bytes and seconds a sample over the sizes."""
        return self.points

    @property
    def largest(self) -> BatchPoint:
        """The point with the most samples in a step."""
        return max(self.points, key=lambda point: point.count)

    @property
    def fastest(self) -> BatchPoint:
        """The point with the most samples a second, as predicted."""
        return min(self.points, key=lambda point: point.seconds_a_sample)

    def __repr__(self) -> str:
        return (
            f"Batches({', '.join(self.names)} within {format_bytes(self.budget_bytes)}: "
            f"largest {_told(self.largest)}, fastest {_told(self.fastest)})"
        )

    def show(self) -> str:
        """Print the points; returns what was printed, without colours.

        Raises:
            ImportError: rich is not installed.
        """
        # Only now: rich may be missing, and draws a random number when it is imported.
        from fxremat.console import SIMPLE_HEAD, Table, show  # noqa: PLC0415

        table = Table(box=SIMPLE_HEAD, title=repr(self))
        for name in (*self.names, "least budget", "step", "a sample", ""):
            table.add_column(name, justify="left" if not name else "right")
        for point in self.points:
            marks = [
                mark
                for mark, best in (("largest", self.largest), ("fastest", self.fastest))
                if best == point
            ]
            table.add_row(
                *map(str, point.sizes),
                format_bytes(point.least_bytes),
                format_seconds(point.predicted_s),
                format_seconds(point.seconds_a_sample),
                ", ".join(marks),
            )
        return "\n".join(line.rstrip() for line in show(table, width=WIDTH).splitlines())

    def plot(self, path: str | Path) -> None:
        """Draw the curve into a file (PNG, SVG or PDF, by its suffix).

        Of one dimension, least bytes and seconds a sample over it; of several, the largest of the
        first over the second.

        Raises:
            ImportError: matplotlib is not installed (``pip install fxremat[plot]``).
        """
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install 'fxremat[plot]'") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(f"within {format_bytes(self.budget_bytes)}")
        axes.grid(alpha=0.3)
        if len(self.names) > 1:
            axes.plot([p.sizes[1] for p in self.points], [p.size for p in self.points], "o-")
            axes.set_xlabel(self.names[1])
            axes.set_ylabel(f"largest {self.names[0]}")
        else:
            sizes = [p.size for p in self.points]
            axes.plot(sizes, [p.least_bytes / 2**20 for p in self.points], "o-")
            axes.axhline(self.budget_bytes / 2**20, linestyle=":", color="gray")
            axes.set_xlabel(self.names[0])
            axes.set_ylabel("least budget (MiB)")
            other = axes.twinx()
            other.plot(sizes, [1e3 * p.seconds_a_sample for p in self.points], "s--", color="C1")
            other.set_ylabel("predicted milliseconds a sample", color="C1")
        figure.savefig(path)


def _told(point: BatchPoint) -> str:
    return " × ".join(map(str, point.sizes))
