"""Plans as users have them: of a step that is one captured graph, and of one that is several."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fxremat.errors import PlanError
from fxremat.ir import (
    TRACED,
    Chain,
    Costs,
    Decision,
    Form,
    Origin,
    RecordedCosts,
    Schedule,
    Timeline,
)
from fxremat.report.codec import (
    OMITTED,
    Checked,
    FormatError,
    decode,
    encode,
    pack,
    path_of,
    unpack,
    write_made,
)
from fxremat.report.facts import CrossCheck, Decided, Fused
from fxremat.report.frontier import Frontier
from fxremat.report.memory import Outline, StepMemory
from fxremat.report.modules import span
from fxremat.units import Counted

if TYPE_CHECKING:
    from fxremat.report.trace import StepTrace

KIND = "plan"

_COMMENT = re.compile(r"\s*#.*")


class Shown:
    """The ways to look at a plan, be it of one graph or of several.

    Their modules are imported where they are used: a plan is made where nobody looks at it, and
    rich may be missing.
    """

    __slots__ = ()

    def explain(self) -> str:
        """Print the plan as a table, and return what was printed."""
        from fxremat.report.text import print_plan  # noqa: PLC0415

        return print_plan(_any(self))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page to look at: memory over the step, time, the frontier, every stage.

        One file that needs no network. Of a ``StepPlan`` it shows the whole step and every region,
        and no frontier.

        Args:
            path: of the file; one that is there is replaced.

        Raises:
            PlanError: the file cannot be written, or the plan was not made of a model.
        """
        from fxremat.report.page import data_of, page_with  # noqa: PLC0415

        write_made("page", path, lambda: page_with(data_of(_any(self))).encode())

    def save_trace(self, path: str | os.PathLike[str], traced: StepTrace | None = None) -> None:
        """Write the step as a trace for ``chrome://tracing`` and Perfetto.

        Args:
            path: of the file; one that is there is replaced.
            traced: what ``trace_step`` of the compiled module returned, shown as a second process.

        Raises:
            PlanError: the file cannot be written, the plan was not made of a model, or ``traced``
                is of another plan.
        """
        from fxremat.report.trace import trace_of  # noqa: PLC0415

        write_made("trace", path, lambda: trace_of(_any(self), traced).encode())

    def __repr__(self) -> str:
        """Return a few lines; everything is in the attributes."""
        from fxremat.report.summary import shortly  # noqa: PLC0415

        return shortly(_any(self))

    def _repr_html_(self) -> str:
        """Return the plan for a notebook."""
        from fxremat.report.page import notebook_of  # noqa: PLC0415

        return notebook_of(_any(self))


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown, Checked):
    """The schedule of a training step under a byte budget.

    Attributes:
        budget_bytes: the budget, resolved to bytes.
        least_budget_bytes: the least budget of the usual loop; of a plan for a later call, of that
            call.
        predicted_peak_bytes: the exact peak of the emitted graphs, with all that the
            promise counts (parameters, gradients, inputs, reserve, …), in blocks as the
            device's allocator hands them out.
        predicted_reserved_bytes: bytes that the allocator has taken from the device at most.
        predicted_held_bytes: the predicted peak as a sum of tensors and workspaces, whatever their
            blocks are.
        predicted_s: seconds of a step, from the measured stages.
        baseline_peak_bytes, baseline_s: peak and seconds of the step with nothing recomputed, in
            the same loop; the peak in the bytes that the budget is for, allocated or reserved.
        lower_bound_s: no schedule of these stages within the budget takes less.
        local_search_s: seconds by which local search on exact evaluations beat the solvers.
        host_bytes: bytes of host memory, to which storages travel; the timeline says when.
        schedule: the operations, in order.
        held_bytes: for each stage what it keeps from its first forward on beside what the
            schedule says, as found by local search.
        timeline: when each operation runs, and the memory held meanwhile.
        chain, costs: the stages and what they cost.
        frontier: the least time at every other budget, by recomputation alone.
        forward_code, backward_code: the emitted graphs as Python.
        branch_ends: the stages after each branch's last, of branches in branches too, where they
            meet in a trunk.
        form: how operations are computed: as they were traced, with inputs of norms rebuilt from
            outputs (``compile(exact=False)``), or with runs in parts (``compile(split=...)``).
        budget_on: what all budgets and the frontier are for: ``"allocated"`` bytes or
            ``"reserved"`` ones.
        decision: what each stage keeps, and what travels; the schedule has the rest.
        origin: what the plan holds for; ``None`` for one that was not made of a model.
        measured: what was measured of the graph; ``None`` for a plan that was not made of a model.
        beside: what the call that it was made for found beside what every call does, and bytes.
        usual: what the usual loop holds in later steps beyond what this call did, and bytes.
        zeros_budget_bytes: the least budget of a loop that sets gradients to zero in place of
            ``None``; 0: the plan is of a later call.
        sizes: the sizes that the plan is for, by the names that they have in the code.
        waiting_bytes: what a step holds between its forward and its backward, without a loss.
        fused: units that Inductor compiled, and runs of operations that are computed in parts.
        memory: the tensors that it holds, instant by instant; empty for a plan that was not made
            of a model.
        model: class of the model; empty where nobody knows.
        arguments: tensors of the call that the plan was made for: places, dtypes and shapes.
        kept: the step with everything kept, for comparison; ``None`` where it is not known.
        measured_peak_bytes: the peak of the latest step that followed the plan and was watched,
            counted as ``predicted_held_bytes`` is; ``None``: none was.
        cross_check: how far CP-SAT is from the plan; ``None`` where nobody asked for it.
        decided: operations of which the planner did not decide whether their results are kept.
        forms_left: so many forms of the step, in smaller parts, were not looked at, as
            ``compile(effort=...)`` was spent.
    """

    budget_bytes: int
    least_budget_bytes: int
    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    predicted_held_bytes: int
    predicted_s: float
    baseline_peak_bytes: int
    baseline_s: float
    lower_bound_s: float
    local_search_s: float
    host_bytes: int
    schedule: Schedule
    held_bytes: tuple[int, ...]
    timeline: Timeline
    chain: Chain
    costs: Costs
    frontier: Frontier
    forward_code: str
    backward_code: str
    branch_ends: tuple[int, ...] = ()
    form: Form = TRACED
    budget_on: Counted = "allocated"
    decision: Decision = field(default_factory=Decision, repr=False)
    origin: Origin | None = field(default=None, repr=False)
    measured: RecordedCosts | None = field(default=None, repr=False)
    beside: tuple[tuple[str, int], ...] = ()
    usual: tuple[tuple[str, int], ...] = ()
    zeros_budget_bytes: int = 0
    sizes: tuple[tuple[str, int], ...] = ()
    waiting_bytes: int = 0
    fused: tuple[Fused, ...] = ()
    memory: StepMemory = field(default_factory=StepMemory, repr=False)
    model: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    kept: Outline | None = field(default=None, repr=False)
    measured_peak_bytes: int | None = field(default=None, compare=False)
    cross_check: CrossCheck | None = field(default=None, compare=False)
    forms_left: int = 0
    decided: tuple[Decided, ...] = field(default=(), metadata={OMITTED: True})

    @property
    def actions(self) -> Schedule:
        """All that the step does, in order: calls of stages, and transfers where they are issued.

        Equal for plans that do the same; ``print`` shows one after the other.
        """
        return self.timeline.actions(self.decision.moves)

    @property
    def counted_bytes(self) -> int:
        """The predicted peak in the bytes that the budget is for, allocated or reserved."""
        reserved = self.budget_on == "reserved"
        return self.predicted_reserved_bytes if reserved else self.predicted_peak_bytes

    def check_read(self) -> None:
        """Check that the parts of a plan that was read go together.

        Raises:
            ValueError: they do not; the message says where.
        """
        from fxremat.report.consistent import check_plan  # noqa: PLC0415

        check_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, and the costs that it rests on, into a file.

        ``fxremat.compile(model, sample, plan=path)`` follows it again, without measuring or
        planning. It is JSON, with gzip where the name ends in ``.gz``; equal plans give equal
        bytes.

        Args:
            path: of the file; one that is there is replaced. Never is it half written.

        Raises:
            PlanError: the file cannot be written.
        """
        packed = path_of(path).suffix == ".gz"
        write_made("plan", path, lambda: pack(KIND, {"plan": encode(Plan, self)}, packed=packed))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Return a plan that :meth:`save` wrote; the model is not needed.

        Raises:
            PlanError: the file cannot be read, is damaged, or holds no plan.
        """
        file = path_of(path)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PlanError(
                f"no plan can be read from {file}: {error}. Give the path of a file that "
                "Plan.save wrote"
            ) from error
        try:
            return decode(Plan, unpack(KIND, data).get("plan"))
        except FormatError as error:
            raise PlanError(
                f"{file} holds no plan that can be read: {error}. Plan again, and save that plan"
            ) from error


