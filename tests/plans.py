"""Hand-made plans, from schedules on paper."""

from __future__ import annotations

from fxremat.ir import Backward, Chain, Costs, Forward, Keep, Schedule
from fxremat.report.frontier import frontier_of
from fxremat.report.plan import Plan
from tests.paper_terms import chain_from_sizes, costs_from_paper
from tests.reference.simulate import simulate

MIB = 1 << 20


def chain_of(stages: int) -> tuple[Chain, Costs]:
    """Stage ``i`` passes on 1 MiB, saves ``3 + i`` MiB and takes ``i + 1`` ms."""
    boundary = [MIB] * (stages + 1)
    saved = [(3 + i) * MIB for i in range(stages)]
    seconds = [(i + 1) / 1e3 for i in range(stages)]
    costs = costs_from_paper(
        forward_s=seconds,
        backward_s=seconds,
        gradient_bytes=boundary,
        saved_bytes=saved,
        forward_extra_bytes=[0] * stages,
        backward_extra_bytes=[0] * stages,
    )
    return chain_from_sizes(boundary, saved), costs


def schedule_of(text: str) -> Schedule:
    """``"F_ck 0, F_all 1, B 1"`` as ``Schedule.__str__`` writes it."""
    keeps = {"F_none": Keep.NONE, "F_ck": Keep.INPUT, "F_all": Keep.ALL}
    ops = []
    for word in text.split(", "):
        name, stage = word.split()
        ops.append(Backward(int(stage)) if name == "B" else Forward(int(stage), keeps[name]))
    return Schedule(tuple(ops))


def everything_kept(stages: int) -> Schedule:
    """Each forward once."""
    forward = [Forward(i, Keep.ALL) for i in range(stages)]
    return Schedule((*forward, *map(Backward, reversed(range(stages)))))


def plan_of(schedule: Schedule, *, stages: int, budget_bytes: int | None = None) -> Plan:
    """The plan of ``schedule`` on :func:`chain_of`; its budget is its peak unless given."""
    chain, costs = chain_of(stages)
    timeline = simulate(chain, costs, schedule)
    baseline = simulate(chain, costs, everything_kept(stages))
    return Plan(
        host_bytes=0,
        budget_bytes=timeline.peak_bytes if budget_bytes is None else budget_bytes,
        least_budget_bytes=timeline.peak_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        predicted_reserved_bytes=timeline.peak_bytes,
        predicted_held_bytes=timeline.peak_bytes,
        predicted_s=timeline.makespan_s,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_s=baseline.makespan_s,
        lower_bound_s=baseline.makespan_s,
        local_search_s=0.0,
        schedule=schedule,
        held_bytes=(0,) * stages,
        timeline=timeline,
        chain=chain,
        costs=costs,
        frontier=frontier_of([(baseline.peak_bytes, baseline.makespan_s)]),
        forward_code="",
        backward_code="",
    )
