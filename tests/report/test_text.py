"""The plan for people: every claim in it is one of the schedule's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxremat.ir import Backward, Forward, Keep, SaveOption, Schedule
from fxremat.report.stages import describe, explain, report_stages
from fxremat.report.text import print_plan
from fxremat.units import format_bytes
from tests.plans import MIB, chain_of, everything_kept, plan_of, schedule_of
from tests.reference.simulate import simulate

TWICE = (
    "F_ck 0, F_none 1, F_none 2, F_all 3, B 3, "
    "F_ck 0, F_none 1, F_all 2, B 2, F_ck 0, F_all 1, B 1, F_all 0, B 0"
)
"""Only the input is ever held: stage ``i`` of four is recomputed ``3 - i`` times."""

SEGMENT = "F_all 0, F_ck 1, F_none 2, F_all 3, B 3, F_all 1, F_all 2, B 2, B 1, B 0"
"""Stages 1 and 2 are recomputed as one segment."""


def _told(text: str, stages: int = 4):
    return report_stages(plan_of(schedule_of(text), stages=stages))


def test_kept_stages_say_what_they_take_and_what_they_spare():
    story = report_stages(plan_of(everything_kept(2), stages=2))[1]
    assert describe(story) == "kept"
    assert explain(story) == "takes 4.0 MiB, 2 ms to recompute"
    assert story.freed_bytes == 0
    assert story.again == ()


def test_recomputations_are_counted_and_lead_back_to_their_checkpoint():
    stories = _told(TWICE)
    assert [len(story.again) for story in stories] == [3, 2, 1, 0]
    assert [describe(story) for story in stories] == [
        "checkpoint, recomputed 3 times",
        "recomputed 2 times from stage 0's checkpoint",
        "rebuilt right before its backward from stage 0's checkpoint",
        "kept",
    ]


def test_recomputation_costs_what_its_runs_take():
    stories = _told(TWICE)
    assert [round(story.extra_s * 1e3, 9) for story in stories] == [3, 4, 3, 0]
    assert explain(stories[1]) == "frees 4.0 MiB, costs 4 ms"


def test_a_stage_kept_in_part_says_what_is_kept_and_what_the_rest_costs():
    chain, costs = chain_of(2)
    option = SaveOption(kept=(), recompute_s=1 / 4e3, keep_extra_bytes=0, backward_extra_bytes=0)
    first = replace(costs.stages[0], options=(option,))
    costs = replace(costs, stages=(first, *costs.stages[1:]))
    schedule = Schedule((Forward(0, Keep.ALL, 1), Forward(1, Keep.ALL), Backward(1), Backward(0)))
    plan = replace(
        plan_of(everything_kept(2), stages=2),
        schedule=schedule,
        costs=costs,
        timeline=simulate(chain, costs, schedule),
    )
    story, other = report_stages(plan)
    assert describe(story) == "1.0 MiB of 3.0 MiB kept, rest rebuilt"
    assert explain(story) == "frees 2.0 MiB, costs 250 µs"
    assert describe(other) == "kept"
    assert "1 recomputation" in print_plan(plan)


def test_a_segment_is_told_from_a_rebuild():
    stories = _told(SEGMENT)
    assert describe(stories[1]) == "checkpoint, recomputed once"
    assert "rebuilt" in describe(stories[2])
    assert "stage 1's checkpoint" in describe(stories[2])


def test_a_boundary_that_the_next_stage_holds_is_not_freed():
    stories = _told(SEGMENT)
    assert stories[1].freed_bytes == stories[1].saved_bytes == 4 * MIB
    assert stories[2].saved_bytes == 5 * MIB
    assert stories[2].freed_bytes == 4 * MIB  # stage 3 keeps its input, 1 MiB


def test_a_second_run_may_set_out_from_a_later_checkpoint():
    stories = _told(
        "F_ck 0, F_none 1, F_none 2, F_all 3, B 3, "
        "F_ck 0, F_ck 1, F_all 2, B 2, F_all 1, B 1, F_all 0, B 0"
    )
    assert "recomputed 2 times" in describe(stories[1])
    assert "stages 0 and 1" in describe(stories[1])


def _without(plan, *left_out: int):
    """``plan``, some of whose operations the emitted graphs leave out."""
    events = tuple(e for i, e in enumerate(plan.timeline.events) if i not in left_out)
    return replace(plan, timeline=replace(plan.timeline, events=events))


def test_a_forward_that_nobody_needs_again_is_told():
    plan = plan_of(schedule_of("F_ck 0, F_all 1, B 1, F_all 0, B 0"), stages=2)
    told = report_stages(_without(plan, 3))
    assert describe(told[0]) == "checkpoint"
    assert "needs nothing" in explain(told[0])


def test_a_stage_that_computes_nothing_is_told():
    plan = plan_of(everything_kept(3), stages=3)
    told = report_stages(_without(plan, 1, 4))
    assert [describe(story) for story in told] == ["kept", "nothing", "kept"]
    assert "computes nothing" in explain(told[1])
    print_plan(_without(plan, 0, 1, 2, 3, 4, 5))  # a plan without operations prints as well


def test_a_stage_of_which_nothing_runs_has_no_row():
    """As one that stands for the loss point."""
    plan = plan_of(everything_kept(3), stages=3)
    idle = _without(plan, 2, 3)
    assert [story.executed for story in report_stages(idle)] == [True, True, False]
    text = print_plan(idle)
    assert labels_of(text) == ["0–1"]
    assert "2 stages of 2 kinds" in text
    forward_only = _without(plan, 3)
    assert labels_of(print_plan(forward_only)) == ["0–2"]


def test_operations_left_out_do_not_hide_where_a_recomputation_starts():
    plan = plan_of(schedule_of(TWICE), stages=4)
    # Leave out stage 1 wherever it runs: F_none 1, F_none 1, F_all 1 and B 1.
    told = report_stages(_without(plan, 1, 6, 10, 11))
    assert describe(told[1]) == "nothing"
    assert "rebuilt" in describe(told[2])
    assert "stage 0's checkpoint" in describe(told[2])
    assert [len(story.again) for story in told] == [3, 0, 1, 0]


def test_summary_gives_the_numbers(capsys):
    plan = plan_of(schedule_of(TWICE), stages=4, budget_bytes=32 * MIB)
    text = print_plan(plan)
    assert "budget                32.0 MiB (33554432 bytes)" in text
    assert f"({plan.least_budget_bytes} bytes)" in text
    assert f"({plan.baseline_peak_bytes} bytes)" in text
    assert f"{plan.predicted_peak_bytes / plan.budget_bytes:.1%} of the budget" in text
    # Forwards 1 + 2 + 3 + 4 ms and as long backwards; recomputation adds 3 + 4 + 3 ms.
    assert "30 ms, 1.500 × the 20 ms without recomputation (+50.0%)" in text
    assert "4 stages of 4 kinds, 14 operations, 6 recomputations" in text
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == text.splitlines()


def test_the_moment_of_the_peak_is_named():
    plan = plan_of(schedule_of(SEGMENT), stages=4)
    first = next(e for e in plan.timeline.events if e.peak_bytes == plan.predicted_peak_bytes)
    assert f"during {first.op}" in print_plan(plan)
    above = replace(plan, predicted_held_bytes=plan.predicted_held_bytes + 1)
    assert "outside the stages" in print_plan(above)
    handed_out = replace(plan, predicted_peak_bytes=plan.predicted_peak_bytes + 1)
    assert f"during {first.op}" in print_plan(handed_out)


def test_what_is_reserved_is_told_where_it_is_more():
    plan = plan_of(schedule_of(SEGMENT), stages=4)
    assert "reserved" not in print_plan(plan)
    more = replace(plan, predicted_reserved_bytes=plan.predicted_peak_bytes + 4096)
    share = f"{plan.predicted_peak_bytes / plan.budget_bytes:.1%} of the budget"
    (peak,) = (line for line in print_plan(more).splitlines() if line.startswith("predicted peak"))
    (reserved,) = (line for line in print_plan(more).splitlines() if "reserved" in line)
    assert share in peak
    assert f"({plan.predicted_peak_bytes + 4096} bytes)" in reserved
    assert "of the budget" not in reserved


def test_the_share_of_the_budget_is_that_of_what_it_is_for():
    plan = plan_of(schedule_of(SEGMENT), stages=4)
    reserved = plan.predicted_peak_bytes + 4096
    text = print_plan(replace(plan, predicted_reserved_bytes=reserved, budget_on="reserved"))
    (line,) = (line for line in text.splitlines() if "of the budget" in line)
    assert f"({reserved} bytes), {reserved / plan.budget_bytes:.1%}" in line


def test_a_plan_without_time_has_no_ratio():
    text = print_plan(replace(plan_of(everything_kept(1), stages=1), baseline_s=0.0))
    assert "without recomputation" in text
    assert "×" not in text


def test_where_no_bound_is_known_it_says_so():
    plan = plan_of(schedule_of(TWICE), stages=4)
    assert plan.lower_bound_s == plan.baseline_s < plan.predicted_s
    assert "the bound is the time" in print_plan(plan)
    known = replace(plan, lower_bound_s=plan.baseline_s * 1.01)
    assert "the bound is the time" not in print_plan(known)
    kept = plan_of(everything_kept(4), stages=4)
    assert "the bound is the time" not in print_plan(kept)


def labels_of(text: str) -> list[str]:
    """The first column of the table."""
    rows = text.splitlines()[text.splitlines().index("") + 1 :]
    return [row[1:].split("  ")[0].strip() for row in rows if row[:1] == " " and row[1:2].isdigit()]


@pytest.mark.parametrize("stages", [1, 2, 150])
def test_alike_stages_have_a_row_together(stages):
    plan = plan_of(everything_kept(stages), stages=stages)
    text = print_plan(plan)
    assert labels_of(text) == ["0" if stages == 1 else f"0–{stages - 1}"]
    taken = sum(plan.chain.nbytes(plan.chain.saved_set(i)) for i in range(stages))
    assert format_bytes(taken) in text


def test_stages_that_are_treated_otherwise_have_rows_of_their_own():
    assert labels_of(print_plan(plan_of(schedule_of(SEGMENT), stages=4))) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("text", [TWICE, SEGMENT])
def test_it_fits_a_hundred_columns(text):
    plan = plan_of(schedule_of(text), stages=4)
    names = ("a.long.name.of.a.module.that.holds.another", "b", "", "c.0.d")
    for modules in ((), names):
        memory = replace(plan.memory, modules=modules)
        printed = print_plan(replace(plan, memory=memory))
        assert max(map(len, printed.splitlines())) <= 100
        assert "…" not in printed


def test_the_notes_below_fill_lines_of_any_width(monkeypatch: pytest.MonkeyPatch):
    plan = plan_of(schedule_of(SEGMENT), stages=4)
    monkeypatch.setattr("fxremat.report.text.WIDTH", 80)
    notes = print_plan(plan).split("\n\n")[-1].splitlines()
    assert len(notes) > 2
    assert all(60 < len(line) <= 80 for line in notes[:-1])


def test_what_gains_or_costs_nothing_is_not_told_in_numbers():
    plan = plan_of(schedule_of(TWICE), stages=4)
    assert "local search" not in print_plan(replace(plan, local_search_s=plan.predicted_s / 1e4))
    assert "local search" in print_plan(replace(plan, local_search_s=plan.predicted_s / 10))
    story = report_stages(plan_of(everything_kept(2), stages=2))[1]
    assert "0 µs" not in explain(replace(story, rebuild_s=0.0))


def test_explain_prints_the_plan():
    plan = plan_of(everything_kept(3), stages=3)
    assert plan.explain() == print_plan(plan)
