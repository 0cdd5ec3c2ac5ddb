"""What a step would take of a device, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from fxremat.report.frontier import Batches, Frontier
from fxremat.report.memory import Kind
from fxremat.report.plan import Plan
from fxremat.units import Counted, format_bytes, format_seconds

LossOf = Literal["own", "told", "unknown"]
"""Which loss is counted: the model's own, that of ``loss=``, or one that nobody told of."""

LIBRARIES, CACHE, LATER = "libraries", "cache of the allocator", "what later steps hold"


@dataclass(frozen=True, slots=True)
class Verified:
    """A plan that was made and followed on a CUDA device, or on what stands in for one.

    Attributes:
        device: its name.
        plan: what was followed, in that of some steps which took most.
        allocated_bytes: most that torch's allocator has handed out.
        reserved_bytes: most that it has taken of the device, beginning with nothing cached.
        budget_on: which of them the budget is for.
        planned_s: until the plan was there.
        seconds: in all.
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
        """Of what the budget is for."""
        return self.allocated_bytes if self.budget_on == "allocated" else self.reserved_bytes

    @property
    def holds(self) -> bool:
        """Whether the budget was kept to."""
        return self.peak_bytes <= self.plan.budget_bytes


@dataclass(frozen=True, slots=True, repr=False)
class Estimate:
    """What a training step would take, found from shapes alone.

    Attributes:
        device: name of the device that it was estimated for.
        kept: the plan that keeps everything: its peak, its seconds, the frontier.
        budget_bytes: the budget that was asked for; ``None``: none was.
        plan: the fastest within the budget; ``None``: there is none, or no budget.
        batches: the sizes of the batch that fit the budget; ``None``: none does, or nobody asked.
        workspace_bytes: part of every peak: set aside for what operations take of memory while
            they run, which no shape tells.
        library_bytes: part of every peak, too: what libraries hold from their first call on.
        memory_bytes: of the device; ``None``: it is not known.
        optimizer: name of the class whose state is counted; ``None``: none was named, none is.
        loss: ``"own"``: the model returns its loss; ``"told"``: what ``loss=`` takes is counted;
            ``"unknown"``: nobody told, and as much is set aside as a cross entropy takes.
        verified: the plan as it was followed here; ``None``: nobody asked.
    """

    device: str
    kept: Plan
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
    def least_budget_bytes(self) -> int:
        """The least feasible budget, in bytes."""
        return self.kept.least_budget_bytes

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
        """The least step time at every budget, by recomputation alone."""
        return self.kept.frontier

    @property
    def fits(self) -> bool:
        """Whether some plan keeps to the budget; without one, to the device's memory."""
        limit = self.budget_bytes or self.memory_bytes
        return limit is None or self.least_budget_bytes <= limit

    def at_peak(self, plan: Plan) -> dict[str, int]:
        """Return the bytes at the peak of a plan by what they are held for; they sum up to the
        peak.

        That of ``kept`` is the peak of the usual loop: what its later steps hold, and the first one
        does not, is one of them.

        Args:
            plan: ``kept`` or ``plan``.

        Returns bytes by name, such as ``"parameters"``, ``"activations"`` or ``"workspaces"``;
        ``"beside the step"`` is a loss's target, and tensors of the model that no graph reads.
        """
        found = {kind.value: nbytes for kind, nbytes in plan.memory.at_peak().items()}
        found[Kind.OTHER.value] -= self.workspace_bytes + self.library_bytes
        found[Kind.WORKSPACES.value] += self.workspace_bytes
        found[LIBRARIES] = self.library_bytes
        found[CACHE] = plan.counted_bytes - plan.predicted_peak_bytes
        found[LATER] = self.peak_bytes - plan.counted_bytes if plan is self.kept else 0
        return found

    def facts(self) -> dict[str, Any]:
        """Return all figures as a dict that ``json`` can write, in bytes and seconds."""
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
            "at_peak": {"kept": self.at_peak(self.kept), "plan": plan and self.at_peak(plan)},
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
        """Return the printed text for a notebook."""
        return f"<pre>{escape(repr(self))}</pre>"

    def lines(self) -> list[str]:
        """Return the lines of text that :meth:`show` prints."""
        slowest_s = self.frontier.points[0].predicted_s
        rows = [
            ("everything kept", self.peak_bytes, _step(self.predicted_s)),
            ("least feasible budget", self.least_budget_bytes, _step(slowest_s)),
        ]
        fits = "fits" if self.fits else "does not fit"
        if self.budget_bytes is not None:
            rows.append(("the budget", self.budget_bytes, fits))
        elif self.memory_bytes is not None:
            rows.append(("memory of the device", self.memory_bytes, fits))
        if self.plan is not None:
            rows.append(("a plan within it", self.plan.counted_bytes, _step(self.plan.predicted_s)))
        lines = [f"a training step on {self.device}, from shapes alone"]
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
            "seconds, and what libraries hold, are by the device's figures: compare plans by them",
        ]

    def _counted(self) -> list[str]:
        """Return a table of what is held at the peaks, and what was assumed of it."""
        plans = [self.kept] if self.plan is None else [self.kept, self.plan]
        heads = ("all kept", "the plan")[: len(plans)]
        always = (Kind.GRADIENTS.value, Kind.OPTIMIZER.value)
        notes = {
            Kind.GRADIENTS.value: (
                f"{format_bytes(self.kept.memory.most_bytes(Kind.GRADIENTS))} at the most"
            ),
            Kind.OPTIMIZER.value: self.optimizer or "none was named: optimizer=, --optimizer AdamW",
            Kind.LOSS.value: {
                "own": "the model returns it",
                "told": "as loss= takes",
                "unknown": "as a cross entropy's: loss=, --loss",
            }[self.loss],
            Kind.WORKSPACES.value: "set aside: no shape tells" if self.workspace_bytes else "",
        }
        rows = [f"{'  at the peak':<26}" + "".join(f"{head:>12}" for head in heads)]
        columns = [self.at_peak(plan) for plan in plans]
        for what in columns[0]:
            numbers = [column[what] for column in columns]
            if any(numbers) or what in always:
                cells = "".join(f"{format_bytes(nbytes):>12}" for nbytes in numbers)
                rows.append(f"    {what:<22}{cells}   {notes.get(what, '')}".rstrip())
        return rows

    def show(self) -> str:
        """Print the estimate as a table; returns the text that was printed."""
        text = "\n".join(self.lines())
        print(text)
        return text


def _step(seconds: float) -> str:
    return f"{format_seconds(seconds)} a step"
