"""The summary of a plan: budget, peak, time, the means to reach them, and the regions of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxremat.ir import Copy, Free, Lane, Offload, Prefetch, TrainingState, Wait
from fxremat.report.facts import CrossCheck
from fxremat.report.modules import common_module, named, span
from fxremat.report.plan import AnyPlan, Plan, RegionRow, StepPlan
from fxremat.report.stages import executed_stages
from fxremat.units import format_bytes, format_seconds, plural


def what_is_done(*plans: Plan) -> str:
    """Return text with the number of stages that are recomputed and the bytes that are moved."""
    stages = [stage for plan in plans for stage in executed_stages(plan)]
    again = sum(bool(stage.again) or stage.is_kept_in_part for stage in stages)
    done = [f"recomputes {again} of {plural(len(stages), 'stage')}"] if again else []
    moved_bytes = sum(stage.moved_bytes for stage in stages)
    done += [f"moves {format_bytes(moved_bytes)} to the host"] if moved_bytes else []
    return ", ".join(done) or "keeps everything"


def bound_of_least(plan: AnyPlan) -> str:
    """Return ``"at most "`` where a search for the least budget may go below what a plan says.

    With a larger budget fewer ways to compute the step are searched.
    """
    return "" if plan.least_budget_bytes >= plan.budget_bytes else "at most "


def summarize(plan: AnyPlan) -> Iterator[tuple[str, str]]:
    """Yield the lines of the summary of a plan, each as a title and a text."""
    step = plan if isinstance(plan, StepPlan) else None
    written = f", written {step.budget!r}" if step and step.budget != step.budget_bytes else ""
    yield "budget", _exactly(plan.budget_bytes) + written
    yield "least feasible", bound_of_least(plan) + _exactly(plan.least_budget_bytes)
    used = f", {plan.counted_bytes / plan.budget_bytes:.1%} of the budget"
    reserved_bytes = plan.predicted_reserved_bytes
    on_reserved = plan.budget_on == "reserved"
    peak = _exactly(plan.predicted_peak_bytes) + ("" if on_reserved else used)
    yield "predicted peak", peak if isinstance(plan, StepPlan) else f"{peak}, {_where(plan)}"
    if on_reserved or reserved_bytes != plan.predicted_peak_bytes:
        yield "predicted reserved", _exactly(reserved_bytes) + (used if on_reserved else "")
    if plan.measured_peak_bytes is not None:
        yield "measured peak", _exactly(plan.measured_peak_bytes)
    yield "with everything kept", _exactly(plan.baseline_peak_bytes)
    yield from _of_regions(plan) if isinstance(plan, StepPlan) else _of_graph(plan)


def _of_regions(step: StepPlan) -> Iterator[tuple[str, str]]:
    between = "time between graphs is not measured yet"
    if step.between_s is not None:
        between = f"{format_seconds(step.between_s)} of it between graphs"
    yield "predicted time", f"{compared(step)}; {between}"
    if step.host_bytes:
        yield "host memory", _exactly(step.host_bytes)
    count = len(step.regions)
    external = _exactly(step.resident_bytes)
    yield "regions", f"{count}, each one call of a graph; {external} allocated before the step"


def _of_graph(plan: Plan) -> Iterator[tuple[str, str]]:
    for what, nbytes in plan.also_held:
        yield "peak includes", f"{_exactly(nbytes)} for {what}"
    for what, nbytes in plan.usual:
        yield "later steps hold", f"{_exactly(nbytes)} of {what}"
    if plan.zeros_budget_bytes > plan.least_budget_bytes:
        nbytes = plan.zeros_budget_bytes
        yield "least if zeroed", f"{_exactly(nbytes)} if gradients are set to zero, not to None"
    yield "predicted time", compared(plan)
    yield "lower bound", _bound(plan)
    if plan.forms_left:
        forms = plural(plan.forms_left, "form")
        yield (
            "search",
            f"stopped early: {forms} in smaller parts not searched, which may take less memory or "
            "time; a larger effort= searches more",
        )
    if plan.cross_check is not None:
        yield "cross-check", _checked(plan.cross_check)
    if plan.arguments:
        yield "batch", batch_of(plan)
    if plan.host_bytes:
        yield "host memory", _host(plan)
    if plan.parameters_in_host:
        yield "parameters in host memory", str(len(plan.parameters_in_host))
    if plan.training_state is not None:
        yield "training state", _training_state(plan.training_state)
    if plan.form.has_parts:
        values = [f"{plural(len(plan.form.peak), 'value')} at the peak"] * bool(plan.form.peak)
        if plan.form.parts_bytes:
            values.insert(0, f"values of more than {format_bytes(plan.form.parts_bytes)}")
        if plan.form.inner_bytes:
            inner = format_bytes(plan.form.inner_bytes)
            values.append(f"values of more than {inner} within layers")
        what = f"{' and '.join(values)} are computed in parts"
        kept = "same bits" if plan.form.exact else "equal up to rounding"
        if plan.form.early_gradients:
            what += ", with gradients of losses"
        yield "gradients", f"{kept}: {what}"
    elif not plan.form.exact:
        yield "gradients", "equal up to rounding: inputs of norms are rebuilt from outputs"
    if not plan.form.shared:
        yield "equal operations", "each one runs where its result is read, so that none is held"
    units = [own for own in plan.fused if own.parts == 1]
    if units:
        calls = plural(sum(unit.calls for unit in units), "call")
        yield "kernels", f"by Inductor: {calls} of {plural(len(units), 'unit')}"
    stages = executed_stages(plan)
    kinds = len({plan.chain.stages[stage.index].kind for stage in stages})
    again = sum(len(stage.again) + stage.is_kept_in_part for stage in stages)
    runs = [event for event in plan.timeline.events if not isinstance(event.op, Copy)]
    yield (
        "stages",
        f"{plural(len(stages), 'stage')} of {plural(kinds, 'kind')}, "
        f"{plural(len(runs), 'operation')}, {plural(again, 'recomputation')}",
    )


def batch_of(plan: Plan) -> str:
    """Return the place, dtype and shape of each tensor of the call that was planned, as text."""
    return ", ".join(f"{place}: {tensor}" for place, tensor in plan.arguments)


def _where(plan: Plan) -> str:
    """Return text that names the operation and module at the peak of a plan."""
    for event in plan.timeline.events:
        if event.peak_bytes == plan.predicted_held_bytes:
            stage = -1 if isinstance(event.op, Offload | Free | Prefetch | Wait) else event.op.stage
            module = dict(enumerate(plan.memory.modules)).get(stage)
            return f"during {event.op}" + f", in module {module}" * bool(module)
    return "outside the stages: at the loss point, or once all gradients exist"


def compared(plan: AnyPlan) -> str:
    """Return a plan's predicted seconds as text, with the ratio to those without recomputation."""
    taken, least = format_seconds(plan.predicted_s), format_seconds(plan.baseline_s)
    if plan.baseline_s == 0:
        return f"{taken}, {least} without recomputation"
    ratio = plan.predicted_s / plan.baseline_s
    return f"{taken}, {ratio:.3f} × the {least} without recomputation ({ratio - 1:+.1%})"


