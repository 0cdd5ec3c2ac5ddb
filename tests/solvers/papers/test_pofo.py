from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fxremat.ir import (
    Chain,
    Costs,
    Forward,
    Infeasible,
    Keep,
    Link,
    Offload,
    Prefetch,
    Problem,
    Solved,
    StageCosts,
)
from fxremat.solvers import rotor
from fxremat.solvers.papers import pofo
from tests.paper_terms import chain_from_sizes, costs_from_paper, symmetric_link
from tests.problems import keep_all
from tests.reference.brute import pofo as brute
from tests.reference.plain_pofo import plain_pofo
from tests.reference.simulate import check
from tests.strategies import SIZES, any_costs, costed_chains, huge_chains, paper_costs

RATES = st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0, 16.0])
"""Bytes a second. A byte takes a power of two of seconds: sums are exact in any order."""

LINKS = st.builds(Link, RATES, RATES, st.booleans())


@st.composite
def lines(draw: st.DrawFn, *, most: int) -> tuple[Chain, Costs]:
    """Chains whose boundaries share nothing: all of it may be offloaded."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(SIZES, min_size=count + 1, max_size=count + 1))
    more = draw(st.lists(SIZES, min_size=count, max_size=count))
    saved = [size + extra for size, extra in zip(sizes[1:], more, strict=True)]
    chain = chain_from_sizes(sizes, saved)
    return chain, draw(draw(st.sampled_from([any_costs, paper_costs]))(chain))


@st.composite
def problems(draw: st.DrawFn, *, most: int) -> Problem:
    """Budgets from one byte less than the least on."""
    kind = draw(st.sampled_from([lines, lines, costed_chains]))
    problem = Problem(*draw(kind(most=most)), 0, draw(LINKS))
    spare = draw(st.one_of(st.sampled_from([-1, 0, 1]), st.integers(0, 20)))
    return with_budget(problem, max(0, least_bytes(problem) + spare))


def with_budget(problem: Problem, budget_bytes: int) -> Problem:
    return Problem(problem.chain, problem.costs, budget_bytes, problem.link)


def least_bytes(problem: Problem) -> int:
    found = pofo.solve(with_budget(problem, 0))
    return found.least_budget_bytes if isinstance(found, Infeasible) else 0


def exact(problem: Problem, *, relaxed: bool = True) -> Solved | Infeasible:
    """Solve with slots of one byte."""
    found = pofo.solve(problem, slots=max(1, problem.budget_bytes), relaxed=relaxed)
    assert isinstance(found, Solved | Infeasible)
    return found


def exact_outcome(problem: Problem) -> pofo.Outcome:
    """The whole search with slots of one byte."""
    found = pofo.explore(problem, slots=max(1, problem.budget_bytes))
    assert isinstance(found, pofo.Outcome)
    return found


def replayed(problem: Problem, found: Solved, *, fluid: bool, error: float = 0.0) -> None:
    """It takes as long as is said, within the budget.

    With fluid transfers a schedule made for whole ones takes no longer than that.
    """
    timeline = check(problem, found.schedule, fluid=fluid)
    rounds = fluid and error > 0  # small whole numbers add up exactly
    rounding_bytes, rounding_s = rounding(problem, found) if rounds else (0.0, 0.0)
    assert timeline.peak_bytes <= problem.budget_bytes + int(rounding_bytes)
    assert all(event.start_s >= 0.0 for event in timeline.events)
    assert math.isfinite(found.makespan_s)
    if fluid and is_of_whole_transfers(found):
        assert timeline.makespan_s <= found.makespan_s * (1 + error) + rounding_s
        timeline, rounding_s = check(problem, found.schedule), 0.0
    assert timeline.makespan_s == pytest.approx(found.makespan_s, rel=error, abs=rounding_s)


def rounding(problem: Problem, found: Solved) -> tuple[float, float]:
    """What seconds times bytes per second may be off in a fluid replay: mostly no whole byte.

    Returns bytes, and the seconds that a transfer of as many takes.
    """
    assert problem.link is not None
    rates = (problem.link.offload_bytes_per_s, problem.link.prefetch_bytes_per_s)
    moved_bytes = max(rates) * 3 * found.makespan_s  # of three lanes
    nbytes = 2.0**-44 * (problem.budget_bytes + moved_bytes)
    return nbytes, nbytes / min(rates)


def is_of_whole_transfers(found: Solved) -> bool:
    """One for fluid ones has a prefetch of no bytes at the loss point, if anything travels."""
    parts = (op.nbytes for op in found.schedule if isinstance(op, Offload | Prefetch))
    return all(nbytes is None for nbytes in parts)


def pure_offloading_s(problem: Problem) -> float:
    """The best of the search that recomputes nothing; infinite if nothing fits."""
    runs = [
        run
        for run in brute.runs(problem.chain, problem.costs)
        if all(op.keep is Keep.ALL for step in run.steps for op in step.ops if is_forward(op))
        and sum(len(step.ops) for step in run.steps) == 2 * len(problem.chain)
    ]
    return min(brute.best_seconds(problem, run)[0] for run in runs)


def is_forward(op: object) -> bool:
    return isinstance(op, Forward)


def check_all(problem: Problem) -> None:
    found, expected = exact(problem), brute.solve(problem)
    if isinstance(expected, Infeasible):
        assert found == expected
        assert problem.budget_bytes < expected.least_budget_bytes
        assert isinstance(rotor.solve(problem), Infeasible)
        return
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    outcome = exact_outcome(problem)
    assert outcome.exact
    assert outcome.bound_s == outcome.seconds == expected.makespan_s
    whole = exact(problem, relaxed=False)
    assert isinstance(whole, Solved)
    assert found.makespan_s == min(outcome.seconds, whole.makespan_s)
    replayed(problem, found, fluid=True)
    replayed(problem, whole, fluid=False)
    assert found.makespan_s <= pure_offloading_s(problem)
    alone = rotor.solve(problem, slots=max(1, problem.budget_bytes))
    if isinstance(alone, Solved):
        assert max(found.makespan_s, whole.makespan_s) <= alone.makespan_s


def both_at_once() -> Problem:
    """Neither recomputation nor offloading alone is as good: 10.5 s and 13.5 s against 8.5 s."""
    sizes = [1, 1, 1, 1, 0]
    costs = costs_from_paper(
        forward_s=[0.25, 2.0, 0.5, 0.0],
        backward_s=[0.5, 4.0, 1.0, 0.0],
        gradient_bytes=sizes,
        saved_bytes=[8, 4, 8, 0],
        forward_extra_bytes=[0, 0, 0, 0],
        backward_extra_bytes=[0, 0, 0, 0],
    )
    chain = chain_from_sizes(sizes, [8, 4, 8, 0])
    return Problem(chain, costs, 15, symmetric_link(2.0))


def input_leaves_first() -> Problem:
    """Forward 1 fits once boundary 0 has left; that is cheaper than to offload boundary 1."""
    sizes = [4, 16, 1, 0]
    costs = costs_from_paper(
        forward_s=[1.0, 1.0, 1.0],
        backward_s=[1.0, 1.0, 1.0],
        gradient_bytes=[0, 0, 0, 4],
        saved_bytes=[16, 1, 0],
        forward_extra_bytes=[0, 0, 16],
        backward_extra_bytes=[0, 0, 0],
    )
    return Problem(chain_from_sizes(sizes, [16, 1, 0]), costs, 24, symmetric_link(1.0))


def copies_across_the_turn() -> Problem:
    """The offload of boundary 0 is still under way when the backward begins: 12.25 s.

    The supplement's model wants it to be done before, and takes 13.25 s.
    """
    sizes = [2, 0, 1, 4, 0]
    costs = costs_from_paper(
        forward_s=[0.25, 1.5, 0.25, 1.0],
        backward_s=[2.0, 0.5, 1.5, 1.25],
        gradient_bytes=[2, 2, 4, 0, 4],
        saved_bytes=[2, 1, 7, 0],
        forward_extra_bytes=[3, 2, 1, 0],
        backward_extra_bytes=[1, 1, 1, 0],
    )
    return Problem(chain_from_sizes(sizes, [2, 1, 7, 0]), costs, 13, symmetric_link(0.5))


@given(problems(most=4))
@example(copies_across_the_turn())
@example(both_at_once())
@example(input_leaves_first())
def test_equals_the_exhaustive_search(problem: Problem) -> None:
    check_all(problem)


@pytest.mark.slow
@given(problems(most=6))
def test_equals_the_exhaustive_search_often(problem: Problem) -> None:
    check_all(problem)


@given(problems(most=4))
def test_least_budget_is_the_least(problem: Problem) -> None:
    least = least_bytes(problem)
    enough = with_budget(problem, least)
    found = pofo.solve(enough, slots=1, relaxed=True)
    assert isinstance(found, Solved)
    replayed(enough, found, fluid=True)
    if least:
        assert brute.solve(with_budget(problem, least - 1)) == Infeasible(least)


def test_relaxed_is_no_slower_than_whole_transfers_across_the_turn() -> None:
    problem = copies_across_the_turn()
    for relaxed in (True, False):
        found = exact(problem, relaxed=relaxed)
        assert isinstance(found, Solved)
        assert found.makespan_s == 12.25
        replayed(problem, found, fluid=relaxed)


def test_the_bound_is_one_of_schedules_without_copies_across_the_turn() -> None:
    problem = copies_across_the_turn()
    outcome, expected = exact_outcome(problem), brute.solve(problem)
    assert isinstance(expected, Solved)
    assert outcome.bound_s == outcome.seconds == expected.makespan_s == 13.25


def test_both_at_once() -> None:
    problem = both_at_once()
    found = exact(problem)
    assert isinstance(found, Solved)
    assert found.makespan_s == 8.5
    assert any(isinstance(op, Offload) for op in found.schedule)
    assert any(op.keep is Keep.INPUT for op in found.schedule if isinstance(op, Forward))
    replayed(problem, found, fluid=True)
    alone = rotor.solve(problem, slots=problem.budget_bytes)
    assert isinstance(alone, Solved)
    assert alone.makespan_s == 10.5
    assert pure_offloading_s(problem) == 13.5


@given(costed_chains(), st.integers(0, 20))
def test_without_a_link_it_is_rotor(costed: tuple[Chain, Costs], spare: int) -> None:
    problem = Problem(*costed, rotor.least_budget(*costed)[0] + spare)
    found, expected = exact(problem), rotor.solve(problem, slots=max(1, problem.budget_bytes))
    assert isinstance(found, Solved)
    assert isinstance(expected, Solved)
    assert found.makespan_s == expected.makespan_s
    less = with_budget(problem, max(0, problem.budget_bytes - spare - 1))
    if isinstance(rotor.solve(less), Infeasible):
        assert exact(less) == rotor.solve(less)


def test_a_budget_that_fits_all_moves_and_recomputes_nothing() -> None:
    problem = keep_all().problem
    problem = Problem(problem.chain, problem.costs, problem.budget_bytes, symmetric_link(1e9))
    for relaxed in (True, False):
        found = exact(problem, relaxed=relaxed)
        assert isinstance(found, Solved)
        assert all(isinstance(op, Forward) is (n < 3) for n, op in enumerate(found.schedule))
        assert all(op.keep is Keep.ALL for op in found.schedule if isinstance(op, Forward))


def regular(count: int, *, seed: int) -> Problem:
    """Sizes of few bytes, and times in which the link moves a whole number of them."""
    draw = random.Random(seed)
    sizes = [draw.randint(0, 3) for _ in range(count + 1)]
    saved = [size + draw.randint(0, 3) for size in sizes[1:]]
    costs = costs_from_paper(
        forward_s=[draw.randint(0, 4) / 4 for _ in range(count)],
        backward_s=[draw.randint(0, 6) / 4 for _ in range(count)],
        gradient_bytes=sizes,
        saved_bytes=saved,
        forward_extra_bytes=[draw.randint(0, 1) for _ in range(count)],
        backward_extra_bytes=[draw.randint(0, 1) for _ in range(count)],
    )
    return Problem(chain_from_sizes(sizes, saved), costs, 0, symmetric_link(4.0))


@pytest.mark.parametrize("count", [7, 12, 16, 24])
@pytest.mark.parametrize("spare", [0, 3, 8])
def test_equals_the_supplement(count: int, spare: int) -> None:
    """Over all its states; from 16 stages on threads share the work."""
    problem = regular(count, seed=count)
    problem = with_budget(problem, least_bytes(problem) + spare)
    outcome = exact_outcome(problem)
    assert outcome.seconds == plain_pofo(problem)
    replayed(problem, outcome.fluid(), fluid=True)
    replayed(problem, outcome.whole(), fluid=False)
    assert outcome.fluid().makespan_s == min(outcome.seconds, outcome.whole().makespan_s)


@pytest.mark.parametrize("labels", [1, 3, 10, 600])
def test_few_labels_still_give_a_schedule(labels: int) -> None:
    problem = regular(24, seed=24)
    problem = with_budget(problem, least_bytes(problem) + 3)
    slots = problem.budget_bytes
    found = pofo.explore(problem, slots=slots, labels=labels)
    assert isinstance(found, pofo.Outcome)
    best_s = plain_pofo(problem)
    assert found.bound_s <= best_s <= found.seconds
    assert not found.exact or found.seconds == best_s
    assert labels < 600 or found.exact
    solved = pofo.solve(problem, slots=slots, labels=labels, relaxed=True)
    assert isinstance(solved, Solved)
    assert solved.makespan_s == min(found.seconds, found.whole().makespan_s)
    replayed(problem, solved, fluid=True)


@given(
    huge_chains(most=16),
    st.builds(Link, st.floats(1e3, 1e12), st.floats(1e3, 1e12), st.booleans()),
    st.integers(1, 60),
    st.floats(0, 1),
)
def test_rounding_keeps_the_promise(
    costed: tuple[Chain, Costs], link: Link, slots: int, position: float
) -> None:
    problem = Problem(*costed, 0, link)
    everything = sum(storage.nbytes for storage in costed[0].storages) + (1 << 51)
    problem = with_budget(problem, least_bytes(problem) + int(position**8 * everything))
    for fluid in (True, False):
        found = pofo.solve(problem, slots=slots, labels=50, relaxed=fluid)
        assert isinstance(found, Solved)
        replayed(problem, found, fluid=fluid, error=1e-9)


def test_coarse_slots_do_not_stop_what_is_small() -> None:
    """A stage moves half a byte; slots are of ten. In a table of slots nothing would arrive."""
    count = 40
    costs = costs_from_paper(
        forward_s=[0.5] * count,
        backward_s=[0.5] * count,
        gradient_bytes=[0] * (count + 1),
        saved_bytes=[10] * count,
        forward_extra_bytes=[0] * count,
        backward_extra_bytes=[0] * count,
    )
    chain = chain_from_sizes([0] + [10] * count, [10] * count)
    problem = Problem(chain, costs, 390, symmetric_link(1.0))
    found = pofo.solve(problem, slots=39, relaxed=True)
    assert isinstance(found, Solved)
    assert found.makespan_s == 40.0
    assert sum(isinstance(op, Prefetch) for op in found.schedule) > 2
    replayed(problem, found, fluid=True)


def test_malformed_options_are_refused() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        pofo.solve(both_at_once(), slots=0)
    with pytest.raises(ValueError, match="labels is 0"):
        pofo.solve(both_at_once(), labels=0)


def test_sizes_that_do_not_add_up_are_refused() -> None:
    chain = chain_from_sizes([1 << 61, 1 << 61], [1 << 61])
    costs = Costs((StageCosts(1.0, 1.0, 1.0, 0, 0, 0, 0, 1),))
    with pytest.raises(ValueError, match="the sizes add up to"):
        pofo.solve(Problem(chain, costs, 1 << 40, symmetric_link(1.0)))


@pytest.mark.parametrize("seed", range(5))
def test_plans_for_a_tighter_budget_hold_within_a_larger_one(seed: int) -> None:
    tight = regular(10, seed=seed)
    tight = with_budget(tight, least_bytes(tight) + 3)
    outcome = pofo.explore(tight, slots=max(1, tight.budget_bytes))
    assert isinstance(outcome, pofo.Outcome)
    for more in (0, 2, 5):
        large = with_budget(tight, tight.budget_bytes + more)
        found = outcome.whole(large.budget_bytes)
        replayed(large, found, fluid=False)
        assert found.makespan_s <= outcome.whole().makespan_s
    with pytest.raises(ValueError, match="the plans are for"):
        outcome.whole(tight.budget_bytes - 1)
