"""From a joint graph to a plan: the search keeps the promise before anything runs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fxremat.effort import Effort
from fxremat.errors import BudgetError
from fxremat.graph.compiled_plan import CompiledPlan
from fxremat.graph.forms import PlanOptions
from fxremat.graph.graph import Graph
from fxremat.graph.pools import least_bytes, rough_least_bytes
from fxremat.ir import Backward, Forward, Keep
from fxremat.ir.schedule import decoded
from fxremat.options.budget import Budget, TrainingBudget
from fxremat.planner.allocator.allocator import AllocatorSettings
from fxremat.planner.context.context_bytes import Caller
from fxremat.planner.context.step_context import StepContext
from fxremat.planning.planner import first_plan
from fxremat.progress import Progress, silent
from fxremat.units import Counted
from tests.harness import captured, search_of, searched
from tests.sized import at_size, symbolic

NAMES = ("gpt", "unet", "siamese")
NOBODY = Caller()
by_model = pytest.mark.parametrize("name", NAMES)


def planned(
    name: str,
    budget: int | float | str,
    caller: Caller = NOBODY,
    *,
    progress: Progress = silent,
    allocator: AllocatorSettings | None = None,
) -> CompiledPlan:
    step = captured(name)
    graph = Graph(
        step.traced,
        forward_output_count=step.output_count,
        inputs=step.real,
        caller=caller,
        progress=progress,
        options=PlanOptions(allocator=allocator),
    )
    return first_plan(graph, StepContext(), TrainingBudget(Budget.read(budget)))


@by_model
def test_the_best_within_each_budget_fits_and_gets_no_worse(name: str):
    search = search_of(name)
    least, full = search.least.peak_bytes, search.baseline.peak_bytes
    chosen = []
    for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        budget_bytes = least + int(share * (full - least))
        best = search.fastest_within(budget_bytes)
        assert best.peak_bytes <= budget_bytes
        solved = [c for c in search.solved.members if c.peak_bytes <= budget_bytes]
        if best is not search.baseline:
            assert best.total_s <= min(c.total_s for c in solved)
            assert search.gained_s(budget_bytes) >= 0
        assert search.bound(budget_bytes)() <= best.total_s * (1 + 1e-9)
        chosen.append(best)
    for less, more in itertools.pairwise(chosen[:-1]):
        assert more.total_s <= less.total_s
    assert chosen[-1] is search.baseline


@by_model
def test_nothing_is_recomputed_in_the_baseline(name: str):
    search = search_of(name)
    stages = range(len(search.chain))
    forwards = [Forward(i, Keep.ALL) for i in stages]
    backwards = [Backward(i) for i in reversed(stages)]
    assert decoded(search.baseline.codes).ops == (*forwards, *backwards)


@by_model
def test_the_plan_tells_what_was_chosen(name: str):
    result = planned(name, "min")
    plan = result.record
    assert plan.budget_bytes == plan.least_budget_bytes == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes < plan.baseline_peak_bytes
    assert plan.predicted_s >= plan.baseline_s > 0
    assert plan.timeline.makespan_s == pytest.approx(plan.predicted_s)
    assert plan.timeline.peak_bytes <= plan.predicted_peak_bytes
    left = iter(plan.schedule)
    # Operations that nobody reads the results of are left out.
    assert all(event.op in left for event in plan.timeline.events), "another order"
    backwards = [e.op.stage for e in plan.timeline.events if isinstance(e.op, Backward)]
    ends = plan.branch_ends
    parts = [*zip((0, *ends), ends, strict=False), (ends[-1] if ends else 0, len(plan.chain))]
    for begin, end in parts:  # each branch, and the trunk; a line is all trunk
        own = [stage for stage in backwards if begin <= stage < end]
        assert own == sorted(own, reverse=True)
    assert plan.forward_code == result.forward.code
    assert plan.backward_code == result.backward.code


def test_a_budget_too_small_names_the_least_and_what_needs_it():
    least = planned("gpt", "min").record.least_budget_bytes
    with pytest.raises(BudgetError, match=rf"least feasible budget is {least} bytes.*needed by "):
        planned("gpt", least - 1)


def test_measuring_and_solving_are_told_of():
    seen: list[str] = []
    planned(
        "gpt", 1.0, progress=lambda what, done=0, total=0: seen.append(f"{what} {done <= total}")
    )
    assert {"plan True", "write True"} <= set(seen)
    assert not [entry for entry in seen if entry.endswith("False")]


def test_what_the_caller_reserves_is_in_every_peak():
    plain = search_of("siamese")
    caller = Caller(loss_bytes=0, reserve_bytes=4096)
    kept = searched(captured("siamese"), caller=caller)
    assert kept.baseline.peak_bytes == plain.baseline.peak_bytes + 4096
    assert kept.least.peak_bytes == plain.least.peak_bytes + 4096


ALLOCATORS = {
    "usual": AllocatorSettings(),
    "growing": AllocatorSettings(expandable_segments=True),
    "halves": AllocatorSettings(divisions=(2,) * 16),
}


REPLAYED: list[tuple[str, str, Counted]] = [
    ("gpt", "usual", "allocated"),
    ("gpt", "usual", "reserved"),
    ("unet", "growing", "allocated"),
    ("siamese", "growing", "reserved"),
    ("siamese", "halves", "allocated"),
]


@pytest.mark.parametrize(("name", "rules", "counted"), REPLAYED)
def test_what_an_allocator_hands_out_keeps_to_the_budget(name: str, rules: str, counted: Counted):
    rules_of: dict[str, Any] = {
        "caller": Caller(budget_on=counted),
        "allocator": ALLOCATORS[rules],
    }
    least = planned(name, "min", **rules_of).record
    full = planned(name, 1.0, **rules_of).record
    assert least.counted_bytes == least.least_budget_bytes == least.budget_bytes
    assert full.counted_bytes == full.baseline_peak_bytes
    middle = (least.budget_bytes + full.budget_bytes) // 2
    plans = [least, planned(name, middle, **rules_of).record, full]
    for plan in plans:
        assert plan.predicted_held_bytes <= plan.predicted_peak_bytes
        assert plan.predicted_peak_bytes <= plan.predicted_reserved_bytes
        assert plan.counted_bytes <= plan.budget_bytes
        assert plan.least_budget_bytes == least.budget_bytes
        assert plan.frontier.least_budget_bytes == least.budget_bytes
        point = plan.frontier.at(plan.budget_bytes)
        assert point is not None
        assert plan.predicted_s <= point.predicted_s
    for less, more in itertools.pairwise(plans[:-1]):
        assert more.predicted_s <= less.predicted_s
    with pytest.raises(BudgetError, match=str(least.budget_bytes)):
        planned(name, least.budget_bytes - 1, **rules_of)


def test_without_an_allocator_of_its_own_a_device_hands_out_what_is_asked_for():
    for counted in ("allocated", "reserved"):
        plan = planned("gpt", "min", Caller(budget_on=counted)).record
        assert plan.predicted_peak_bytes == plan.predicted_held_bytes
        assert plan.predicted_reserved_bytes == plan.predicted_peak_bytes
        assert plan.budget_on == counted


@by_model
def test_a_larger_budget_never_gets_a_slower_schedule_where_peaks_are_replayed(name: str):
    search = searched(captured(name), allocator=AllocatorSettings())
    least, full = search.least_bytes, search.counted_bytes(search.baseline)
    before = None
    for part in range(41):
        budget_bytes = least + (full - least) * part // 40
        found = search.fastest_within(budget_bytes)
        assert search.counted_bytes(found) <= budget_bytes
        if before is not None and found is not search.baseline:
            assert found.total_s <= before.total_s
        before = found
    assert before is search.baseline
    # No more was replayed than what could be chosen.
    assert len(search.allocations.replayed) <= len(search.pool.members)


def test_what_is_known_is_not_forgotten_where_others_are_looked_for():
    """A search at one size may find nothing as low as what is known from another."""
    step = symbolic("gpt", (3, 24))
    graph = Graph(
        step.traced,
        forward_output_count=step.output_count,
        inputs={},
        caller=NOBODY,
        progress=silent,
        options=PlanOptions(effort=Effort(generators=("rotor",))),
    )
    for sizes in ((2, 64), (5, 17), (7, 48), (12, 64)):
        context = StepContext(at_size("gpt", (3, 24), sizes).values)
        roughly = rough_least_bytes(graph, context)
        assert least_bytes(graph, context, 0) <= roughly
