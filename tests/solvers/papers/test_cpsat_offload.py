from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from fxremat.ir import Costs, Infeasible, Link, Problem, Solved, StageCosts, TimedOut
from fxremat.solvers.papers.cpsat import offload
from fxremat.solvers.papers.offload import dp
from tests.examples import examples
from tests.paper_terms import chain_from_sizes, symmetric_link
from tests.reference.brute.offload import Transfers, least_budget, shortest_s
from tests.reference.simulate import check
from tests.solvers.papers.test_offload import ORDER_COSTS_TIME, TICK_S, TWO_LINKS
from tests.strategies import HUGE_SECONDS, HUGE_SIZES, stage_costs

TICKS = st.integers(0, 5).map(float)
UNITS = st.integers(0, 4)
SPARE = st.integers(0, 10)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    most: int,
    links: st.SearchStrategy[Link],
    sizes: st.SearchStrategy[int] = UNITS,
    seconds: st.SearchStrategy[float] = TICKS,
    spare: st.SearchStrategy[int] = SPARE,
) -> Problem:
    """Feasible problems, near the least budget, of boundaries that share nothing."""
    count = draw(st.integers(1, most))
    boundaries = [draw(sizes) for _ in range(count + 1)]
    saved = [size + draw(sizes) for size in boundaries[1:]]
    costs = Costs(draw(st.tuples(*[stage_costs(sizes, seconds)] * count)), draw(sizes))
    chain, link = chain_from_sizes(boundaries, saved), draw(links)
    least = offload.solve(Problem(chain, costs, 0, link))
    least_bytes = least.least_budget_bytes if isinstance(least, Infeasible) else 0
    return Problem(chain, costs, least_bytes + draw(spare), link)


def solved(problem: Problem, *, interruptible: bool, ordered: bool = True) -> Solved:
    found = offload.solve(problem, interruptible=interruptible, ordered=ordered)
    assert isinstance(found, Solved)
    return found


def check_optimum(problem: Problem, *, interruptible: bool, ordered: bool) -> None:
    """Equal to the search tick by tick, and to the replay of the schedule."""
    found = solved(problem, interruptible=interruptible, ordered=ordered)
    transfers = Transfers.INTERRUPTIBLE if interruptible else Transfers.WHOLE
    tick_s = 0.5 if interruptible else 1.0
    expected_s = shortest_s(problem, transfers, tick_s=tick_s, ordered=ordered)
    stages = problem.costs.stages
    event(f"waits: {expected_s > sum(s.forward_s + s.backward_s for s in stages)}")
    assert found.makespan_s == expected_s
    replayed = check(problem, found.schedule, fluid=interruptible)
    assert replayed.makespan_s == found.makespan_s


WHOLE_LINKS = st.sampled_from([symmetric_link(1.0), symmetric_link(1.0, shared=True)])
HALF_LINKS = st.sampled_from([symmetric_link(2.0), symmetric_link(2.0, shared=True)])
UNEQUAL_LINKS = st.sampled_from([Link(2.0, 1.0), Link(1.0, 2.0), Link(2.0, 1.0, shared=True)])


@given(problems(most=4, links=WHOLE_LINKS), st.booleans())
def test_whole_equals_the_exhaustive_search(problem: Problem, ordered: bool) -> None:
    check_optimum(problem, interruptible=False, ordered=ordered)


@given(problems(most=4, links=UNEQUAL_LINKS, sizes=UNITS.map(lambda n: 2 * n)), st.booleans())
def test_whole_on_unequal_lanes(problem: Problem, ordered: bool) -> None:
    check_optimum(problem, interruptible=False, ordered=ordered)


@given(problems(most=4, links=HALF_LINKS))
def test_interruptible_equals_the_exhaustive_search(problem: Problem) -> None:
    check_optimum(problem, interruptible=True, ordered=True)


@pytest.mark.slow
@given(problems(most=5, links=WHOLE_LINKS), st.booleans())
def test_whole_on_many(problem: Problem, ordered: bool) -> None:
    check_optimum(problem, interruptible=False, ordered=ordered)


@pytest.mark.slow
@given(problems(most=5, links=HALF_LINKS))
def test_interruptible_on_many(problem: Problem) -> None:
    check_optimum(problem, interruptible=True, ordered=True)


@given(problems(most=4, links=WHOLE_LINKS, spare=st.just(0)), st.booleans())
def test_infeasible_where_the_search_finds_nothing(problem: Problem, interruptible: bool) -> None:
    transfers = Transfers.INTERRUPTIBLE if interruptible else Transfers.WHOLE
    assert least_budget(problem, transfers) == problem.budget_bytes
    if problem.budget_bytes:
        less = Problem(problem.chain, problem.costs, problem.budget_bytes - 1, problem.link)
        found = offload.solve(less, interruptible=interruptible)
        assert found == Infeasible(problem.budget_bytes)