def _bound(plan: Plan) -> str:
    """Return a plan's lower bound of seconds as text, with the gap and the gain of local search."""
    if 0 in (plan.predicted_s, plan.lower_bound_s):
        return format_seconds(plan.lower_bound_s)
    above = plan.predicted_s / plan.lower_bound_s - 1
    text = f"{format_seconds(plan.lower_bound_s)}: this plan is at most {above:.1%} above any other"
    if plan.lower_bound_s == plan.baseline_s < plan.predicted_s:
        text += "; the bound is the time without recomputation"
    gained = plan.local_search_s / plan.predicted_s
    if gained >= 0.0005:  # less would read 0.0%
        text += f"; local search gained {gained:.1%}"
    return text


def _checked(check: CrossCheck) -> str:
    """Return the seconds that CP-SAT found as text, with the gap between them and the plan."""
    if check.seconds is None:
        return f"no result from CP-SAT: {check.why_not}"
    known = "proven optimal for the stages' costs" if check.proven else "not proven optimal"
    gap = check.gap or 0.0
    far = "as fast" if abs(gap) < 0.0005 else f"{abs(gap):.1%} {'slower' if gap > 0 else 'faster'}"
    return f"{format_seconds(check.seconds)} by CP-SAT, {known}: this plan is {far}"


