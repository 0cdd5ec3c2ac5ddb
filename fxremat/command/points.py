"""A plan as a point of a diagnosis: what holds its peak, and which operation needs it."""

from __future__ import annotations

import re

import torch

from fxremat import torch_compat
from fxremat.capture.isolation import generators_restored, in_training
from fxremat.command.opaque import line_of, shortened
from fxremat.command.trial import Trial
from fxremat.graph.graph import Graph
from fxremat.graph.pool import least_of
from fxremat.graph.pools import pools
from fxremat.module.compiled import original_of
from fxremat.planning.choose import usual_context
from fxremat.report.diagnosis import Point
from fxremat.report.memory import StepMemory
from fxremat.report.plan import Plan, RegionRow, StepPlan

LATER, CACHE, BETWEEN = "held by later steps", "blocks of the allocator", "code between graphs"


def kept_point(trial: Trial) -> Point:
    """Return the step with everything kept, of a trial that keeps everything."""
    plan = trial.plan
    assert plan is not None
    return Point(plan.baseline_peak_bytes, plan.baseline_s, at_peak(plan, plan.baseline_peak_bytes))


def least_point(trial: Trial) -> Point:
    """Return the step within the least budget, of a trial with the budget ``"min"``."""
    plan = trial.plan
    assert plan is not None
    nbytes = plan.least_budget_bytes
    return Point(
        nbytes,
        plan.predicted_s,
        at_peak(plan, nbytes),
        needed_by=needed_by(trial),
        host_bytes=plan.host_bytes,
    )


def at_peak(plan: Plan | StepPlan, nbytes: int) -> dict[str, int]:
    """Return the bytes at the peak of a plan by purpose, and what is missing to ``nbytes``."""
    if isinstance(plan, StepPlan):
        memory = highest_region(plan)[1].plan.memory
        rest = {BETWEEN: nbytes - memory.peak_bytes}
    else:
        memory = plan.memory
        slack_bytes = plan.counted_bytes - memory.peak_bytes
        rest = {CACHE: slack_bytes, LATER: nbytes - plan.counted_bytes}
    found = {kind.value: own for kind, own in memory.at_peak().items()} | rest
    return {name: own for name, own in found.items() if own}


def highest_region(plan: StepPlan) -> tuple[int, RegionRow]:
    """Return the index and the row of the region with the highest peak."""
    rows = list(enumerate(plan.regions))
    return max(rows, key=lambda own: max(own[1].forward_peak_bytes, own[1].backward_peak_bytes))


def needed_by(trial: Trial) -> str:
    """Return which operation needs the least budget, in which module and line of the model."""
    plan, training = trial.plan, trial.training
    if isinstance(plan, StepPlan):
        index, row = highest_region(plan)
        name = f"region {index + 1}" + (f" ({row.module})" if row.module else "")
        what = _last_made(row.plan.memory, training.regions.latest[index].graph)
        return f"{what} of {name}" if what else name
    graph = training.graphs[0]
    first = next(iter(graph.calls.plans))
    model = original_of(trial.module)
    with generators_restored(), in_training(model), torch.enable_grad():
        context = usual_context(graph, first, training.loop.budget)
        return _bare(least_of(pools(graph, context, None, run=False)).describe_least())


def _bare(phrase: str) -> str:
    """Return a phrase that names a line of the model with the path of its file shortened."""
    return re.sub(r"(?<=, at )\S+(?=:\d+ )", lambda match: shortened(match[0]), phrase)


def _last_made(memory: StepMemory, graph: Graph) -> str:
    """Return the operation, module and line of what was allocated last before a peak."""
    held = memory.held_bytes()
    if not held:
        return ""
    instant = held.index(max(held))
    if instant == memory.loss_point:
        return "the loss point"
    alive = [
        life
        for life in memory.lives
        if life.begin <= instant < life.end and memory.tensors[life.tensor].operation
    ]
    if not alive:
        return ""
    last = max(alive, key=lambda life: (life.begin, memory.tensors[life.tensor].nbytes))
    tensor = memory.tensors[last.tensor]
    what = tensor.operation + (f" in module {tensor.module}" if tensor.module else "")
    joint = graph.joint
    for node in (*joint.forward, *joint.backward):
        if node.name == tensor.name and torch_compat.user_lines(node.stack_trace or ""):
            return f"{what}, at {line_of(node)}"
    return what
