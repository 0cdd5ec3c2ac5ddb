"""Plans of training steps: of one captured graph, and of several."""

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
    TrainingState,
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
    from fxremat.report.peak import PeakHolder
    from fxremat.report.trace import StepTrace

KIND = "plan"

_COMMENT = re.compile(r"\s*#.*")


class Shown:
    """Methods that display a plan, whether of one graph or of several.

    They import their modules only when called, since most plans are never displayed, and rich may
    be missing.
    """

    __slots__ = ()

    def at_peak(self) -> tuple[PeakHolder, ...]:
        """Return what the step holds at its peak, the most bytes first.

        Each has the line of the model that made it, and what freeing it would cost. The bytes add
        up to the predicted peak in the bytes that the budget limits: allocated, or reserved.

        Raises:
            PlanError: the plan was not made from a model, so it has no record of tensors.
        """
        from fxremat.report.peak import holders_of  # noqa: PLC0415

        return holders_of(_any(self))

    def explain(self) -> str:
        """Print the plan as tables, and return the printed text."""
        from fxremat.report.text import print_plan  # noqa: PLC0415

        return print_plan(_any(self))

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with memory and time over the step, the frontier and every stage.

        The page is one file and needs no network. For a ``StepPlan`` it shows the whole step and
        every region, without a frontier.

        Args:
            path: path of the file. An existing file is replaced.

        Raises:
            PlanError: the file cannot be written, or the plan was not made from a model.
        """
        from fxremat.report.page import data_of, page_with  # noqa: PLC0415

        write_made("page", path, lambda: page_with(data_of(_any(self))).encode())

    def save_trace(self, path: str | os.PathLike[str], traced: StepTrace | None = None) -> None:
        """Write the step as a trace for ``chrome://tracing`` and Perfetto.

        Args:
            path: path of the file. An existing file is replaced.
            traced: the result of ``trace_step`` of the compiled module, shown as a second process.

        Raises:
            PlanError: the file cannot be written, the plan was not made from a model, or ``traced``
                belongs to another plan.
        """
        from fxremat.report.trace import trace_of  # noqa: PLC0415

        write_made("trace", path, lambda: trace_of(_any(self), traced).encode())

    def __repr__(self) -> str:
        """Return a summary in a few lines."""
        from fxremat.report.brief import shortly  # noqa: PLC0415

        return shortly(_any(self))

    def _repr_html_(self) -> str:
        """Return the summary of the plan as an HTML table, for a notebook."""
        from fxremat.report.page import notebook_of  # noqa: PLC0415

        return notebook_of(_any(self))


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown, Checked):
    """The schedule of a training step under a byte budget.

    Attributes:
        budget_bytes: the budget, resolved to bytes.
        least_budget_bytes: the least feasible budget of the usual loop in bytes; for the plan of a
            later call, that of the call. A search for ``"min"`` may go below it, since fewer ways
            to compute the step are searched where the budget is larger.
        predicted_peak_bytes: the exact peak of the emitted graphs in bytes, with everything that
            the promise counts (parameters, gradients, inputs, reserve, …), in blocks as the
            device's allocator hands them out.
        predicted_reserved_bytes: maximum bytes that the allocator reserves from the device.
        predicted_held_bytes: the predicted peak in bytes as a sum of tensors and workspaces,
            without rounding to blocks.
        predicted_s: seconds of a step, computed from the measured stages.
        baseline_peak_bytes, baseline_s: peak in bytes and seconds of the step with nothing
            recomputed, in the same loop. The peak is in the bytes that the budget limits.
        lower_bound_s: lower bound in seconds for all schedules of these stages within the budget.
        local_search_s: seconds by which local search improved on the solvers' schedules.
        host_bytes: bytes of host memory that transfers use; the timeline has their times.
        schedule: the operations, in order.
        held_bytes: for each stage, the bytes that it keeps from its first forward on in addition
            to those that the schedule keeps, as chosen by local search.
        timeline: times of all operations, and the memory held meanwhile.
        chain, costs: the stages and their costs.
        frontier: the least time at every other budget, with recomputation only.
        forward_code, backward_code: the emitted graphs as Python source.
        branch_ends: for each branch that meets others in a trunk, nested ones included, the stage
            after its last one.
        form: how operations are computed: as traced, with inputs of norms rebuilt from outputs, or
            with runs of operations in parts.
        budget_on: the bytes that all budgets and the frontier are in, ``"allocated"`` or
            ``"reserved"``.
        decision: the storages that each stage keeps, and the transfers. The rest is in the
            schedule.
        origin: the step that the plan is valid for, or ``None`` if it was not made from a model.
        measured: measurements of the graph, or ``None`` if the plan was not made from a model.
        also_held: memory that this call needs in addition to that of every call, such as existing
            gradients, as pairs of a description and bytes.
        usual: memory that later steps of the usual loop hold in addition to this call, as pairs of
            a description and bytes.
        zeros_budget_bytes: the least budget in bytes of a loop that sets gradients to zero instead
            of ``None``; 0 for the plan of a later call.
        sizes: the sizes that the plan is for, by their names in the code.
        waiting_bytes: bytes that a step holds between its forward and its backward, without a
            loss.
        fused: units compiled by Inductor, and runs of operations that are computed in parts.
        memory: the tensors held at each instant; empty if the plan was not made from a model.
        model: class name of the model; empty if unknown.
        arguments: place, and dtype and shape, of each tensor of the call that was planned.
        kept: the step with everything kept, for comparison, or ``None`` if it is unknown.
        measured_peak_bytes: peak in bytes of the latest observed step that followed the plan,
            counted as ``predicted_held_bytes`` is, or ``None`` if none was observed.
        cross_check: the comparison with CP-SAT, or ``None`` if it was not requested.
        decided: operations whose results are kept, or not, because of a policy or a tag.
        forms_left: number of forms of the step in smaller parts that were not searched, because
            ``effort`` was exhausted.
        training_state: the gradients and the optimizer state in host memory, or ``None`` if all of
            them are on the device.
        parameters_in_host: the parameters in host memory, by their place among those of the model.
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
    also_held: tuple[tuple[str, int], ...] = ()
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
    training_state: TrainingState | None = field(default=None, metadata={OMITTED: True})
    parameters_in_host: tuple[int, ...] = field(default=(), metadata={OMITTED: True})

    @property
    def actions(self) -> Schedule:
        """The calls of stages and the transfers of the step, in the order in which they are issued.

        Plans that do the same have equal actions. ``print`` shows one line per action.
        """
        return self.timeline.actions(self.decision.moves)

    @property
    def counted_bytes(self) -> int:
        """The predicted peak in the bytes that the budget limits, allocated or reserved."""
        reserved = self.budget_on == "reserved"
        return self.predicted_reserved_bytes if reserved else self.predicted_peak_bytes

    def check_read(self) -> None:
        """Check that the parts of a plan that was read are consistent.

        Raises:
            ValueError: the parts are inconsistent; the message says where.
        """
        from fxremat.report.consistent import check_plan  # noqa: PLC0415

        check_plan(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan, with the costs that it is based on, to a file.

        ``fxremat.compile(model, sample, plan=path)`` follows it without measuring or planning. The
        file is JSON, compressed with gzip if its name ends in ``.gz``. Equal plans are written as
        equal bytes.

        Args:
            path: path of the file. An existing file is replaced atomically.

        Raises:
            PlanError: the file cannot be written.
        """
        packed = path_of(path).suffix == ".gz"
        write_made("plan", path, lambda: pack(KIND, {"plan": encode(Plan, self)}, packed=packed))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that :meth:`save` wrote. The model is not needed.

        Args:
            path: path of the file.

        Raises:
            PlanError: the file cannot be read, is damaged, or does not contain a plan.
        """
        file = path_of(path)
        try:
            data = file.read_bytes()
        except OSError as error:
            raise PlanError(
                f"cannot read a plan from {file}: {error}. Pass the path of a file that "
                "Plan.save wrote",
                code="FXR603",
            ) from error
        try:
            return decode(Plan, unpack(KIND, data).get("plan"))
        except FormatError as error:
            raise PlanError(
                f"{file} does not contain a readable plan: {error}. Plan again, and save the "
                "new plan",
                code="FXR603",
            ) from error


@dataclass(frozen=True, slots=True)
class RegionRow:
    """One call of a graph in a step.

    Attributes:
        plan: the plan that the call followed. Its peaks include all memory outside the graph.
        module: the module whose parameters the graph reads; empty if unknown.
        ended_by: the user's line at which the graph ended, and the reason; empty if ``regions``
            requested it, if it is unknown, or if the step ends there.
        held_bytes: bytes that it holds from its forward to its backward, with its outputs.
        forward_peak_bytes, backward_peak_bytes: maximum bytes that the whole step holds while the
            graph runs.
        between_bytes: maximum bytes that code between its forward and the next one allocates, in
            addition to those of the step's begin and of this and earlier regions.
        between_back_bytes: maximum bytes that code after its backward holds, in addition to those
            of the step's begin and of earlier regions, including gradients that were computed.
        between_s: seconds between its forward and the next one, and between their backwards, or
            ``None`` if they were not measured or it is the last one.
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

    A model that is captured as several graphs has a ``StepPlan``; one that is captured as one graph
    has a ``Plan``. Attributes and methods that both classes have share their names.

    Attributes:
        budget: the budget as given, such as ``"6 GiB"``.
        budget_bytes: the budget in bytes.
        least_budget_bytes: the lowest peak in bytes of any combination of plans.
        baseline_peak_bytes: the peak in bytes with everything kept in every graph.
        predicted_peak_bytes: the peak in bytes of these plans, with all other memory of observed
            steps, in blocks as the device's allocator hands them out.
        predicted_reserved_bytes: maximum bytes that the allocator reserves from the device.
        measured_peak_bytes: peak in bytes of the latest observed step that followed these plans,
            or ``None`` if none was observed.
        resident_bytes: bytes allocated when the step begins, and bytes that are kept free.
        regions: calls of graphs, in the order of their forwards.
    """

    budget: str | int | float
    budget_bytes: int
    least_budget_bytes: int
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    predicted_reserved_bytes: int
    measured_peak_bytes: int | None
    resident_bytes: int
    regions: tuple[RegionRow, ...]

    @property
    def budget_on(self) -> Counted:
        """The bytes that all budgets are in, ``"allocated"`` or ``"reserved"``."""
        return self.regions[0].plan.budget_on

    @property
    def counted_bytes(self) -> int:
        """The predicted peak in the bytes that the budget limits, allocated or reserved."""
        reserved = self.budget_on == "reserved"
        return self.predicted_reserved_bytes if reserved else self.predicted_peak_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that transfers of all regions use."""
        return sum(row.plan.host_bytes for row in self.regions)

    @property
    def between_s(self) -> float | None:
        """Seconds of code between graphs, forward and backward, or ``None`` if not measured yet."""
        found = [row.between_s for row in self.regions if row.between_s is not None]
        return sum(found) if found or len(self.regions) == 1 else None

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of all graphs, and of the code between them as far as it was measured.

        A loss outside the model, and other code between the last forward and its backward, are not
        included.
        """
        return sum(row.plan.predicted_s for row in self.regions) + (self.between_s or 0.0)

    @property
    def baseline_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed, including code between graphs."""
        return sum(row.plan.baseline_s for row in self.regions) + (self.between_s or 0.0)

    @property
    def forward_code(self) -> str:
        """The forwards of all regions as Python source, in order; equal ones appear once."""
        return self._code(range(len(self.regions)), lambda plan: plan.forward_code)

    @property
    def backward_code(self) -> str:
        """The backwards of all regions as Python source, in reverse; equal ones appear once."""
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
        """Return a title such as ``regions 2–5, ended by …``, with the reasons that ended them.

        Args:
            places: the indices of the regions, from 0.
        """
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
    """Return the plans of all calls of graphs in a step; for a ``Plan``, only itself."""
    if isinstance(plan, StepPlan):
        return tuple(row.plan for row in plan.regions)
    return (plan,)


def _any(plan: Shown) -> AnyPlan:
    assert isinstance(plan, Plan | StepPlan)
    return plan