def _host(plan: Plan) -> str:
    """Return text with the host memory of a plan, its copies, and the seconds spent waiting."""
    copies = [event for event in plan.timeline.events if isinstance(event.op, Copy)]
    away = [event for event in copies if event.lane is Lane.D2H]
    return (
        f"{_exactly(plan.host_bytes)}: {plural(len(away), 'tensor')} copied there and back in "
        f"{format_seconds(sum(event.end_s - event.start_s for event in copies))}, of which the "
        f"step waits for {format_seconds(plan.timeline.idle.total_s)}"
    )


def _training_state(placed: TrainingState) -> str:
    """Return text with the gradients and the optimizer state in host memory, and their seconds."""
    return (
        f"{_exactly(placed.state_bytes)} of optimizer state and {_exactly(placed.gradient_bytes)} "
        "of gradients are in host memory: a step of the optimizer has "
        f"{format_bytes(placed.step_bytes)} or more on the device and takes "
        f"{format_seconds(placed.optimizer_s)}; all transfers add "
        f"{format_seconds(placed.added_s)} to a training step"
    )


def _exactly(nbytes: int) -> str:
    """Return a number of bytes as text, rounded and exact."""
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class RegionGroup:
    """Consecutive regions with equal plans and ends: a row of a table.

    Attributes:
        first, last: numbers of the first and the last region, counted from 1.
        covers: modules of the model that they cover; empty if unknown.
        forward_s: seconds of their forwards, with nothing recomputed.
        held_bytes: bytes that all of them keep from forward to backward.
        peak_bytes: maximum bytes that the step holds while one of them runs, forward or backward.
        what: description of their plans.
        ended_by: see :class:`RegionRow`.
        after: total seconds, and maximum bytes, of the code that follows them, as text.
    """

    first: int
    last: int
    covers: str
    forward_s: float
    held_bytes: int
    peak_bytes: int
    what: str
    ended_by: str
    after: str

    @property
    def label(self) -> str:
        """The numbers of the regions as text, such as ``"3"`` or ``"3–14"``."""
        return span(self.first, self.last)


def group_regions(step: StepPlan) -> tuple[RegionGroup, ...]:
    """Return groups of consecutive regions with equal plans and ends, in order of forwards."""
    groups: list[list[int]] = []
    for place, row in enumerate(step.regions):
        if not groups or not _alike(step.regions[groups[-1][0]], row):
            groups.append([])
        groups[-1].append(place)
    return tuple(_group(step, places) for places in groups)


def _alike(one: RegionRow, other: RegionRow) -> bool:
    """Return whether two regions have equal stages and plans, and ended for the same reason."""
    a, b = one.plan, other.plan
    return one.ended_by == other.ended_by and (
        a is b or (a.chain == b.chain and a.schedule == b.schedule and a.decision == b.decision)
    )


def _group(step: StepPlan, places: list[int]) -> RegionGroup:
    rows = [step.regions[place] for place in places]
    each = "each " if len(rows) > 1 else ""
    times_s = [row.between_s for row in rows if row.between_s is not None]
    most = format_bytes(max(0, *(row.between_bytes for row in rows)))
    return RegionGroup(
        first=places[0] + 1,
        last=places[-1] + 1,
        covers=named([row.module or common_module(row.plan.memory.modules) for row in rows]),
        forward_s=sum(stage.forward_s for row in rows for stage in executed_stages(row.plan)),
        held_bytes=sum(row.held_bytes for row in rows),
        peak_bytes=max(max(row.forward_peak_bytes, row.backward_peak_bytes) for row in rows),
        what=each + what_is_done(rows[0].plan),
        ended_by=rows[0].ended_by,
        after=f"{format_seconds(sum(times_s))}, {most}" if times_s else most,
    )
