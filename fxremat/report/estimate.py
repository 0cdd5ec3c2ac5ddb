"""Estimates of the memory and time of a training step, as text and as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from html import escape
from typing import Any, Literal

from fxremat.report.frontier import WIDTH, Batches, Frontier
from fxremat.report.memory import Kind
from fxremat.report.peak import PeakHolder, holders_of, shortened, summed
from fxremat.report.plan import Plan
from fxremat.units import Counted, format_bytes, format_seconds

LossOf = Literal["own", "given", "unknown"]
"""The loss that is counted: the model's, that of ``loss=``, or an assumed one."""

LIBRARIES, LATER = "libraries", "held by later steps"
"""Kinds of memory that only estimates have."""

MOST_HOLDERS = 5
"""The number of the largest holders of the peak that are shown with lines of the model."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Measurements of a plan that was followed on a CUDA device or on a stand-in for one.

    Attributes:
        device: name of the device.
        plan: the plan that was followed, as of the step with the highest peak.
        allocated_bytes: maximum bytes that torch's allocator handed out.
        reserved_bytes: maximum bytes that it reserved, starting with an empty cache.
        budget_on: which of the two the budget limits.
        planned_s: seconds that planning took.
        seconds: seconds that planning and all steps took.
    """

    device: str
    plan: Plan
    allocated_bytes: int
    reserved_bytes: int
    budget_on: Counted
    planned_s: float
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The measured peak in the bytes that the budget limits."""
        return self.allocated_bytes if self.budget_on == "allocated" else self.reserved_bytes

    @property
    def holds(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.peak_bytes <= self.plan.budget_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """Estimated memory and time of a training step, computed from shapes.

    Attributes:
        device: name of the device.
        kept: the plan that keeps everything, with optimizer state and gradients on the device. It
            has the peak, the seconds and the frontier.
        least_budget_bytes: the least feasible budget in bytes.
        budget_bytes: the budget in bytes, or ``None`` if none was given.
        plan: the fastest plan within the budget, or ``None`` if none fits or no budget was given.
        batches: the sizes of the batch that fit the budget, or ``None`` if none fits or ``dim``
            was not given.
        workspace_bytes: bytes in every peak that are set aside for workspaces of operations,
            whose size does not follow from shapes.
        library_bytes: bytes in every peak that libraries hold from their first call on.
        memory_bytes: size of the device's memory in bytes, or ``None`` if it is unknown.
        optimizer: name of the optimizer class whose state is counted, or ``None`` if none is.
        loss: the loss that is counted. It is ``"own"`` if the model returns it, and ``"given"`` if
            it is that of ``loss=``. For ``"unknown"``, the memory of a cross entropy is set aside.
        verified: measurements of the plan on this machine, or ``None`` without ``verify=True``.
    """

    device: str
    kept: Plan
    least_budget_bytes: int
    budget_bytes: int | None
    plan: Plan | None
    batches: Batches | None
    workspace_bytes: int
    library_bytes: int
    memory_bytes: int | None
    optimizer: str | None
    loss: LossOf
    verified: Verified | None = None

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step with everything kept, in bytes."""
        return self.kept.baseline_peak_bytes

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of the step with everything kept."""
        return self.kept.baseline_s

    @property
    def frontier(self) -> Frontier:
        """The least step time at every budget, with recomputation only."""
        return self.kept.frontier

    @property
    def fits(self) -> bool:
        """Whether some plan fits the budget or, without a budget, the device's memory."""
        limit = self.budget_bytes or self.memory_bytes
        return limit is None or self.least_budget_bytes <= limit

    def at_peak(self, plan: Plan) -> tuple[PeakHolder, ...]:
        """Return what the step of a plan holds at its peak, the most bytes first.

        The bytes add up to the peak. That of ``kept`` is the peak of the usual loop, so it has one
        more row: the bytes that later steps hold and the first one does not.

        Args:
            plan: ``kept`` or ``plan``.

        Returns:
            Rows as those of :meth:`Plan.at_peak`. Workspaces that are set aside, and memory of
            libraries, have rows. The target of a loss and tensors of the model that no graph reads
            are ``"outside the step"``.
        """
        later_bytes = self.peak_bytes - plan.counted_bytes if plan is self.kept else 0
        aside_bytes = self.workspace_bytes + self.library_bytes
        rows = [
            replace(row, nbytes=row.nbytes - aside_bytes) if row.kind == Kind.OTHER.value else row
            for row in holders_of(plan)
        ]
        for kind, nbytes, what in (
            (Kind.WORKSPACES.value, self.workspace_bytes, "set aside for workspaces"),
            (LIBRARIES, self.library_bytes, "memory of libraries"),
            (LATER, later_bytes, "memory that later steps hold"),
        ):
            rows.append(PeakHolder(kind, nbytes, 0.0, 0, what))
        whole = max(1, sum(row.nbytes for row in rows))
        shown = (replace(row, share=row.nbytes / whole) for row in rows if row.nbytes)
        return tuple(sorted(shown, key=lambda row: -row.nbytes))

    def facts(self) -> dict[str, Any]:
        """Return the estimate as a dict of numbers and text that ``json`` can write."""
        plan = self.plan
        return {
            "device": self.device,
            "memory_bytes": self.memory_bytes,
            "budget_bytes": self.budget_bytes,
            "fits": self.fits,
            "least_budget_bytes": self.least_budget_bytes,
            "peak_bytes": self.peak_bytes,
            "predicted_s": self.predicted_s,
            "workspace_bytes": self.workspace_bytes,
            "library_bytes": self.library_bytes,
            "optimizer": self.optimizer,
            "loss": self.loss,
            "at_peak": {
                "kept": [row.facts() for row in self.at_peak(self.kept)],
                "plan": plan and [row.facts() for row in self.at_peak(plan)],
            },
            "frontier": [[p.peak_bytes, p.predicted_s] for p in self.frontier.points],
            "verified": self.verified
            and {
                "device": self.verified.device,
                "predicted_bytes": self.verified.plan.predicted_peak_bytes,
                "predicted_reserved_bytes": self.verified.plan.predicted_reserved_bytes,
                "allocated_bytes": self.verified.allocated_bytes,
                "reserved_bytes": self.verified.reserved_bytes,
                "holds": self.verified.holds,
            },
            "plan": plan
            and {
                "peak_bytes": plan.counted_bytes,
                "predicted_s": plan.predicted_s,
                "host_bytes": plan.host_bytes,
            },
            "batches": self.batches
            and {
                "name": self.batches.name,
                "largest": self.batches.largest.size,
                "fastest": self.batches.fastest.size,
                "points": [
                    {"size": p.size, "least_bytes": p.least_bytes, "s": p.predicted_s}
                    for p in self.batches.points
                ],
            },
        }

    def __repr__(self) -> str:
        return "\n".join([*self.lines(), "more: plan, frontier, facts()"])

    def _repr_html_(self) -> str:
        """Return the text of ``repr`` as HTML, for a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"

    def lines(self) -> list[str]:
        """Return the lines of text that :meth:`show` prints."""
        least = self.frontier.points[0]
        is_of_least = least.peak_bytes <= self.least_budget_bytes  # else it uses host memory
        rows = [
            ("everything kept", self.peak_bytes, _step(self.predicted_s)),
            (
                "least feasible budget",
                self.least_budget_bytes,
                _step(least.predicted_s) if is_of_least else "with host memory",
            ),
        ]
        fits = "fits" if self.fits else "does not fit"
        if self.budget_bytes is not None:
            rows.append(("budget", self.budget_bytes, fits))
        elif self.memory_bytes is not None:
            rows.append(("device memory", self.memory_bytes, fits))
        if self.plan is not None:
            time = _step(self.plan.predicted_s)
            rows.append(("plan within budget", self.plan.counted_bytes, time))
        lines = [f"training step on {self.device}, estimated from shapes"]
        for what, nbytes, more in rows:
            lines.append(f"  {what:<22} {format_bytes(nbytes):>11}   {more}")
        if self.batches is not None:
            lines.append(f"  {self.batches!r}")
        if self.verified is not None:
            lines.append(
                f"  followed on {self.verified.device}: "
                f"{format_bytes(self.verified.allocated_bytes)} allocated, "
                f"{format_bytes(self.verified.plan.predicted_peak_bytes)} predicted, "
                f"{format_bytes(self.verified.reserved_bytes)} reserved"
            )
        return [
            *lines,
            *self._counted(),
            *self._largest(),
            "Seconds and library memory are computed from the device's figures: use them to "
            "compare plans.",
        ]

    def _counted(self) -> list[str]:
        """Return the lines of a table of the bytes at each plan's peak by purpose, with notes."""
        plans = [self.kept] if self.plan is None else [self.kept, self.plan]
        heads = ("all kept", "plan")[: len(plans)]
        always = (Kind.GRADIENTS.value, Kind.OPTIMIZER.value)
        notes = {
            Kind.GRADIENTS.value: (
                f"at most {format_bytes(self.kept.memory.most_bytes(Kind.GRADIENTS))}"
            ),
            Kind.OPTIMIZER.value: self.optimizer or "none given (optimizer=, --optimizer AdamW)",
            Kind.LOSS.value: {
                "own": "returned by the model",
                "given": "given by loss=",
                "unknown": "assumed: a cross entropy (loss=, --loss)",
            }[self.loss],
            Kind.WORKSPACES.value: "set aside" if self.workspace_bytes else "",
        }
        rows = [f"{'  at the peak':<26}" + "".join(f"{head:>12}" for head in heads)]
        columns = [summed(self.at_peak(plan)) for plan in plans]
        for what in dict.fromkeys(name for column in columns for name in column):
            numbers = [column.get(what, 0) for column in columns]
            if any(numbers) or what in always:
                cells = "".join(f"{format_bytes(nbytes):>12}" for nbytes in numbers)
                rows.append(f"    {what:<22}{cells}   {notes.get(what, '')}".rstrip())
        return rows

    def _largest(self) -> list[str]:
        """Return the lines that name the largest holders of the peak, with lines of the model."""
        plan = self.plan or self.kept
        lines = [f"  the most of it, {'all kept' if self.plan is None else 'of the plan'}"]
        for row in self.at_peak(plan)[:MOST_HOLDERS]:
            made = f" ({row.line.place})" if row.line else ""
            text = f"    {format_bytes(row.nbytes):>11} {row.share:>5.0%}  {row.text}{made}"
            lines.append(shortened(text, WIDTH))
        return lines

    def show(self) -> str:
        """Print the estimate as a table, and return the printed text."""
        text = "\n".join(self.lines())
        print(text)
        return text


def _step(seconds: float) -> str:
    return f"{format_seconds(seconds)} per step"
