from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.errors import ScheduleError
from fxremat.ir import (
    Activations,
    Backward,
    Chain,
    Costs,
    Forward,
    Join,
    JoinCosts,
    Keep,
    Offload,
    Op,
    Part,
    Problem,
    Schedule,
)
from fxremat.solvers import rotor
from tests.joins import costed_joins, join_of, two_towers
from tests.reference.simulate import simulate as simulate_chain
from tests.reference.simulate.join import _Replay, check, simulate
from tests.strategies import costed_chains

KEEPS = {"none": Keep.NONE, "ck": Keep.INPUT, "all": Keep.ALL}


def schedule(text: str) -> Schedule:
    ops: list[Op] = []
    for word in text.split():
        name, number = re.fullmatch(r"([a-zA-Z]+)(\d+)", word).groups()  # type: ignore[union-attr]
        ops.append(Backward(int(number)) if name == "B" else Forward(int(number), KEEPS[name]))
    return Schedule(tuple(ops))


ALL = "all0 all1 all2 all3 all4 all5 all6 B6 B5 "


def held(text: str) -> list[int]:
    """Bytes held after each operation, without ``fixed_bytes``."""
    problem = two_towers()
    events = simulate(problem.join, problem.costs, schedule(text)).events
    return [event.held_bytes - problem.costs.fixed_bytes for event in events]


def test_gradients_are_held_until_their_branch_goes_on() -> None:
    """Boundaries 1 2 3 and 10 20 30 40, saved sets 5 6 and 50 60 70, trunk 500 0."""
    full = 1 + 5 + 6 + 10 + 50 + 60 + 70 + 500
    assert held(ALL + "B4 B1 B3 B0 B2")[6:] == [
        full,
        full + 100_000,
        full - 500 + 1_000_000 + 2000 + 30_000,
        full - 500 - 70 + 1_000_000 + 2000 + 20_000,
        full - 500 - 70 - 6 + 1_000_000 + 1000 + 20_000,
        full - 500 - 70 - 6 - 60 + 1_000_000 + 1000 + 10_000,
        10 + 50 + 1_000_000 + 300 + 10_000,
        1_000_000 + 300 + 7000,
    ]


def held_before_the_end(text: str) -> list[int]:
    """As ``held``, of forwards after which no backward need be possible."""
    problem = two_towers()
    replay = _Replay(problem.join, problem.costs)
    found = []
    for op in schedule(text).computations:
        assert isinstance(op, Forward)
        line, place = replay.places[op.stage]
        replay._forward(replay.lines[line], place, op, None)
        found.append(replay._total() - problem.costs.fixed_bytes)
    return found


def test_every_branch_has_its_own_flight() -> None:
    # Boundary 1 of branch 0 stays in flight while branch 1 runs, and is consumed later.
    text = "none0 none2 none3 none1 none4"
    assert held_before_the_end(text) == [2 + 10, 2 + 20, 2 + 30, 3 + 30, 3 + 40]


def test_the_trunk_consumes_or_keeps_the_ends() -> None:
    ends = "none0 none1 none2 none3 none4 "
    assert held_before_the_end(ends + "none5")[-1] == 100
    assert held_before_the_end(ends + "ck5")[-1] == 43 + 100
    assert held_before_the_end(ends + "all5")[-1] == 43 + 500
    # What lies in a saved set stays there, and is counted once.
    assert held_before_the_end("ck0 all1 none2 none3 none4 ck5")[-1] == 1 + 2 + 6 + 40 + 100
    assert held_before_the_end("ck0 all1 none2 none3 none4 none5")[-1] == 1 + 2 + 6 + 100
    # A kept boundary is read again, whole, and consumed.
    assert held_before_the_end(ends + "ck5 none5")[-1] == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all0 all0 none7", r"op 2 \(F_none 7\): there is no such stage"),
        ("none0 none5", r"op 1 \(F_none 5\): the end of branch 0 is missing"),
        ("none0 none1 none5", r"op 2 \(F_none 5\): the end of branch 1 is missing"),
        ("none1", r"op 0 \(F_none 1\): boundary 1 is not in memory"),
        ("all0 all1 B1", r"op 2 \(B 1\): the trunk's backward is not done"),
        (ALL + "B0", r"op 9 \(B 0\): the backward of the stage after it is not done"),
        (ALL + "B1 B1", r"op 10 \(B 1\): it is done already"),
        (ALL + "B1 all1", r"op 10 \(F_all 1\): its backward is done"),
        ("ck0 ck1 all2 all3 all4 all5 all6 B6 B5 B1", r"\(B 1\): its saved set is not in memory"),
        ("all0 B6", r"op 1 \(B 6\): its saved set is not in memory"),
        (ALL + "B4 B3 B2", r"ends at op 12 before B 1"),
        ("all0 all1", r"ends at op 2 before B 6"),
    ],
)
def test_invalid_operations_are_named(text: str, message: str) -> None:
    problem = two_towers()
    with pytest.raises(ScheduleError, match=message):
        simulate(problem.join, problem.costs, schedule(text))