@pytest.mark.parametrize("problem", [ORDER_COSTS_TIME, TWO_LINKS])
def test_order_costs_time(problem: Problem) -> None:
    """Lemma 3 does not hold; the search here is in order, as DYNPROG's is."""
    found = solved(problem, interruptible=True)
    best = dp.solve(problem, relaxed=True)
    assert isinstance(best, Solved)
    assert found.makespan_s == best.makespan_s
    assert found.makespan_s > shortest_s(problem, Transfers.INTERRUPTIBLE, tick_s=TICK_S)


@examples(0.4)
@given(problems(most=4, links=WHOLE_LINKS))
def test_freedom_is_worth_something(problem: Problem) -> None:
    """Interruptions, and any order, can only shorten the step."""
    whole = solved(problem, interruptible=False)
    assert solved(problem, interruptible=True).makespan_s <= whole.makespan_s
    assert solved(problem, interruptible=False, ordered=False).makespan_s <= whole.makespan_s


HUGE_LINKS = st.builds(Link, *[st.floats(1e6, 1e12)] * 2, st.booleans())


@given(
    problems(
        most=5,
        links=HUGE_LINKS,
        sizes=HUGE_SIZES,
        seconds=HUGE_SECONDS,
        spare=st.integers(0, 1 << 50),
    ),
    st.booleans(),
)
def test_sizes_and_times_of_any_magnitude(problem: Problem, interruptible: bool) -> None:
    """Within the bytes; and the time is that of the replay, up to rounding (see ``scale``)."""
    found = offload.solve(problem, interruptible=interruptible, ordered=True, time_limit_s=5.0)
    if isinstance(found, TimedOut):
        found = found.incumbent
    assert isinstance(found, Solved)
    replayed = check(problem, found.schedule, fluid=interruptible)
    stages, link, chain = problem.costs.stages, problem.link, problem.chain
    assert link is not None
    moved_bytes = sum(storage.nbytes for storage in chain.storages)
    compute_s = sum(s.forward_s + s.backward_s for s in stages)
    slowest = min(link.offload_bytes_per_s, link.prefetch_bytes_per_s)
    near_s = 2.0**-40 * (compute_s + 2 * moved_bytes / slowest)
    assert replayed.makespan_s <= found.makespan_s + near_s
    assert found.makespan_s >= compute_s - near_s


def turned_around() -> Problem:
    """Four stages, all activations of 4 bytes; two of them have to go."""
    chain = chain_from_sizes([4, 4, 4, 4, 0], [4, 4, 4, 0])
    costs = Costs(tuple([StageCosts(2.0, 4.0, 2.0, 0, 0, 0, 0, 0)] * 4))
    return Problem(chain, costs, 8, symmetric_link(1.0))


@pytest.mark.parametrize("interruptible", [False, True])
def test_by_hand(interruptible: bool) -> None:
    """8 bytes hold what an operation reads and writes; ``x_0`` is gone 4 s after the start.

    F_0 F_1 fill 0 … 4 s with x_0 gone at 4, but F_1 has no room before 4 s (whole) or writes
    x_2 at 4 s as well (fluid). Either way each forward waits for the link, and so backwards.
    """
    problem = turned_around()
    found = solved(problem, interruptible=interruptible)
    replayed = check(problem, found.schedule, fluid=interruptible)
    assert replayed.makespan_s == found.makespan_s > 24.0
    transfers = Transfers.INTERRUPTIBLE if interruptible else Transfers.WHOLE
    assert found.makespan_s == shortest_s(problem, transfers, tick_s=1.0, ordered=True)


@pytest.mark.parametrize("interruptible", [False, True])
def test_without_a_link_nothing_moves(interruptible: bool) -> None:
    problem = turned_around()
    plenty = Problem(problem.chain, problem.costs, 16)
    found = solved(plenty, interruptible=interruptible)
    assert found.schedule.computations == found.schedule.ops
    assert found.makespan_s == 24.0
    less = Problem(problem.chain, problem.costs, 15)
    assert offload.solve(less, interruptible=interruptible) == Infeasible(16)


@pytest.mark.parametrize("interruptible", [False, True])
def test_no_time_leaves_a_bound(interruptible: bool) -> None:
    found = offload.solve(turned_around(), interruptible=interruptible, time_limit_s=0.0)
    assert isinstance(found, TimedOut)
    assert found.incumbent is None
    assert found.bound_s >= 24.0