@dataclass(frozen=True, slots=True)
class RegionRow:
    """A call of one graph in a step.

    Attributes:
        plan: the plan that the call followed; its peaks count what was there beside the graph.
        module: where in the model the parameters are that it reads; empty where nobody knows.
        ended_by: the user's line at which capturing ended, and why; empty where that was asked for,
            or is not known, or the step ends there.
        held_bytes: bytes that it keeps from its forward to its backward, its outputs included.
        forward_peak_bytes, backward_peak_bytes: most that the whole step holds while it runs.
        between_bytes: most bytes that code between its forward and the next one's allocates: beyond
            what was there when the step began, and what this and earlier regions hold.
        between_back_bytes: after its backward likewise, gradients that were made included.
        between_s: seconds between its forward and the next one's, and between their backwards;
            ``None``: they were not measured, or it is the last.
    """

    plan: Plan
    module: str
    ended_by: str
    held_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    between_bytes: int
    between_back_bytes: int
    between_s: float | None


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan(Shown):
    """The plan of a training step that runs several captured graphs within one byte budget.

    A model that is captured in several graphs has a ``StepPlan``; one that is captured whole has a
    ``Plan``. Attributes and methods that both classes have bear the same names.

    Attributes:
        budget: the budget as it was written, such as ``"6 GiB"``.
        budget_bytes: the budget in bytes.
        least_budget_bytes: the least peak of any plans together that were found.
        baseline_peak_bytes: the peak where every graph keeps everything.
        predicted_peak_bytes: the peak of these plans, with all that was seen beside them in steps
            that were watched, in blocks as the device's allocator hands them out.
        predicted_reserved_bytes: bytes that the allocator has taken from the device at most.
        measured_peak_bytes: the peak of the latest step that followed these plans and was watched;
            ``None``: none was.
        there_bytes: bytes allocated when the step begins, and bytes that are left free.
        regions: calls of graphs, in the order of their forwards.
    """

    budget: str | int | float
    budget_bytes: int
    least_budget_bytes: int
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    measured_peak_bytes: int | None
    there_bytes: int
    regions: tuple[RegionRow, ...]

    @property
    def budget_on(self) -> Counted:
        """The bytes that all budgets are for: ``"allocated"`` or ``"reserved"`` ones."""
        return self.regions[0].plan.budget_on

    @property
    def counted_bytes(self) -> int:
        """The predicted peak in the bytes that the budget is for, allocated or reserved."""
        reserved = self.budget_on == "reserved"
        return self.predicted_reserved_bytes if reserved else self.predicted_peak_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory, to which storages of all regions travel."""
        return sum(row.plan.host_bytes for row in self.regions)

    @property
    def between_s(self) -> float | None:
        """Seconds between graphs, in both directions; ``None``: they were not measured yet."""
        found = [row.between_s for row in self.regions if row.between_s is not None]
        return sum(found) if found or len(self.regions) == 1 else None

    @property
    def predicted_s(self) -> float:
        """Seconds of all graphs, and between them as far as that was measured.

        A loss outside the model, and what else comes between the last forward and its backward,
        are not in it.
        """
        return sum(row.plan.predicted_s for row in self.regions) + (self.between_s or 0.0)

    @property
    def baseline_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed, between graphs included."""
        return sum(row.plan.baseline_s for row in self.regions) + (self.between_s or 0.0)

    @property
    def forward_code(self) -> str:
        """The forwards of all regions as Python, one after the other; alike ones once."""
        return self._code(range(len(self.regions)), lambda plan: plan.forward_code)

    @property
    def backward_code(self) -> str:
        """The backwards of all regions as Python, the last region's first; alike ones once."""
        places = range(len(self.regions) - 1, -1, -1)
        return self._code(places, lambda plan: plan.backward_code)

    def _code(self, places: Iterable[int], code_of: Callable[[Plan], str]) -> str:
        alike: dict[str, list[int]] = {}
        for place in places:
            code = _COMMENT.sub("", code_of(self.regions[place].plan))  # comments have peaks
            alike.setdefault(code, []).append(place)
        return "\n\n".join(
            f"# {self._headline(sorted(own))}\n{code_of(self.regions[own[0]].plan).strip()}"
            for own in alike.values()
        ) + ("\n" if alike else "")

    def _headline(self, places: list[int]) -> str:
        """Return the numbers of regions, counted from 1, and what ended them."""
        runs: list[list[int]] = []
        for place in places:
            if not runs or runs[-1][1] + 1 != place:
                runs.append([place, place])
            runs[-1][1] = place
        numbers = ", ".join(span(first + 1, last + 1) for first, last in runs)
        reasons = dict.fromkeys(filter(None, (self.regions[place].ended_by for place in places)))
        ended = f", ended by {'; '.join(reasons)}" if reasons else ""
        return f"region {numbers}{ended}" if len(places) == 1 else f"regions {numbers}{ended}"


AnyPlan = Plan | StepPlan


def plans_of(plan: AnyPlan) -> tuple[Plan, ...]:
    """Return the plan of each graph of a step."""
    if isinstance(plan, StepPlan):
        return tuple(row.plan for row in plan.regions)
    return (plan,)


def _any(plan: Shown) -> AnyPlan:
    assert isinstance(plan, Plan | StepPlan)
    return plan