def test_transfers_are_refused() -> None:
    problem = two_towers()
    ops = (Forward(0, Keep.ALL), Offload(Activations(Part.SAVED, 0)))
    with pytest.raises(ScheduleError, match="replayed without a link"):
        simulate(problem.join, problem.costs, Schedule(ops))


def test_a_rebuild_has_its_own_cost() -> None:
    problem = two_towers()
    stages = problem.costs.branches[0]
    costs = replace(
        problem.costs,
        branches=((stages[0], replace(stages[1], rebuild_bytes=77)), problem.costs.branches[1]),
    )
    text = "ck0 ck1 all2 all3 all4 all5 all6 B6 B5 all1 B1 all0 B0 B4 B3 B2"
    events = simulate(problem.join, costs, schedule(text)).events
    others = 10 + 50 + 60 + 70 + 10_000_000 + 1_000_000 + 30_000
    assert [event.peak_bytes for event in events[9:11]] == [others + 1 + 2 + 2000 + 77] * 2
    assert [event.end_s - event.start_s for event in events[9:11]] == [0.5, 2.0]


def test_check_holds_the_peak_against_the_budget() -> None:
    problem = two_towers()
    everything = schedule(ALL + "B4 B3 B2 B1 B0")
    peak = check(problem, everything).peak_bytes
    assert check(replace(problem, budget_bytes=peak), everything).peak_bytes == peak
    with pytest.raises(ScheduleError, match=rf"peaks at {peak} bytes, the budget is {peak - 1}"):
        check(replace(problem, budget_bytes=peak - 1), everything)


@given(costed_chains(), st.integers(0, 30))
def test_one_branch_replays_as_the_chain_does(costed: tuple[Chain, Costs], spare: int) -> None:
    chain, costs = costed
    if len(chain) < 2:
        return
    budget_bytes = rotor.least_budget(chain, costs)[0] + spare
    problem = Problem(chain, costs, budget_bytes)
    found = rotor.RotorTable.build(
        chain, costs, max_budget_bytes=budget_bytes, slots=max(1, budget_bytes)
    ).schedule(budget_bytes)
    join = join_of(problem)
    mine = simulate(join.join, join.costs, found.schedule)  # type: ignore[union-attr]
    assert mine == simulate_chain(chain, costs, found.schedule)  # type: ignore[union-attr]


@given(costed_joins(), st.data())
def test_any_order_of_branches_leaves_nothing_behind(
    costed: tuple[Join, JoinCosts], data: st.DataObject
) -> None:
    """Forwards and backwards of the branches in any order: no leak, peaks above what is held."""
    join, costs = costed
    first = join.first_stages
    branches = range(len(join.branches))
    steps = [b for b in branches for _ in join.branches[b].stages]
    done = [0] * len(join.branches)
    ops: list[Op] = []
    for b in data.draw(st.permutations(steps)):
        ops.append(Forward(first[b] + done[b], Keep.ALL))
        done[b] += 1
    trunk = range(first[-2], first[-1])
    ops += [Forward(i, Keep.ALL) for i in trunk]
    ops += [Backward(i) for i in reversed(trunk)]
    for b in data.draw(st.permutations(steps)):
        done[b] -= 1
        ops.append(Backward(first[b] + done[b]))
    timeline = simulate(join, costs, Schedule(tuple(ops)))
    for event in timeline.events:
        assert event.held_bytes <= event.peak_bytes or isinstance(event.op, Backward)
    left = costs.fixed_bytes + costs.trunk_done_bytes + sum(costs.left_bytes)
    assert timeline.events[-1].held_bytes == left
    total = sum(c.forward_s + c.backward_s for stages in costs.lines for c in stages)
    assert timeline.makespan_s == total
